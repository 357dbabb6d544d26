"""The optimizers' GPU kernels, without a GPU: the interpreter's numbers, ahead-of-time builds, and who uses them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepspeed.ops import multi_tensor
from deepspeed.ops.adam import FusedAdam
from deepspeed.ops.registry import OPS
from tests.harness.project import ROOT
from tests.harness.width import wide

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (it comes with torch's GPU wheels)"
)


def run(cache: Path, *arguments: str, **environment: str) -> list[str]:
    """In a process of its own: the interpreter is chosen by an environment variable when triton is imported."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.kernels.multi_tensor_kernels", *arguments],
        cwd=ROOT,
        env=os.environ | {"TRITON_CACHE_DIR": str(cache), **environment},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@needs_triton
@pytest.mark.parametrize("extent", ((), wide(("all",))))
def test_kernels_give_the_numbers_of_torch(extent: tuple[str, ...], tmp_path: Path) -> None:
    assert run(tmp_path, "compare", *extent, TRITON_INTERPRET="1") == []


@needs_triton
@pytest.mark.parametrize("extent", ((), wide(("all",))))
@pytest.mark.parametrize("arch", (80, 90))
def test_kernels_compile_for_gpus(arch: int, extent: tuple[str, ...], tmp_path: Path) -> None:
    assert run(tmp_path, "compile", str(arch), *extent) == []


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As if there were a GPU and the kernels worked on it."""
    monkeypatch.setattr(multi_tensor, "_missing", lambda device: "")
    monkeypatch.setattr(multi_tensor, "_trial", lambda op, device: "")
    return monkeypatch


@pytest.mark.parametrize("op", ("fused_adam", "fused_lion", "fused_lamb"))
def test_the_registry_takes_the_kernels_on_gpus(op: str, on_a_gpu: pytest.MonkeyPatch) -> None:
    name = "Triton multi-tensor kernels"
    assert getattr(OPS[op].choose("cuda"), "name", "") == name
    assert getattr(OPS[op].choose("cpu"), "name", name) != name
    for variable in ("DS_SKIP_MULTI_TENSOR", f"DS_SKIP_{op.upper()}", "DS_SKIP_OPS"):
        with on_a_gpu.context() as patch:
            patch.setenv(variable, "1")
            reasons = {way.name: problem for way, problem in OPS[op].candidates("cuda")}
            assert reasons[name] == f"{variable}=1 is set"
    for problem in ("no compiler", "one step on this device is 1.0e+00 off torch's"):
        on_a_gpu.setattr(multi_tensor, "_trial", lambda op, device, problem=problem: problem)
        reasons = {way.name: reason for way, reason in OPS[op].candidates("cuda")}
        assert reasons[name] == problem


def test_ops_without_such_kernels_say_so(on_a_gpu: pytest.MonkeyPatch) -> None:
    assert multi_tensor.problem("cpu_adam", "cuda") == "cpu_adam has no kernels for GPUs"
    assert not multi_tensor.usable("cpu_adagrad", "cuda")
    assert multi_tensor.usable("fused_lion", "cuda")


def test_without_triton_torch_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "deepspeed.ops.multi_tensor_triton", raising=False)
    for cached in (multi_tensor._missing, multi_tensor._kernels):
        cached.cache_clear()
    try:
        assert "triton cannot be imported" in multi_tensor.problem("fused_adam", "cuda")
    finally:
        multi_tensor._missing.cache_clear()


def test_a_kernel_that_errs_on_this_device_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial compares a step of the kernels with one of torch; here the kernels are replaced by nothing at all."""
    monkeypatch.setattr(multi_tensor, "_DEVICES", {"cpu"})
    monkeypatch.setattr(multi_tensor.DeviceTable, "run", lambda self, scale=1.0: [])
    assert "off torch's" in multi_tensor._trial.__wrapped__("fused_adam", "cpu")

    def broken(self: multi_tensor.DeviceTable, scale: float = 1.0) -> None:
        raise RuntimeError("PTX was refused\nand more")

    monkeypatch.setattr(multi_tensor.DeviceTable, "run", broken)
    found = multi_tensor._trial.__wrapped__("fused_adam", "cpu")
    assert found == "one step on this device failed: RuntimeError: PTX was refused"


def test_a_rule_keeps_a_learning_rate_on_the_device() -> None:
    """`lr` may be a tensor that is never read by the host; a meta tensor could not be."""
    table = multi_tensor.DeviceTable("fused_adam", multi_tensor.Cache())
    lr = torch.tensor(0.1, device="meta")
    optimizer = FusedAdam([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.param_groups[0]["lr"] = lr
    table.add_rule(optimizer._rule(optimizer.param_groups[0], 1))
    assert [torch.is_tensor(number) for number in table._rules[0]].count(True) == 2  # the decay's factor and the rate
