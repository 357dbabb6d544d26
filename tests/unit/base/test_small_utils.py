"""Constants, version facts, torch questions, dotted paths, mpu spellings, enums, profiler ranges."""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed.constants
from deepspeed import git_version_info
from deepspeed.accelerator import real_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.utils import bwc, nvtx, types
from deepspeed.utils import torch as torch_utils
from deepspeed.utils.module_utils import recursive_getattr, recursive_setattr


def test_version_is_that_of_the_distribution() -> None:
    assert git_version_info.version == "0.20.0"
    assert importlib.metadata.version("deepspeed") == git_version_info.version
    assert git_version_info.version >= "0.16.4"  # clients compare the texts


def test_build_facts_have_the_shapes_clients_read() -> None:
    assert git_version_info.accelerator_name == real_accelerator.get_accelerator().name
    assert git_version_info.installed_ops.get("cpu_adam", False) is False
    info = git_version_info.torch_info
    assert set(info) == {"version", "bf16_support", "cuda_version", "nccl_version", "hip_version"}
    assert torch.__version__.startswith(info["version"])
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = git_version_info.nonsense


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("files", "expected"),
    (
        ({"HEAD": "ref: refs/heads/a/b\n", "refs/heads/a/b": "0123456789abcdef\n"}, ("01234567", "a/b")),
        ({"HEAD": "ref: refs/heads/m\n", "packed-refs": "# pack\nfedcba9876 refs/heads/m\n"}, ("fedcba98", "m")),
        ({"HEAD": "abcdef0123456789\n"}, ("abcdef01", "HEAD")),
        ({"HEAD": "ref: refs/heads/m\n"}, ("unknown", "unknown")),
        ({}, ("unknown", "unknown")),
    ),
)
def test_revision_of_a_source_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: tuple[str, str]
) -> None:
    for name, text in files.items():
        write(tmp_path / ".git", name, text)
    monkeypatch.setattr(git_version_info, "__file__", str(tmp_path / "deepspeed" / "git_version_info.py"))
    assert git_version_info._revision.__wrapped__() == expected


def test_default_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEEPSPEED_TIMEOUT", raising=False)
    assert deepspeed.constants._timeout_from_environment() == timedelta(minutes=10)
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", "0.5")
    assert deepspeed.constants._timeout_from_environment() == timedelta(seconds=30)
    for wrong in ("soon", "0", "-3", "inf", "nan"):
        monkeypatch.setenv("DEEPSPEED_TIMEOUT", wrong)
        with pytest.raises(ValueError, match=f"DEEPSPEED_TIMEOUT='{wrong}'.*positive number of minutes"):
            deepspeed.constants._timeout_from_environment()


def test_constants_clients_import() -> None:
    assert deepspeed.constants.TORCH_DISTRIBUTED_DEFAULT_PORT == 29500
    names = ("LOCAL_RANK", "CROSS_RANK", "CROSS_SIZE")
    assert [getattr(deepspeed.constants, name) for name in names] == list(names)
    assert (deepspeed.constants.INFERENCE_GENERIC_MODE, deepspeed.constants.INFERENCE_SPECIALIZED_MODE) == (
        "generic",
        "specialized",
    )


@pytest.mark.parametrize(
    ("installed", "lowest", "highest", "expected"),
    (
        ("2.10", "2.9", None, True),
        ("2.10", "2.10", None, True),
        ("2.10", "2.11", None, False),
        ("2.8", 2.8, None, True),
        ("2.8", None, "2.7.1", False),
        ("2.8", "2.0", "2.8", True),
    ),
)
def test_required_torch_version(
    monkeypatch: pytest.MonkeyPatch, installed: str, lowest: Any, highest: Any, expected: bool
) -> None:
    monkeypatch.setattr(torch_utils, "_INSTALLED", torch_utils.Version(installed))
    assert torch_utils.required_torch_version(lowest, highest) is expected


def test_required_torch_version_needs_a_bound() -> None:
    with pytest.raises(ValueError, match="give `min_version`, `max_version` or both"):
        torch_utils.required_torch_version()
    assert torch_utils.required_torch_version(min_version="2.8")


def test_functorch_question() -> None:
    answers: list[bool] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        answers.append(torch_utils.is_functorch_transforming())
        return x

    body(torch.ones(1))
    torch.func.vmap(body)(torch.ones(2))
    assert answers == [False, True]


def test_grad_hook_runs_after_accumulation() -> None:
    param = nn.Parameter(torch.ones(2))
    seen: list[list[float]] = []
    handle = torch_utils.register_grad_hook(param, lambda p: seen.append(p.grad.tolist()))
    for _ in range(2):
        param.sum().backward()
    handle.remove()
    param.sum().backward()
    assert seen == [[1.0, 1.0], [2.0, 2.0]]
    assert torch_utils.jit_script_compat(sum) is sum


