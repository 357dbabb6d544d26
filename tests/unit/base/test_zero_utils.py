"""Helpers around ZeRO, and the memory estimates."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.runtime.zero import utils
from deepspeed.runtime.zero.memory_estimators import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    model_state_bytes,
    model_to_params,
)

MILLION = 1_000_000


class Pair(NamedTuple):
    a: Any
    b: Any


class Foreign:
    pass


class Output(dict):
    note = ""


def test_map_over_nested_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(t=torch.ones(1))
    output.note = "kept"
    value = {"list": [torch.ones(1), 2], "pair": Pair(torch.ones(1), None), "out": output}
    mapped = utils.apply_to_tensors_only(lambda tensor: tensor + 1, value, lambda v: f"cannot look into {v}")
    assert mapped["list"][0].item() == mapped["pair"].a.item() == mapped["out"]["t"].item() == 2.0
    assert mapped["list"][1] == 2
    assert mapped["out"].note == "kept"
    assert value["list"][0].item() == 1.0
    assert capsys.readouterr().out == ""
    utils.apply_to_tensors_only(lambda tensor: tensor, [Foreign()], lambda v: f"cannot look into {type(v).__name__}")
    assert "cannot look into Foreign" in capsys.readouterr().out


def test_questions_about_types() -> None:
    assert utils.is_builtin_type([1])
    assert not utils.is_builtin_type(Foreign())
    assert utils.isinstance_namedtuple(Pair(1, 2))
    assert not utils.isinstance_namedtuple((1, 2))
    param = nn.Parameter(torch.ones(1))
    assert not utils.is_zero_param(param)
    param.ds_id = 3  # type: ignore[attr-defined]
    assert utils.is_zero_param(param)
    assert not utils.is_zero_param(3)
    assert utils.get_norm_dtype() == torch.float64


def test_tested_optimizers() -> None:
    params = [nn.Parameter(torch.ones(1))]

    class Mine(torch.optim.AdamW):
        pass

    assert utils.is_zero_supported_optimizer(torch.optim.AdamW(params))
    assert not utils.is_zero_supported_optimizer(Mine(params))
    assert not utils.is_zero_supported_optimizer(torch.optim.RMSprop(params))
    assert torch.optim.Adam in utils.ZERO_SUPPORTED_OPTIMIZERS
    assert all(isinstance(entry, type) for entry in utils.ZERO_SUPPORTED_OPTIMIZERS)


def test_packing_into_one_buffer() -> None:
    tensors = [torch.arange(3.0), torch.arange(4.0).view(2, 2), torch.zeros(0)]
    mapping = utils.get_mapping_to_flat_buffer(tensors)
    assert [(offset, numel) for _, offset, numel in mapping] == [(0, 3), (3, 4), (7, 0)]
    buffer = utils.defragment(tensors)
    assert buffer.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert [tensor.shape for tensor in tensors] == [(3,), (2, 2), (0,)]
    buffer.fill_(5)
    assert tensors[0].tolist() == [5, 5, 5]
    assert tensors[1].tolist() == [[5, 5], [5, 5]]
    with pytest.raises(ValueError, match="one dtype and one device"):
        utils.defragment([torch.ones(1), torch.ones(1, dtype=torch.half)])
    with pytest.raises(ValueError, match="empty"):
        utils.defragment([])


def comparisons() -> list[str]:
    rank = dist.get_rank()
    assert utils.get_lst_from_rank0([rank, 5]) == [0, 5]
    utils.assert_ints_same_as_other_ranks([7, 8])
    utils.assert_lst_len_same_as_other_ranks([0] * 3)
    texts = []
    for call in (
        lambda: utils.assert_ints_same_as_other_ranks([1, rank]),
        lambda: utils.assert_lst_len_same_as_other_ranks([0] * (rank + 1)),
    ):
        try:
            call()
        except RuntimeError as error:
            texts.append(str(error))
    return texts


def test_agreement_between_ranks(ranks: Any) -> None:
    zero, one = ranks(comparisons)
    assert zero == []
    assert one[0].startswith("rank 1 has the values [1, 1] where rank 0 has [1, 0]")
    assert one[1].startswith("rank 1 has the values [2] where rank 0 has [1]")


def test_agreement_with_oneself() -> None:
    utils.assert_ints_same_as_other_ranks([1])
    assert utils.get_lst_from_rank0([3]) == [3]


# Bytes a parameter: parameters, gradients, master copy and Adam.
@pytest.mark.parametrize(
    ("stage", "dtype", "ranks", "expected"),
    (
        (0, torch.bfloat16, 4, (2, 2, 12)),
        (1, torch.bfloat16, 4, (2, 2, 3)),
        (2, torch.float16, 4, (2, 0.5, 3)),
        (0, torch.float32, 4, (4, 4, 8)),
        (1, torch.float32, 4, (4, 4, 2)),
        (2, torch.float32, 4, (4, 1, 2)),
    ),
)
def test_model_states(stage: int, dtype: torch.dtype, ranks: int, expected: tuple[float, ...]) -> None:
    found = model_state_bytes(MILLION, ranks, stage, model_dtype=dtype)
    assert (found.parameters, found.gradients, found.optimizer) == tuple(per * MILLION for per in expected)
    assert found.device == sum(expected) * MILLION
    assert found.host == 0


def test_other_formats_and_optimizers() -> None:
    wide = model_state_bytes(MILLION, 2, 2, grad_dtype=torch.float32, states_per_param=1)
    assert (wide.gradients, wide.optimizer) == (2 * MILLION, 4 * MILLION)
    low = model_state_bytes(MILLION, 1, 1, master_dtype=torch.bfloat16, state_dtype=torch.bfloat16)
    assert low.optimizer == 4 * MILLION
    at_once = model_state_bytes(MILLION, 4, 1, gradient_accumulation_steps=1)
    assert at_once == model_state_bytes(MILLION, 4, 2)
    offloaded = model_state_bytes(MILLION, 2, 2, cpu_offload=True)
    assert (offloaded.device, offloaded.host) == (2 * MILLION, (1 + 6) * MILLION)
    with pytest.raises(ValueError, match="`stage` must be 0, 1, 2 or 3, found 4"):
        model_state_bytes(1, 1, 4)


def test_estimates_for_stage_2() -> None:
    assert estimate_zero2_model_states_mem_needs(MILLION, 4, 1, cpu_offload=False) == (24 * MILLION, 5_500_000)
    host, device = estimate_zero2_model_states_mem_needs(MILLION, 8, 2, True, 1.0)
    assert device == 2 * MILLION
    assert host == 8 * 4 * MILLION  # the fp32 model each rank builds outweighs its share of 14 bytes
    assert estimate_zero2_model_states_mem_needs(MILLION, 1, 1, True, 1.0) == (14 * MILLION, 2 * MILLION)
    assert estimate_zero2_model_states_mem_needs(MILLION, 4, cpu_offload=False, stage=1)[1] == 7 * MILLION


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    estimate_zero2_model_states_mem_needs_all_cold(1_000 * MILLION, 8, 2)
    cold = capsys.readouterr().out.splitlines()
    assert cold[1] == "HW: Setup with 2 nodes, 8 GPUs per node."
    assert cold[2].startswith("SW: Model with 1000M total params")
    assert [line.split("|")[2].strip() for line in cold[4:]] == ["offload_optimizer=cpu", "offload_optimizer=none"]
    tied = nn.Linear(1000, 1000)
    model = nn.Sequential(tied, tied)
    assert model_to_params(model) == 1_001_000
    estimate_zero2_model_states_mem_needs_all_live(model, 1, 1)
    assert "SW: Model with 1M total params" in capsys.readouterr().out
