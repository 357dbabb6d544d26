"""ds_report and the list of console scripts."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deepspeed import env_report, git_version_info
from deepspeed.launcher import tools
from deepspeed.ops.registry import OPS
from tests.harness.pool import WorkerPool
from tests.harness.programs import run_programs
from tests.unit.launcher.launching import ROOT, Folder

if sys.version_info >= (3, 11):
    import tomllib

Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(
    ("size", "text"),
    ((0, "0.00 B"), (10, "10.00 B"), (2000, "1.95 KB"), (5 * 2**20, "5.00 MB"), (7 * 2**30, "7.00 GB"),
     (3 * 2**50, "3072.00 TB")),
)  # fmt: skip
def test_sizes(size: int, text: str) -> None:
    assert env_report.human_readable_size(size) == text


def test_report_as_json_holds_the_facts_of_this_host(folder: Folder) -> None:
    done = folder.launch(command=[sys.executable, "-m", "deepspeed.env_report", "--json"])
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["versions"]["deepspeed"] == git_version_info.version
    assert report["versions"]["torch"] == torch.__version__
    assert report["versions"]["python"].startswith(".".join(map(str, sys.version_info[:3])))
    assert (report["chosen_accelerator"], report["why_chosen"]) == ("cpu", "DS_ACCELERATOR=cpu")
    by_name = {row["name"]: row for row in report["accelerators"]}
    assert by_name["cpu"]["usable"]
    assert by_name["cuda"]["usable"] is torch.cuda.is_available()
    assert by_name["cuda"]["usable"] or by_name["cuda"]["reason"]
    assert "gloo" in report["communication_backends"]
    assert 0 < report["memory"]["available"] <= report["memory"]["limit"] <= report["memory"]["host"]
    ops = {row["name"]: row for row in report["ops"]}
    assert set(OPS) < set(ops)
    for name in ("cpu_adam", "fused_adam"):
        row = ops[name]
        if row["implementation"] == "native kernel":
            assert Path(row["library"]).is_file()
            assert row["others"]["torch fused AdamW"] == "native kernel is taken before it"
            expected = {"native kernel is taken before it"}
            if name == "fused_adam":  # no kernel of it would be tried on a CPU
                assert row["others"]["Triton multi-tensor kernels"] == "for tensors on cuda, not on cpu"
                expected.add("for tensors on cuda, not on cpu")
            assert set(row["others"].values()) == expected
        else:
            assert row["implementation"] == "torch fused AdamW"
            assert row["others"]["native kernel"]
    assert (ops["gds"]["implementation"], ops["gds"]["library"]) == (None, None)
    assert ops["gds"]["others"] == {"any implementation": "not part of this version"}
    assert report["complete"]
    assert report["required"] == []


REPORT = "from deepspeed.env_report import cli_main; cli_main()"


def test_ops_without_a_compiler_are_done_by_torch_and_the_report_says_why(pool: WorkerPool, tmp_path: Path) -> None:
    environment = {"DS_NATIVE_CACHE": str(tmp_path / "new"), "CXX": "no-such-compiler"}
    (done,) = run_programs(pool, REPORT, "--json", environment=environment)
    assert done.code == 0, done.errors
    ops = {row["name"]: row for row in json.loads(done.output)["ops"]}
    assert ops["cpu_adam"]["implementation"] == "torch fused AdamW"
    assert "no C++ compiler found: CXX='no-such-compiler'" in ops["cpu_adam"]["others"]["native kernel"]
    assert ops["async_io"]["implementation"] == "Python threads"
    assert "no C++ compiler found" in ops["async_io"]["others"]["native library"]
    assert ops["draws"]["implementation"] == "torch's own"
    assert ops["crc32"]["implementation"] == "zlib"
    assert "CXX='no-such-compiler' is no program" in json.loads(done.output)["versions"]["C++ compiler"]


def test_the_compiler_is_named_with_its_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "cxx"
    compiler.write_text("#!/bin/sh\necho 'cxx 1.2.3'\necho more\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert env_report._versions()["C++ compiler"] == f"{compiler}: cxx 1.2.3"


def test_text_report_has_all_parts_and_no_colour_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    env_report.main()
    text = capsys.readouterr().out
    for part in ("cpu_adam ...", "draws ...", "crc32 ...", "C++ compiler ...",
                 "not part of this version ...", "DeepSpeed general environment info", "torch ...",
                 "accelerator cpu ...", "accelerator used ...", "host memory ...", "shared memory (/dev/shm) size ...",
                 "missing", "only for"):  # fmt: skip
        assert part in text
    assert "\033[" not in text


def test_parts_can_be_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    env_report.main(hide_operator_status=True, hide_errors_and_warnings=True)
    text = capsys.readouterr().out
    assert "cpu_adam" not in text
    assert "only for" not in text
    assert "host memory" in text
    env_report.op_report(verbose=False)
    assert "is taken before it" not in capsys.readouterr().out
    env_report.debug_report()
    assert "cpu_adam" not in capsys.readouterr().out


def test_a_missing_requirement_is_named_and_gives_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["no-such-package>=3", "torch>=99", "numpy", "pytest>=1; extra == 'test'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: asked)
    monkeypatch.setattr(sys, "argv", ["ds_report", "--hide_operator_status"])
    with pytest.raises(SystemExit) as stopped:
        env_report.cli_main()
    assert stopped.value.code == 1
    text = capsys.readouterr().out
    assert "[FAIL] no-such-package: required: pip install 'no-such-package>=3'" in text
    assert f"[FAIL] torch: required: torch>=99, found {torch.__version__}" in text
    assert "numpy: required" not in text
    assert "pytest" not in text


def test_an_accelerator_that_cannot_be_used_is_reported_not_raised(pool: WorkerPool) -> None:
    if torch.cuda.is_available():
        pytest.skip("this host has the accelerator that the test names")
    (done,) = run_programs(pool, REPORT, "--hide_operator_status", environment={"DS_ACCELERATOR": "cuda"})
    assert done.code == 1
    assert "[FAIL] accelerator: environment variable DS_ACCELERATOR='cuda'" in done.output
    assert "Traceback" not in done.errors


def test_a_torch_that_does_not_import_is_reported_not_raised(folder: Folder) -> None:
    (folder.path / "torch").mkdir()
    folder.script("torch/__init__.py", "raise ImportError('libtorch.so: cannot open shared object file')")
    command = [sys.executable, "-m", "deepspeed.env_report"]
    done = folder.launch(command=command, extra={"PYTHONPATH": f"{folder.path}:{ROOT}"})
    assert done.returncode == 1
    assert "[FAIL] torch: required, and cannot be imported: ImportError: libtorch.so" in done.stdout
    assert "Traceback" not in done.stderr


def test_small_shared_memory_gets_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_report.shutil, "disk_usage", lambda path: Usage(64 * 2**20, 0, 64 * 2**20))
    size, (warning,) = env_report.get_shm_size()
    assert size == "64.00 MB"
    assert "/dev/shm has only 64.00 MB" in warning
    assert "--shm-size" in warning


def test_cuda_compiler_is_asked_where_its_variable_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert env_report.nvcc_version().startswith("none (")
    (tmp_path / "bin").mkdir()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8.61'\n")
    nvcc.chmod(0o755)
    assert env_report.nvcc_version() == "12.8"


def test_ascend_toolkit_is_found_through_its_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    assert (env_report.installed_cann_path(), env_report.installed_cann_version()) == (None, None)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    (tmp_path / "x86_64-linux").mkdir()
    (tmp_path / "x86_64-linux" / "ascend_toolkit_install.info").write_text("package_name=x\nversion=8.0.1\n")
    assert (env_report.installed_cann_path(), env_report.installed_cann_version()) == (str(tmp_path), "8.0.1")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="reads pyproject.toml with tomllib")
def test_console_scripts_exist_under_the_names_users_know() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert set(scripts) == {
        "deepspeed", "deepspeed.pt", "ds", "ds_report", "dsr", "ds_ssh", "ds_bench", "ds_elastic", "ds_io",
        "ds_nvme_tune",
    }  # fmt: skip
    for target in scripts.values():
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize("entry", (tools.ds_elastic, tools.ds_bench))
def test_commands_of_features_that_are_not_there_say_so(
    entry: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        entry()
    assert stopped.value.code == 2
    assert f"{entry.__name__} is not available in this version; " in capsys.readouterr().err
