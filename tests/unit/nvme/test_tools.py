"""`ds_io` and `ds_nvme_tune`: what they print, what they leave behind (nothing), what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepspeed import nvme
from deepspeed.nvme import perf_run_sweep
from deepspeed.nvme.ds_aio_args import parse_arguments, refine_integer_value
from deepspeed.nvme.io_job import IoJob
from deepspeed.nvme.perf_generate_param import READ_LOG_DIR, WRITE_LOG_DIR, generate_main
from deepspeed.nvme.test_ds_aio import measure
from deepspeed.runtime.swap_tensor.aio_config import AioConfig


def left_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@pytest.mark.parametrize("engine", ("aio_handle", "aio_basic", "torch_io"))
@pytest.mark.parametrize("read", (True, False))
def test_ds_io(tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: str, read: bool) -> None:
    flags = ["--folder", str(tmp_path), "--io_size", "100k", "--engine", engine, "--block_size", "16K"]
    flags += ["--loops", "2", *(["--read"] if read else [])]
    if engine != "torch_io":
        flags += ["--validate", "--different_file_each_iteration", "--slow_bounce_buffer"]
    nvme.ds_io_main(flags)
    said = capsys.readouterr().out
    assert "(2 transfers of 102400)" in said
    assert f"E2E {'Read' if read else 'Write'} Speed = " in said
    assert left_in(tmp_path) == []


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # newer Pythons dislike forks beside threads
def test_ds_io_by_two_processes(tmp_path: Path) -> None:
    jobs = [IoJob(str(tmp_path), 10_000, read) for read in (True, False)]
    assert [len(seconds) for seconds in measure(jobs)] == [4, 4]
    assert left_in(tmp_path) == []


def test_ds_io_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, text in (
        (["--folder", str(tmp_path), "--io_size", "4x"], "'4x' is no size"),
        (["--io_size", "4k"], "give one of --folder and --folder_to_device_mapping"),
        (["--folder", str(tmp_path / "none"), "--io_size", "4k"], "none is not a folder"),
        (["--folder", str(tmp_path), "--io_size", "4k", "--gpu", "--use_gds"], "--use_gds: GPUDirect Storage is not"),
        (["--folder_to_device_mapping", "x", "--io_size", "4k"], "expected FOLDER:DEVICE"),
    ):
        with pytest.raises(SystemExit) as stopped:
            nvme.ds_io_main(flags)
        assert stopped.value.code == 2
        assert text in capsys.readouterr().err


def test_sizes_and_defaults() -> None:
    assert [refine_integer_value(text) for text in ("7", "4k", "1M", "2G")] == [7, 4096, 1 << 20, 2 << 30]
    flags = parse_arguments(["--io_size", "1M"])
    assert (flags.block_size, flags.queue_depth, flags.loops, flags.engine) == ("1M", 32, 3, "aio_handle")
    assert nvme.parse_sweep_arguments(["--nvme_dir", "a"]).io_size == "400M"


def test_ds_nvme_tune(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed last can be pasted into a config."""
    monkeypatch.setattr(perf_run_sweep, "_BUDGET_S", 0.3)
    disk, logs, sweep = tmp_path / "disk", tmp_path / "logs", tmp_path / "sweep.json"
    disk.mkdir()
    sweep.write_text(json.dumps({"queue_depth": [2, 4], "io_parallel": [1], "block_size": ["64K"]}))
    flags = ["--nvme_dir", str(disk), "--log_dir", str(logs), "--sweep_config", str(sweep), "--io_size", "300K"]
    nvme.tune_main(flags)
    said = capsys.readouterr().out
    pasted = json.loads(said[said.index("{\n") :])["aio"]
    chosen = AioConfig(**pasted)
    assert chosen.queue_depth in (2, 4)
    assert chosen.block_size == 65536
    assert set(pasted) <= set(AioConfig.model_fields)
    assert "best read: " in said
    assert left_in(disk) == []
    generate_main(logs)
    assert capsys.readouterr().out == said[said.index("best read") :]


def test_the_choice_weighs_both_directions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = {"block_size": "1M", "sequential_requests": False, "single_submit": False, "io_parallel": 1}
    for name, rates in ((READ_LOG_DIR, {8: 4e9, 16: 3e9}), (WRITE_LOG_DIR, {8: 1e9, 16: 2e9})):
        (tmp_path / name).mkdir()
        rows = [{**common, "queue_depth": depth, "bytes_per_second": rate} for depth, rate in rates.items()]
        rows.sort(key=lambda row: -row["bytes_per_second"])
        (tmp_path / name / "results.json").write_text(json.dumps(rows))
    generate_main(tmp_path)
    said = capsys.readouterr().out
    assert json.loads(said[said.index("{\n") :])["aio"]["queue_depth"] == 16
    with pytest.raises(ValueError, match="no results in"):
        generate_main(tmp_path / "none")


@pytest.mark.parametrize(
    ("flags", "text"),
    (
        (["--no_read", "--no_write"], "leaves nothing to measure"),
        (["--gds"], "GPUDirect Storage is not available"),
        (["--sweep_config", "none.json"], "--sweep_config none.json"),
    ),
)
def test_ds_nvme_tune_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], text: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        nvme.tune_main(["--nvme_dir", str(tmp_path), "--log_dir", str(tmp_path / "logs"), *flags])
    assert stopped.value.code == 2
    assert text in capsys.readouterr().err
