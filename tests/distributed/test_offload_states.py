"""Moving states away and back between phases of training changes no number, and nothing runs without them."""

from __future__ import annotations

import pytest
import torch

from tests.harness.models import SPECS
from tests.harness.parity import OPTIMIZERS


def _engine(stage: int, bf16: bool):
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": bf16},
        "optimizer": OPTIMIZERS["adamw"].block,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 50, "stage3_max_live_parameters": 0},
    }
    return deepspeed.initialize(model=SPECS["odd"].build(), config=config)[0]


def _step(engine, index: int) -> None:
    spec = SPECS["odd"]
    rank = torch.distributed.get_rank()
    engine.backward(spec.loss(engine, spec.batch(index, rank, 2), index, rank))
    engine.step()


def _masters(engine) -> list[torch.Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    params = list(engine.module.parameters())
    return [safe_get_full_fp32_param(p) for p in params] + [safe_get_full_optimizer_state(p, "exp_avg") for p in params]


def _addresses(engine) -> list[int]:
    states = engine.optimizer.optimizer.state.values()
    return [value.data_ptr() for state in states for value in state.values() if torch.is_tensor(value)]


def _come_and_go(stage: int, bf16: bool, kinds: tuple[str, ...] | None) -> None:
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
    from deepspeed.runtime.zero.offload_states import get_state_devices

    engine, twin = _engine(stage, bf16), _engine(stage, bf16)
    include = None if kinds is None else [OffloadStateTypeEnum(kind) for kind in kinds]
    for index in range(3):
        _step(engine, index)
        _step(twin, index)
        engine.offload_states(include=include, pin_memory=False)
        before = _addresses(engine)
        engine.offload_states(include=include)  # again: nothing more to do
        assert get_state_devices(engine, OffloadStateTypeEnum.optim_states) == {torch.device("cpu")}
        for one, two in zip(_masters(engine), _masters(twin), strict=True):
            assert torch.equal(one, two)  # what is away can be read
        with pytest.raises(RuntimeError, match=r"step: .* since offload_states\(\); call reload_states"):
            engine.optimizer.step()
        engine.reload_states()
        if kinds is None or "optim_states" in kinds:
            assert before != _addresses(engine)  # they have been somewhere else
    for one, two in zip(_masters(engine), _masters(twin), strict=True):
        assert torch.equal(one, two)
    engine.destroy()
    twin.destroy()


@pytest.mark.parametrize("kinds", (None, ("optim_states", "hp_params"), ("lp_params", "contiguous_grad_buffer")))
@pytest.mark.parametrize(("stage", "bf16"), ((1, True), (2, False), (3, True)))
def test_states_come_and_go(pool, stage: int, bf16: bool, kinds) -> None:
    pool.run(2, _come_and_go, stage, bf16, kinds)


def _errors() -> None:
    import deepspeed
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum

    engine = _engine(2, True)
    with pytest.raises(ValueError, match="offload_states: device 'nvme'"):
        engine.offload_states(device=OffloadDeviceEnum.nvme)
    with pytest.raises(ValueError, match="device 'gpu'; states can be moved to 'cpu'"):
        engine.offload_states(device="gpu")
    for include, said in ((["optim_states", "adam"], "include has 'adam'; known kinds"), ([7], "include has 7")):
        with pytest.raises(ValueError, match=said):
            engine.offload_states(include=include)
    for one_kind in ("optim_states", OffloadStateTypeEnum.optim_states):
        with pytest.raises(TypeError, match="include='optim_states'; expected a list"):
            engine.offload_states(include=one_kind)
    with pytest.raises(TypeError, match=r"reload_states.*expected True or False"):
        engine.reload_states(["optim_states"])
    engine.optimizer.away.refuse("none of these has moved anything")
    engine.offload_states(include=["optim_states"])  # names are as good as members
    assert engine.optimizer.away.kinds == {OffloadStateTypeEnum.optim_states}
    engine.reload_states()
    engine.offload_states(device=OffloadDeviceEnum.none)
    _step(engine, 0)
    engine.destroy()
    reader = deepspeed.initialize(
        model=SPECS["odd"].build(), config={"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
    )[0]
    with pytest.raises(AssertionError, match="no optimizer"):
        reader.offload_states()
    reader.destroy()


def test_what_cannot_be_moved_is_refused(pool) -> None:
    pool.run(1, _errors)
