"""Exports as safetensors: complete, split, indexed, read by the format's own library and back into a plain module."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist

from deepspeed.checkpoint import CheckpointError
from deepspeed.checkpoint import safetensors as ours
from tests.distributed.checkpoint import runs
from tests.harness.pool import WorkerPool


def export_body(folder: str, stage: int, precision: str) -> dict[str, str]:
    engine = runs.start(runs.config(stage, precision))
    for index in range(2):
        runs.step(engine, index, dist.get_rank())
    assert engine.save_16bit_model(f"{folder}/one", "model.safetensors")
    whole = ours.DEFAULT_SHARD_NBYTES
    ours.DEFAULT_SHARD_NBYTES = 500
    try:
        assert engine.save_16bit_model(f"{folder}/split", "model.safetensors")
        engine.save_16bit_model(f"{folder}/trained", "model.safetensors", exclude_frozen_parameters=True)
    finally:
        ours.DEFAULT_SHARD_NBYTES = whole
    right = runs.whole(engine.module)
    engine.destroy()
    return right


@pytest.mark.parametrize(("stage", "precision"), ((0, "fp32"), (2, "bf16"), (3, "bf16"), (3, "fp32")))
def test_exports_load_strictly(pool: WorkerPool, tmp_path: Path, stage: int, precision: str) -> None:
    right, _ = pool.run(2, export_body, str(tmp_path), stage, precision)
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["model.safetensors"]
    index = json.loads((tmp_path / "split" / "model.safetensors.index.json").read_text())
    files = {path.name for path in (tmp_path / "split").iterdir()}
    count = len(files) - 1
    assert files == {"model.safetensors.index.json", *index["weight_map"].values()}
    assert f"model-00001-of-{count:05}.safetensors" in files
    assert count >= 2
    for folder in ("one", "split"):
        module = runs.build(9)
        if precision == "bf16":
            for param in module.parameters():
                param.data = param.data.bfloat16()
        ours.load(module, tmp_path / folder)
        runs.same(right, runs.digests(module.state_dict()))
    theirs: dict[str, torch.Tensor] = {}
    for name in files - {"model.safetensors.index.json"}:
        part = safetensors.torch.load_file(tmp_path / "split" / name)
        assert {index["weight_map"][key] for key in part} == {name}
        theirs |= part
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in theirs.values())
    runs.same({**right, "head.weight": None}, {**runs.digests(theirs), "head.weight": None})
    left_out = set(theirs) - set(ours.read(tmp_path / "trained"))
    assert left_out == {"frozen.weight", "frozen.bias"}


def failing_body(folder: str) -> None:
    from deepspeed.checkpoint.disk import durable

    engine = runs.start(runs.config(3))
    engine.save_16bit_model(folder, "model.safetensors")
    before = Path(folder, "model.safetensors").read_bytes()
    runs.step(engine, 0, dist.get_rank())
    plain = durable.open_for_writing

    class Full:
        """Takes the header and no more."""

        def __init__(self, path: Path) -> None:
            self.file, self.writes = plain(path), 0

        def write(self, data: Any) -> int:
            self.writes += 1
            if self.writes > 3:
                raise OSError(28, "No space left on device")
            return self.file.write(data)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    durable.open_for_writing = Full
    try:
        with pytest.raises(CheckpointError, match="No space left"):
            engine.save_16bit_model(folder, "model.safetensors")
    finally:
        durable.open_for_writing = plain
    dist.barrier()
    assert [entry.name for entry in Path(folder).iterdir()] == ["model.safetensors"]
    assert Path(folder, "model.safetensors").read_bytes() == before
    engine.destroy()


def test_a_failure_is_everyones_and_leaves_the_old_file(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, failing_body, str(tmp_path))


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    state = {name: value.detach() for name, value in module.state_dict().items() if name != "1.bias"}
    safetensors.torch.save_file({**state, "other": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match=r"1\.bias[^?]*other"):
        ours.load(module, tmp_path)
    assert ours.load(module, tmp_path, strict=False).missing_keys == ["1.bias"]


@pytest.mark.parametrize("cut", (0, 5, 40, -1))
def test_torn_files_are_named(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"a": torch.ones(30), "b": torch.ones(3, dtype=torch.int8)}, path)
    whole = path.read_bytes()
    assert torch.equal(ours.read(path)["a"], torch.ones(30))
    path.write_bytes(whole[:cut])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        ours.read(path)


def test_an_index_stays_in_its_folder(tmp_path: Path) -> None:
    index = {"metadata": {}, "weight_map": {"a": "../secret.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="outside its folder"):
        ours.read(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"gone\.safetensors is missing"):
        ours.read(tmp_path)


def test_any_order_and_every_dtype(tmp_path: Path) -> None:
    tensors = {
        "scalar": torch.tensor(3, dtype=torch.int64),
        "flags": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 4),
        "half": torch.randn(5, 3).half().t(),
        "wide": torch.randn(7, dtype=torch.float64),
        "eight": torch.randn(6).to(torch.float8_e4m3fn),
    }
    entries = [ours.Entry(name, tuple(value.shape), value.dtype) for name, value in tensors.items()]
    writing = ours.Writer(tmp_path / "model.safetensors", entries)
    for name in reversed(tensors):
        writing.put(name, tensors[name])
    writing.finish()
    for found in (ours.read(tmp_path), safetensors.torch.load_file(tmp_path / "model.safetensors")):
        runs.same(runs.digests(tensors), runs.digests({name: found[name] for name in tensors}))
    with pytest.raises(CheckpointError, match=r"dtype torch\.complex64"):
        ours.Writer(tmp_path / "bad.safetensors", [ours.Entry("c", (1,), torch.complex64)])
