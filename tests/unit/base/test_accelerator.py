"""Choosing an accelerator, and the CPU as one."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from deepspeed.accelerator import DeepSpeedAccelerator, get_accelerator, real_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from deepspeed.accelerator.mps_accelerator import MPS_Accelerator
from deepspeed.utils import host_memory


@pytest.fixture(autouse=True)
def unchosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_accelerator, "ds_accelerator", None)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)


class OtherDevice(CPU_Accelerator):
    """What a plug-in package would bring."""

    usable = True

    def __init__(self) -> None:
        super().__init__()
        self._name = "other"

    def is_available(self) -> bool:
        return self.usable


class NotAnAccelerator:
    pass


def announce(monkeypatch: pytest.MonkeyPatch, **points: str) -> None:
    found = [
        importlib.metadata.EntryPoint(name, f"{__name__}:{value}", real_accelerator.ENTRY_POINT_GROUP)
        for name, value in points.items()
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found)


def test_detected_once_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    announce(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    chosen = get_accelerator()
    assert isinstance(chosen, CPU_Accelerator)
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    assert get_accelerator() is chosen


def test_gpu_is_preferred_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    announce(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert isinstance(get_accelerator(), CUDA_Accelerator)


@pytest.mark.parametrize("text", ("cpu", " CPU "))
def test_environment_names_it(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", text)
    assert get_accelerator().name == "cpu"


def test_unknown_name_is_an_error_listing_the_known(monkeypatch: pytest.MonkeyPatch) -> None:
    announce(monkeypatch, other="OtherDevice")
    monkeypatch.setenv("DS_ACCELERATOR", "xpu")
    with pytest.raises(ValueError, match=r"DS_ACCELERATOR='xpu'.*cuda, cpu, mps, other.*deepspeed\.accelerators"):
        get_accelerator()


def test_named_device_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="DS_ACCELERATOR='cuda': no such device is usable"):
        get_accelerator()


def test_plug_in_joins_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    announce(monkeypatch, other="OtherDevice")
    assert get_accelerator().name == "other"
    assert real_accelerator.is_current_accelerator_supported()
    monkeypatch.setattr(real_accelerator, "ds_accelerator", None)
    monkeypatch.setenv("DS_ACCELERATOR", "other")
    assert isinstance(get_accelerator(), OtherDevice)


def test_plug_in_without_its_device_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    announce(monkeypatch, other="OtherDevice")
    monkeypatch.setattr(OtherDevice, "usable", False)
    assert get_accelerator().name != "other"


def test_broken_plug_in_is_named_and_passed_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    announce(monkeypatch, absent="NoSuchClass", wrong="NotAnAccelerator")
    assert get_accelerator().name in ("cpu", "cuda", "mps")
    out = capsys.readouterr().out
    assert "plug-in 'absent'" in out
    assert "AttributeError" in out
    assert "plug-in 'wrong'" in out
    assert "must make a subclass of DeepSpeedAccelerator" in out


def test_set_replaces_and_checks() -> None:
    mine = OtherDevice()
    set_accelerator(mine)
    assert get_accelerator() is mine
    assert not real_accelerator.is_current_accelerator_supported()
    with pytest.raises(TypeError, match="found str"):
        set_accelerator("cpu")  # type: ignore[arg-type]


def test_selection_module_needs_no_torch() -> None:
    code = "import sys, deepspeed.accelerator.real_accelerator; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.fixture
def cpu() -> CPU_Accelerator:
    return CPU_Accelerator()


def test_cpu_trains_in_three_number_formats(cpu: CPU_Accelerator) -> None:
    assert cpu.supported_dtypes() == [torch.float32, torch.float16, torch.bfloat16]
    assert cpu.is_bf16_supported()
    assert cpu.is_fp16_supported()
    assert cpu.is_fp64_supported()


def test_cpu_is_one_device_for_all_ranks(cpu: CPU_Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert cpu.current_device() == 3
    assert cpu.device_name(3) == cpu.current_device_name() == "cpu"
    assert cpu.communication_backend_name() == "gloo"
    assert cpu.on_accelerator(torch.ones(1))
    assert not cpu.on_accelerator(torch.ones(1, device="meta"))


@pytest.mark.parametrize("name", ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"))
def test_cpu_has_as_many_devices_as_ranks_were_started(
    cpu: CPU_Accelerator, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv("LOCAL_SIZE", raising=False)
    monkeypatch.setenv(name, "7")
    assert cpu.device_count() == 7


def test_cpu_device_count_alone_is_positive(cpu: CPU_Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_SIZE", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert cpu.device_count() >= 1


def test_cpu_random_state_is_torchs(cpu: CPU_Accelerator) -> None:
    cpu.manual_seed_all(5)
    assert cpu.initial_seed() == torch.initial_seed() == 5
    state = cpu.get_rng_state()
    first = torch.rand(2)
    cpu.set_rng_state(state)
    assert torch.equal(torch.rand(2), first)
    assert cpu.default_generator(0) is torch.default_generator


def test_queues_of_the_host_are_always_empty(cpu: CPU_Accelerator) -> None:
    stream = cpu.Stream()
    start, end = cpu.Event(enable_timing=True), cpu.Event(enable_timing=True)
    with cpu.stream(stream):
        start.record(stream)
        end.record()
    stream.wait_stream(cpu.current_stream())
    stream.wait_event(end)
    stream.synchronize()
    end.synchronize()
    end.wait()
    assert stream.query()
    assert end.query()
    assert 0 <= start.elapsed_time(end) < 1000
    assert stream.record_event().query()
    with pytest.raises(RuntimeError, match="must have been recorded"):
        start.elapsed_time(cpu.Event())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other kernels cannot restart their peak counter")
def test_memory_figures_follow_the_process(cpu: CPU_Accelerator) -> None:
    cpu.reset_peak_memory_stats()
    before = cpu.memory_allocated()
    block = torch.ones(64 << 20, dtype=torch.uint8)
    grown = cpu.memory_allocated() - before
    assert grown > 60 << 20
    del block
    assert cpu.max_memory_allocated() >= before + (60 << 20)
    cpu.reset_peak_memory_stats()
    assert cpu.max_memory_allocated() < before + (60 << 20)
    assert cpu.memory_stats()["allocated_bytes.all.current"] > 0
    assert 0 < cpu.available_memory() <= cpu.total_memory()


def test_peak_is_sampled_where_the_kernel_cannot_restart_it(
    cpu: CPU_Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = iter([100, 300, 200, 50])
    monkeypatch.setattr(host_memory, "reset_peak_resident_memory", lambda: False)
    monkeypatch.setattr(host_memory, "resident_memory", lambda: next(sizes))
    assert cpu.reset_rss() == 100
    assert cpu.memory_allocated() == 300
    assert cpu.memory_allocated() == 200
    assert cpu.max_memory_allocated() == 300


def test_tensor_factories(cpu: CPU_Accelerator) -> None:
    expected = {
        "BFloat16Tensor": torch.bfloat16,
        "ByteTensor": torch.uint8,
        "DoubleTensor": torch.float64,
        "FloatTensor": torch.float32,
        "HalfTensor": torch.float16,
        "IntTensor": torch.int32,
        "LongTensor": torch.int64,
    }
    for accelerator in (cpu, OtherCpuByDefaults()):
        for name, dtype in expected.items():
            made = getattr(accelerator, name)([1, 2])
            assert made.dtype == dtype
            assert made.tolist() == [1, 2]


class OtherCpuByDefaults(CPU_Accelerator):
    """The CPU with the interface's own tensor factories."""

    BFloat16Tensor = DeepSpeedAccelerator.BFloat16Tensor
    ByteTensor = DeepSpeedAccelerator.ByteTensor
    DoubleTensor = DeepSpeedAccelerator.DoubleTensor
    FloatTensor = DeepSpeedAccelerator.FloatTensor
    HalfTensor = DeepSpeedAccelerator.HalfTensor
    IntTensor = DeepSpeedAccelerator.IntTensor
    LongTensor = DeepSpeedAccelerator.LongTensor


