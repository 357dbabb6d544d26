"""Page-locked host buffers without torch's allocator."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from deepspeed.accelerator import host_pinning
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.utils import pin_memory
from deepspeed.utils.logging import logger
from deepspeed.utils.pin_memory_tracker import pinned_memory_summary, pinned_nbytes, track_pinned_memory


class Registering(CPU_Accelerator):
    """Notes what a device driver would be told."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def register_host_memory(self, address: int, num_bytes: int) -> bool:
        self.calls.append(("register", num_bytes))
        return True

    def unregister_host_memory(self, address: int) -> bool:
        self.calls.append(("unregister", address))
        return True


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_PIN_MEMORY_BACKEND", "native")


def test_default_backend_leaves_cpu_tensors_alone() -> None:
    accelerator = CPU_Accelerator()
    tensor = torch.arange(4.0)
    assert accelerator.pin_memory(tensor) is tensor
    assert pin_memory.get_active_native_pinned_memory() is None
    assert accelerator.pin_empty(2, 3, dtype=torch.float16).shape == (2, 3)
    assert accelerator.pin_empty_like(tensor, dtype=torch.int8).dtype == torch.int8
    accelerator.unpin_memory(tensor)


def test_unknown_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_PIN_MEMORY_BACKEND", "magic")
    with pytest.raises(ValueError, match="DS_PIN_MEMORY_BACKEND='magic': expected one of torch, native"):
        CPU_Accelerator().pin_memory(torch.ones(1))


@pytest.mark.usefixtures("native")
def test_native_copy_keeps_values_shape_and_starts_on_a_page() -> None:
    accelerator = CPU_Accelerator()
    tensor = torch.arange(12, dtype=torch.bfloat16).view(3, 4).t()
    pinned = accelerator.pin_memory(tensor)
    assert torch.equal(pinned, tensor)
    assert pinned.data_ptr() % accelerator.pin_memory_alignment() == 0
    assert pinned.data_ptr() != tensor.data_ptr()
    whole = accelerator.pin_memory(tensor, match_shape=False)
    assert whole.dim() == 1
    assert whole.nbytes % accelerator.pin_memory_alignment() == 0
    assert torch.equal(whole[:12].view(4, 3), tensor)
    empty = accelerator.pin_memory(tensor, make_copy=False)
    assert (empty.shape, empty.dtype) == (tensor.shape, tensor.dtype)


@pytest.mark.usefixtures("native")
def test_bytes_are_given_back_with_the_last_tensor() -> None:
    accelerator = Registering()
    before = pinned_nbytes()[0]
    pinned = accelerator.pin_empty((5, 7), dtype=torch.float32)
    view = pinned[2:]
    assert pinned_nbytes()[0] - before == accelerator.pin_memory_alignment()
    assert accelerator.is_pinned(pinned)
    assert accelerator.is_pinned(view)
    del pinned
    gc.collect()
    assert [name for name, _ in accelerator.calls] == ["register"]
    view.fill_(1)
    del view
    gc.collect()
    assert [name for name, _ in accelerator.calls] == ["register", "unregister"]
    assert pinned_nbytes()[0] == before


@pytest.mark.usefixtures("native")
def test_unpinning_early_keeps_the_values() -> None:
    accelerator = Registering()
    pinned = accelerator.pin_memory(torch.arange(5))
    accelerator.unpin_memory(pinned)
    assert not accelerator.is_pinned(pinned)
    assert pinned.tolist() == [0, 1, 2, 3, 4]
    del pinned
    gc.collect()
    assert [name for name, _ in accelerator.calls] == ["register", "unregister"]
    assert not accelerator.native_pinned_memory.unpin(torch.ones(1))


@pytest.mark.usefixtures("native")
def test_device_registration_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_PIN_MEMORY_REGISTER_DEVICE", "0")
    accelerator = Registering()
    accelerator.pin_memory(torch.ones(1))
    assert accelerator.calls == []


@pytest.mark.usefixtures("native")
def test_refused_lock_costs_a_warning_not_the_buffer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host_pinning, "_lock_pages", lambda address, nbytes: False)
    accelerator = CPU_Accelerator()
    pinned = accelerator.pin_memory(torch.arange(3))
    assert pinned.tolist() == [0, 1, 2]
    assert not accelerator.is_pinned(pinned)
    assert capsys.readouterr().out.count("could not be page-locked") <= 1  # once in a process


@pytest.mark.usefixtures("native")
def test_native_buffers_of_the_current_accelerator() -> None:
    active: Any = pin_memory.get_active_native_pinned_memory()
    assert active is pin_memory.get_native_pinned_memory()
    assert isinstance(active, pin_memory.NativePinnedMemory)


def test_tracker_sums_and_remembers_the_peak(capsys: pytest.CaptureFixture[str]) -> None:
    current, _ = pinned_nbytes()
    track_pinned_memory(3 << 30)
    track_pinned_memory(-(3 << 30))
    assert pinned_nbytes() == (current, current + (3 << 30))
    level = logger.level
    logger.setLevel("INFO")
    pinned_memory_summary("mine")
    logger.setLevel(level)
    assert "pinned host memory [mine]:" in capsys.readouterr().out