def test_dotted_paths() -> None:
    model = nn.Sequential(nn.Sequential(nn.ReLU()))
    assert recursive_getattr(model, "0.0") is model[0][0]
    other = nn.Tanh()
    recursive_setattr(model, "0.0", other)
    assert model[0][0] is other
    recursive_setattr(model, "extra", other)
    assert model.extra is other
    with pytest.raises(AttributeError, match=r"'0.1.x': 0 \(Sequential\) has no attribute '1'"):
        recursive_getattr(model, "0.1.x")
    with pytest.raises(AttributeError, match="the root"):
        recursive_getattr(model, "nope")


class Generation:
    """An mpu that answers any question whose name it was given."""

    def __init__(self, prefix: str, value: int) -> None:
        for what in ("rank", "world_size", "group"):
            setattr(self, f"get_{prefix}_{what}", lambda what=what: f"{what} {value}")


@pytest.mark.parametrize("prefix", ("tensor_model_parallel", "model_parallel", "slice_parallel"))
def test_mpu_spellings(prefix: str) -> None:
    mpu = Generation(prefix, 3)
    assert bwc.bwc_tensor_model_parallel_rank(mpu) == "rank 3"
    assert bwc.bwc_tensor_model_parallel_world_size(mpu) == "world_size 3"
    assert bwc.bwc_tensor_model_parallel_group(mpu) == "group 3"
    assert bwc.bwc_pipeline_parallel_world_size(mpu) == 1


@pytest.mark.parametrize("prefix", ("pipeline_model_parallel", "pipe_parallel"))
def test_pipeline_spellings(prefix: str) -> None:
    mpu = Generation(prefix, 2)
    assert bwc.bwc_pipeline_parallel_world_size(mpu) == "world_size 2"
    assert bwc.bwc_pipeline_parallel_group(mpu) == "group 2"


def test_without_an_mpu_there_is_no_model_parallelism() -> None:
    assert bwc.bwc_tensor_model_parallel_rank() == 0
    assert bwc.bwc_tensor_model_parallel_world_size(None) == bwc.bwc_pipeline_parallel_world_size(None) == 1
    assert bwc.bwc_tensor_model_parallel_group() is bwc.bwc_pipeline_parallel_group() is None


def test_enum_numbers() -> None:
    assert {entry.name: entry.value for entry in types.ActivationFuncType} == {
        "UNKNOWN": 0,
        "GELU": 1,
        "ReLU": 2,
        "GATED_GELU": 3,
        "GATED_SILU": 4,
    }
    assert types.GATED_ACTIVATION_TYPES == [3, 4]
    assert [entry.value for entry in types.NormType] == [0, 1, 2, 3]


class Recording(CPU_Accelerator):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        self.calls.append(("push", msg, domain))

    def range_pop(self, domain: str | None = None) -> None:
        self.calls.append(("pop", domain))


@nvtx.instrument_w_nvtx
def instrumented(fail: bool) -> int:
    """Docs."""
    if fail:
        raise KeyError
    return 3


def test_ranges_around_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Recording()
    monkeypatch.setattr(nvtx, "get_accelerator", lambda: accelerator)
    assert instrumented(False) == 3
    with pytest.raises(KeyError):
        instrumented(True)
    assert accelerator.calls == [("push", "instrumented", "DeepSpeed"), ("pop", "DeepSpeed")] * 2
    assert instrumented.__doc__ == "Docs."


@pytest.mark.parametrize("off", ("switch", "compiling"))
def test_no_ranges_when_switched_off_or_compiling(monkeypatch: pytest.MonkeyPatch, off: str) -> None:
    accelerator = Recording()
    monkeypatch.setattr(nvtx, "get_accelerator", lambda: accelerator)
    if off == "switch":
        monkeypatch.setattr(nvtx, "enable_nvtx", False)
    else:
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert instrumented(False) == 3
    assert accelerator.calls == []


@pytest.mark.parametrize("package", ("deepspeed.utils", "deepspeed.runtime.utils", "deepspeed.accelerator"))
def test_every_lazy_export_resolves(package: str) -> None:
    module = importlib.import_module(package)
    for name in module._EXPORTS:
        assert getattr(module, name) is not None, name
        assert name in dir(module)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = module.no_such_name


def test_importing_the_package_of_helpers_loads_none_of_them() -> None:
    code = (
        "import sys, deepspeed.utils, deepspeed.accelerator\n"
        "mine = {m for m in sys.modules if m.startswith('deepspeed.') and m.count('.') > 1}\n"
        "sys.exit(' '.join(mine) or ('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_settings_of_groups_are_read_live(monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed.utils
    from deepspeed.utils import groups

    monkeypatch.setattr(groups, "mpu", "first", raising=False)
    assert deepspeed.utils.mpu == "first"
    monkeypatch.setattr(groups, "mpu", "second", raising=False)
    assert deepspeed.utils.mpu == "second"