def test_compile_backend_is_checked(cpu: CPU_Accelerator) -> None:
    assert cpu.get_compile_backend() == "inductor"
    cpu.set_compile_backend("eager")
    assert cpu.get_compile_backend() == "eager"
    with pytest.raises(ValueError, match=r"'nonsense' is unknown.*inductor"):
        cpu.set_compile_backend("nonsense")


def test_facilities_a_cpu_lacks_are_harmless(cpu: CPU_Accelerator) -> None:
    with cpu.device(0), cpu.capture_to_graph(cpu.create_graph()):
        cpu.replay_graph(None)
        cpu.range_push("name", domain="d")
        cpu.range_pop(domain="d")
    assert cpu.lazy_call(lambda: 5) == 5
    assert not cpu.is_current_stream_capturing()
    assert not cpu.is_triton_supported()
    environment = {"A": "b"}
    cpu.set_visible_devices_envs(environment, [0, 1])
    assert environment == {"A": "b"}
    assert cpu.get_op_builder("NoSuchBuilder") is None
    assert cpu.create_op_builder("NoSuchBuilder") is None


ACCELERATORS = (CPU_Accelerator, CUDA_Accelerator, MPS_Accelerator)


@pytest.mark.parametrize("cls", ACCELERATORS)
def test_each_accelerator_has_the_whole_interface(cls: type[DeepSpeedAccelerator]) -> None:
    made: Any = cls()  # abstract methods left open would refuse
    assert made.device_name() == made.name == made._name
    assert made.communication_backend_name() == ("nccl" if made.name == "cuda" else "gloo")
    assert isinstance(made.export_envs(), list)
    assert isinstance(made.is_available(), bool)
    assert made.unavailable_reason()


def test_gpu_facts_that_need_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = CUDA_Accelerator()
    environment: dict[str, str] = {}
    gpu.set_visible_devices_envs(environment, [2, 0])
    assert environment == {"CUDA_VISIBLE_DEVICES": "2,0"}
    assert gpu.device_name(1) == "cuda:1"
    assert not gpu.is_synchronized_device()
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert gpu.is_fp16_supported()


def test_gpu_pinning_that_the_system_refuses_falls_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory\nmore lines")

    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    tensor = torch.arange(3.0)
    assert CUDA_Accelerator().pin_memory(tensor) is tensor
    assert "could not be pinned (CUDA error: out of memory)" in capsys.readouterr().out


def test_lowest_gpu_generation_for_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = CUDA_Accelerator()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = {}
    for major in (5, 6, 7):
        monkeypatch.setattr(gpu, "_compute_capability", lambda major=major: major)
        monkeypatch.delenv("DS_ALLOW_DEPRECATED_FP16", raising=False)
        usual = gpu.is_fp16_supported()
        monkeypatch.setenv("DS_ALLOW_DEPRECATED_FP16", "1")
        found[major] = (usual, gpu.is_fp16_supported())
    assert found == {5: (False, False), 6: (False, True), 7: (True, True)}
    assert os.environ["DS_ALLOW_DEPRECATED_FP16"] == "1"
