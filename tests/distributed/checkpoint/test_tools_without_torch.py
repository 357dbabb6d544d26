"""The tools' processes never import torch, and what they write is what torch's readers expect."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.checkpoint import CheckpointError, trusted
from deepspeed.checkpoint.ds_to_universal import main as convert
from deepspeed.checkpoint.ds_to_universal import parse_arguments
from deepspeed.utils import zero_to_fp32
from tests.distributed.checkpoint import runs
from tests.distributed.checkpoint.test_layouts import save_run
from tests.harness.pool import WorkerPool

REFERENCE = Path(__file__).resolve().parents[2] / "data" / "reference_checkpoints" / "0.19.8"
# Runs command lines one after the other in one process, and says which of some modules it has imported in the end.
PROGRAM = """
import contextlib, io, json, runpy, sys
statuses = []
for words in json.loads(sys.argv[1]):
    sys.argv = words[1:]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            if words[0].endswith(".py"):
                runpy.run_path(words[0], run_name="__main__")
            else:
                runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        statuses.append(ended.code)
print(json.dumps([statuses, [name for name in ("torch", "numpy") if name in sys.modules]]))
"""


def run(*commands: list[str]) -> tuple[list[int], list[str]]:
    """Exit statuses, and which of torch and numpy were imported."""
    words = json.dumps([[command[0], *command] for command in commands])
    environment = os.environ | {"PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, words], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    statuses, imported = json.loads(done.stdout)
    return statuses, imported


def tools_on(folder: Path, tag: str, out: Path) -> list[list[str]]:
    ask, both = "deepspeed.checkpoint", [str(folder / tag), "--json"]
    universal = ["--input_folder", str(folder / tag), "--output_folder", str(out / "universal")]
    return [
        ["deepspeed.checkpoint.ds_to_universal", *universal],
        [str(folder / "zero_to_fp32.py"), str(folder), str(out / "fp32"), "--tag", tag],
        [str(folder / "zero_to_fp32.py"), str(folder), str(out / "safe"), "--tag", tag, "--safe_serialization"],
        [ask, "inspect", *both],
        [ask, "verify", *both],
        [ask, "diff", *both, str(folder / tag)],
        [ask, "merge", "--help"],
    ]


@pytest.mark.parametrize("stage", (2, 3))
def test_the_tools_of_a_tag(pool: WorkerPool, tmp_path: Path, stage: int) -> None:
    pool.run(2, save_run, str(tmp_path), runs.config(stage, "bf16"))
    statuses, imported = run(*tools_on(tmp_path, "global_step3", tmp_path / "out"))
    assert statuses == [0] * 7
    assert "torch" not in imported
    found = torch.load(tmp_path / "out/fp32/pytorch_model.bin", weights_only=True, mmap=True)
    masters = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    runs.same(runs.digests(found), runs.digests(masters))
    for path in sorted((tmp_path / "out/universal").rglob("*.pt")):
        if "optimizer_state" not in path.name:  # that one holds the historical object of a loss scaler
            torch.load(path, weights_only=path.name[:3] != "rng", mmap=True)


def test_the_tools_of_a_reference_tag(tmp_path: Path) -> None:
    folder = tmp_path / "there"
    shutil.copytree(REFERENCE / "stage3_bf16", folder)
    shutil.copy(zero_to_fp32.__file__, folder)
    statuses, imported = run(*tools_on(folder, "saved", tmp_path / "out"))
    assert statuses == [0] * 7
    assert "torch" not in imported


def by_torch_alone(folder: str, out: Path, *flags: str) -> dict[str, Any]:
    assert zero_to_fp32.main([folder, str(out), "--tag", "saved", *flags], with_dtype=True) == 0
    return dict(torch.load(out / "pytorch_model.bin", weights_only=True))


@pytest.mark.parametrize(
    "case", ("stage0_fp32", "stage1_bf16_grads", "stage2_fp16_static", "stage3_bf16", "stage3_fp16")
)
@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
def test_the_script_alone_does_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, dtype: str) -> None:
    """Copied to a machine that has torch and not the package."""
    folder, flags = str(REFERENCE / case), ("--dtype", dtype)
    if case == "stage0_fp32":
        assert zero_to_fp32.main([folder, str(tmp_path / "a"), "--tag", "saved", *flags], with_dtype=True) == 1
        return
    ours = by_torch_alone(folder, tmp_path / "a", *flags)
    monkeypatch.setattr(zero_to_fp32, "bridge", None)
    theirs = by_torch_alone(folder, tmp_path / "b", *flags)
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (value.dtype, value.shape)
        assert torch.equal(ours[name].view(-1).view(torch.uint8), value.view(-1).view(torch.uint8)), name


def test_torn_files_have_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(REFERENCE / "stage2_bf16", tmp_path / "c")
    path = next((tmp_path / "c/saved").glob("*rank_1*optim*"))
    path.write_bytes(path.read_bytes()[:-100])
    for package in (True, False):
        if not package:
            monkeypatch.setattr(zero_to_fp32, "bridge", None)
        with pytest.raises(ValueError, match=f"{path.name} cannot be read, it is torn or not a checkpoint file"):
            zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "c"), "saved")


class Mine:
    """A class nobody has registered."""

    def __init__(self) -> None:
        self.value = torch.ones(2)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mine)

    __hash__ = None  # type: ignore[assignment]


def client_body(folder: str, settings: dict[str, Any]) -> None:
    engine = runs.start(settings)
    runs.step(engine, 0, 0)
    state = {"sparse": torch.eye(2).to_sparse(), "weight": torch.nn.Parameter(torch.ones(3)), "kind": torch.float16}
    engine.save_checkpoint(folder, tag="more", client_state=state)
    with torch.serialization.safe_globals([Mine]):
        engine.save_checkpoint(folder, tag="mine", client_state={"mine": [Mine()]})
    engine.destroy()


def test_client_state_goes_along_or_is_an_error(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(1, client_body, str(tmp_path), runs.config(1))

    def converted(tag: str) -> Any:
        out = str(tmp_path / f"{tag}_universal")
        convert(parse_arguments(["--input_folder", str(tmp_path / tag), "--output_folder", out]))
        return trusted.load_file(Path(out) / "mp_rank_00_model_states.pt")

    found = converted("more")
    assert torch.equal(found["sparse"].to_dense(), torch.eye(2))
    assert isinstance(found["weight"], torch.nn.Parameter)
    assert found["kind"] is torch.float16
    with pytest.raises(CheckpointError, match=r"client_state\['mine'\] holds objects of .*Mine, .*add_safe_globals"):
        converted("mine")
    with torch.serialization.safe_globals([Mine]):
        assert converted("mine")["mine"] == [Mine()]
