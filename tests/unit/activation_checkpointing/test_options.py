"""Each option has its effect, in bytes, and none changes a bit of the result."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.runtime.activation_checkpointing import checkpointing, saved_inputs
from deepspeed.runtime.activation_checkpointing.arena import ActivationArena
from deepspeed.runtime.activation_checkpointing.checkpointing import checkpoint, checkpoint_statistics, configure
from deepspeed.runtime.activation_checkpointing.saved_inputs import (
    CheckpointStatistics,
    InputKeeper,
    ModelParallelShard,
)
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError


class Unit:
    """Model-parallel unit of one rank."""

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None) -> None:
        self._facts = (rank, size, group)

    def get_model_parallel_rank(self) -> int:
        return self._facts[0]

    def get_model_parallel_world_size(self) -> int:
        return self._facts[1]

    def get_model_parallel_group(self) -> Any:
        return self._facts[2]


def plain(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype, device=device)


def options() -> dict[str, Any]:
    return dataclasses.asdict(checkpointing._settings.options)


DEFAULTS = {
    "partition_activations": False,
    "cpu_checkpointing": False,
    "contiguous_memory_optimization": False,
    "number_checkpoints": None,
    "synchronize_checkpoint_boundary": False,
    "profile": False,
}
BLOCK = {"partition_activations": True, "number_checkpoints": 3, "profile": True}
CONFIG = {"train_batch_size": 1, "activation_checkpointing": BLOCK}


def test_configure_by_keywords() -> None:
    assert not checkpointing.is_configured()
    configure(None, partition_activations=None, checkpoint_in_cpu=False, synchronize=True)
    assert checkpointing.is_configured()
    assert options() == {**DEFAULTS, "synchronize_checkpoint_boundary": True}


@pytest.mark.parametrize("form", ("dict", "path", "parsed", "section"))
def test_configure_by_config_in_each_form(form: str, tmp_path: Path) -> None:
    source: Any = CONFIG
    if form == "path":
        source = str(tmp_path / "config.json")
        Path(source).write_text(json.dumps(CONFIG))
    elif form == "parsed":
        source = DeepSpeedConfig(CONFIG)
    elif form == "section":
        source = DeepSpeedConfig(CONFIG).activation_checkpointing_config
    configure(None, deepspeed_config=source)
    assert options() == {**DEFAULTS, **BLOCK}


def test_keywords_win_over_the_config() -> None:
    configure(None, deepspeed_config=CONFIG, partition_activations=False, num_checkpoints=7)
    assert options() == {**DEFAULTS, **BLOCK, "partition_activations": False, "number_checkpoints": 7}


def test_configuring_anew_forgets_the_former_options() -> None:
    configure(None, deepspeed_config=CONFIG)
    configure(None, profile=False)
    assert options() == DEFAULTS


@pytest.mark.parametrize(
    ("given", "missing"),
    (
        ({"contiguous_checkpointing": True}, "partition_activations"),
        ({"contiguous_checkpointing": True, "partition_activations": True}, "number_checkpoints"),
        ({"contiguous_checkpointing": True, "partition_activations": True, "num_checkpoints": 0}, "number_checkpoints"),
    ),
)
def test_contiguous_without_what_it_needs_is_refused(given: dict[str, Any], missing: str) -> None:
    with pytest.raises(DeepSpeedConfigError, match=missing):
        configure(None, **given)
    assert not checkpointing.is_configured()


def test_options_without_effect_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    configure(Unit(), partition_activations=True, checkpoint_in_cpu=True)
    lines = capsys.readouterr().out
    assert "activation_checkpointing.partition_activations has no effect: the model-parallel size is 1" in lines
    assert "activation_checkpointing.cpu_checkpointing has no effect" in lines
    configure(Unit(1, 4), partition_activations=True)
    assert capsys.readouterr().out == ""


def test_historical_names_show_the_settings() -> None:
    configure(Unit(2, 4, "group"), partition_activations=True, num_checkpoints=5)
    assert checkpointing.PARTITION_ACTIVATIONS is True
    assert checkpointing.CPU_CHECKPOINT is False
    assert (checkpointing.mp_rank, checkpointing.mp_size, checkpointing.mp_group) == (2, 4, "group")
    assert checkpointing.num_layers == 5
    checkpointing.set_num_layers(6)
    checkpointing.partition_activations_in_checkpoint(False)
    assert (checkpointing.num_layers, checkpointing.PARTITION_ACTIVATIONS) == (6, False)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = checkpointing.no_such_name


def test_partition_arithmetic() -> None:
    configure(Unit(2, 4))
    item = torch.zeros(10)
    assert checkpointing.get_partition_size(item) == 3
    assert checkpointing.get_partition_start(item) == 6
    assert checkpointing.is_activation_to_checkpoint(item)
    assert not checkpointing.is_activation_to_checkpoint(torch.zeros(3))
    assert not checkpointing.is_activation_to_checkpoint(torch.zeros(10, dtype=torch.int64))
    assert not checkpointing.is_activation_to_checkpoint("text")


def test_profile_prints_each_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    configure(None, profile=True)
    checkpoint(lambda x: checkpoint(torch.sin, x), torch.ones(2, requires_grad=True)).sum().backward()
    out = capsys.readouterr().out
    assert out.count("time (ms) | forward:") == 3  # outer, inner, inner while the outer one is recomputed
    assert out.count("time (ms) | backward:") == 2


def test_synchronize_waits_at_each_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[None] = []
    accelerator = checkpointing.get_accelerator()
    monkeypatch.setattr(accelerator, "synchronize", lambda device_index=None: waits.append(None))
    configure(None, synchronize=True)
    out = checkpoint(torch.sin, torch.ones(2, requires_grad=True)).sum()
    assert len(waits) == 2
    out.backward()
    assert len(waits) == 4


# Layouts: kept and restored tensors have the bits, shape and strides of the original.

LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, 2),
    "channels_last": lambda t: t[None].contiguous(memory_format=torch.channels_last),
    "gaps": lambda t: t[:, :, 1:4],
    "every_second": lambda t: t[::2],
    "expanded": lambda t: t[:, :1].expand(3, 4, 5),
    "expanded_transposed": lambda t: t[:, :1].expand(3, 4, 5).transpose(0, 1),
    "scalar": lambda t: t[0, 0, 0],
    "offset": lambda t: t[1],
    "half": lambda t: t.bfloat16(),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("way", ("host", "arena", "shard of one"))
def test_restored_input_equals_the_original_in_layout_too(name: str, way: str) -> None:
    base = torch.arange(60.0).view(3, 4, 5).requires_grad_()
    original = LAYOUTS[name](base * 1.0)
    keeper = {
        "host": InputKeeper(CheckpointStatistics(), to_host=True, is_on_device=lambda tensor: True),
        "arena": InputKeeper(CheckpointStatistics(), arena=ActivationArena(2, plain)),
        "shard of one": InputKeeper(CheckpointStatistics(), shard=ModelParallelShard(None, 0, 1)),
    }[way]
    stored, plans = keeper.keep([original])
    assert plans[0] is not None
    assert stored[0].untyped_storage().data_ptr() != original.untyped_storage().data_ptr()
    (restored,) = keeper.restore(stored, plans)
    assert torch.equal(restored, original)
    assert (restored.shape, restored.stride(), restored.dtype) == (original.shape, original.stride(), original.dtype)
    assert restored.requires_grad
    assert not restored.is_leaf
    if not name.startswith("expanded"):  # elements that share memory cannot be written
        with torch.no_grad():
            restored.zero_()
    (again,) = keeper.restore(stored, plans)
    assert torch.equal(again, original)


def test_inputs_that_stay_as_they_are() -> None:
    overlapping = torch.arange(6.0).as_strided((4, 3), (1, 1))
    items = [
        torch.arange(4),
        torch.tensor([True]),
        nn.Parameter(torch.ones(4)),
        torch.ones(4, requires_grad=True),
        torch.zeros(0),
        torch.ones(4).to_sparse(),
        overlapping,
    ]
    keeper = InputKeeper(CheckpointStatistics(), to_host=True, is_on_device=lambda tensor: True)
    stored, plans = keeper.keep(items)
    assert plans == [None] * len(items)
    assert all(kept is item for kept, item in zip(stored, items, strict=True))


def test_host_bytes_are_counted_and_the_host_is_not_moved_to_itself() -> None:
    tensors = [torch.ones(100), torch.arange(3)]
    moving = InputKeeper(CheckpointStatistics(), to_host=True, is_on_device=lambda tensor: True)
    # A stand-in for a device: plans say "device" for where the tensor is, so only the copy can be seen here.
    stored, _ = moving.keep(tensors)
    assert stored[0].data_ptr() != tensors[0].data_ptr()
    staying = InputKeeper(CheckpointStatistics(), to_host=True)
    stored, plans = staying.keep(tensors)
    assert plans == [None, None]
    assert stored[0] is tensors[0]
    assert staying.statistics.device_nbytes == staying.statistics.input_nbytes == 400 + 24


def contiguous_settings(num_checkpoints: int) -> None:
    configure(None, partition_activations=True, contiguous_checkpointing=True, num_checkpoints=num_checkpoints)


def layers_through(function: Any, count: int, seed: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    layers = [nn.Linear(8, 8) for _ in range(count)]
    x = torch.ones(4, 8, requires_grad=True) * 1.0
    for layer in layers:
        x = function(layer, x)
    x.sum().backward()
    return [layer.weight.grad for layer in layers]


def call(function: Any, *args: Any) -> Any:
    return function(*args)


@pytest.mark.parametrize("count", (3, 4, 7))
def test_contiguous_activations_share_blocks(count: int) -> None:
    contiguous_settings(3)
    plain_grads = layers_through(call, count)
    grads = layers_through(checkpoint, count)
    assert all(map(torch.equal, grads, plain_grads))
    statistics = checkpoint_statistics()
    # One block for each three checkpoints; the rest of the last block is used by no later forward.
    assert statistics.num_blocks == -(-count // 3)
    layers_through(checkpoint, 3)
    assert checkpoint_statistics().num_blocks == -(-count // 3) + 1


def test_kept_inputs_of_a_forward_lie_in_one_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    contiguous_settings(4)
    seen: list[int] = []
    original = saved_inputs.InputKeeper.keep

    def keep(self: InputKeeper, tensors: Any) -> Any:
        stored, plans = original(self, tensors)
        seen.extend(t.untyped_storage().data_ptr() for t, plan in zip(stored, plans, strict=True) if plan)
        assert all(t.data_ptr() % 256 == stored[0].untyped_storage().data_ptr() % 256 for t in stored)
        return stored, plans

    monkeypatch.setattr(saved_inputs.InputKeeper, "keep", keep)
    layers_through(checkpoint, 4)
    assert len(seen) == 4
    assert len(set(seen)) == 1


def test_reset_ends_a_forward_without_backward() -> None:
    contiguous_settings(2)
    layer = nn.Linear(8, 8)
    checkpoint(layer, torch.ones(4, 8) * 1.0)
    checkpointing.reset()
    checkpoint(layer, torch.ones(4, 8) * 1.0)
    assert checkpoint_statistics().num_blocks == 2


def test_two_forwards_before_their_backwards_do_not_overwrite_each_other() -> None:
    contiguous_settings(1)
    layer = nn.Linear(8, 8)
    first = checkpoint(layer, torch.full((4, 8), 1.0) * 1.0)
    second = checkpoint(layer, torch.full((4, 8), 2.0) * 1.0)
    second.sum().backward()
    first.sum().backward()
    assert torch.equal(layer.weight.grad, torch.full((8, 8), 4 * 1.0 + 4 * 2.0))


def test_function_may_change_a_restored_input_in_place() -> None:
    contiguous_settings(1)
    x = torch.randn(4, 8, requires_grad=True)
    checkpoint(lambda t: t.mul_(2).sin(), x * 1.0).sum().backward()
    assert torch.equal(x.grad, 2 * torch.cos(x.detach() * 2))


def test_statistics_count_and_clear() -> None:
    layers_through(checkpoint, 3)
    found = checkpoint_statistics()
    assert (found.num_checkpoints, found.num_recomputed) == (3, 3)
    assert found.device_nbytes == found.input_nbytes == 3 * 4 * 8 * 4
    assert found.host_nbytes == 0
    found.clear()
    assert found == CheckpointStatistics()
