"""`NvmeStore` against a dictionary, with few buffers and failing disks; folders of dead processes."""

from __future__ import annotations

import errno
import os
import random
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.ops.aio.errors import AioError
from deepspeed.runtime.swap_tensor import swap_folder
from deepspeed.runtime.swap_tensor.aio_config import AioConfig
from deepspeed.runtime.swap_tensor.disk_speed import measure_disk
from deepspeed.runtime.swap_tensor.mapped_files import MappedFiles
from deepspeed.runtime.swap_tensor.nvme_store import NvmeStore
from tests.harness.pool import WorkerPool
from tests.harness.programs import run_programs

AIO = AioConfig(block_size=8192, queue_depth=4)
BUFFER = 1 << 16
Maker = Callable[..., NvmeStore]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Maker]:
    made: list[NvmeStore] = []

    def make(folder: Path = tmp_path, count: int = 3, **changes: Any) -> NvmeStore:
        settings = {"rank": 0, "aio": AIO, "pin": False, "buffer_count": count, "buffer_nbytes": BUFFER} | changes
        made.append(NvmeStore(folder, **settings))
        return made[-1]

    yield make
    for store in made:
        store.close()


def values(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numel).to(dtype)


# ---- values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", (1, 2, 3))
def test_any_order_of_calls(engine: str, make: Maker, count: int) -> None:
    """Random calls, with a dictionary of what must be there."""
    draw, store, expected = random.Random(count), make(count=count), {}
    for index in range(12):
        dtype = (torch.float32, torch.bfloat16, torch.uint8)[index % 3]
        numel = draw.choice((0, 1, 1000, 1024, 4097, BUFFER // dtype.itemsize))
        initial = values(numel, dtype) if index % 4 else None
        store.create(f"key{index}", numel, dtype, initial)
        expected[f"key{index}"] = torch.zeros(numel, dtype=dtype) if initial is None else initial.clone()
    held: dict[str, torch.Tensor] = {}
    for _ in range(300):
        key = draw.choice(list(expected))
        action = draw.random()
        if key in held:
            flat = held.pop(key)
            if action < 0.8:
                flat.copy_(values(flat.numel(), flat.dtype))
                expected[key] = flat.clone()
                store.commit(key)
            else:
                flat.fill_(7)
                store.drop(key)
        elif action < 0.4:
            store.prefetch(key)
        elif action < 0.45:
            store.flush()
        elif len(held) < count:
            held[key] = store.fetch(key)
            assert held[key].shape == expected[key].shape
            assert torch.equal(held[key], expected[key]), key
    for key in held:
        store.drop(key)
    store.flush()
    for key, value in expected.items():
        assert torch.equal(store.fetch(key), value)
        store.drop(key)


def test_an_update_with_three_buffers(engine: str, make: Maker) -> None:
    """The pipeline of an optimizer step; the memory is that of three buffers."""
    store = make(count=3)
    weights = {f"part{index}": values(BUFFER // 4 - index) for index in range(8)}
    for key, weight in weights.items():
        store.create(key, weight.numel(), weight.dtype, weight)
    for _ in range(3):
        keys = list(weights)
        for key, following in zip(keys, [*keys[1:], None], strict=True):
            flat = store.fetch(key)
            if following is not None:
                store.prefetch(following)
            flat.mul_(1.5)
            weights[key].mul_(1.5)
            store.commit(key)
        store.flush()
    for key, weight in weights.items():
        assert torch.equal(store.fetch(key), weight)
        store.drop(key)
    assert len({buffer.memory._room.data_ptr() for buffer in store._buffers}) <= 3  # type: ignore[union-attr]
    assert sum(buffer.memory.nbytes for buffer in store._buffers) <= 3 * BUFFER


def test_initial_values_of_any_strides_and_dtype(make: Maker) -> None:
    store, initial = make(count=1), torch.randn(20, 30, dtype=torch.float64).t()
    store.create("a", 600, torch.float32, initial)
    assert torch.equal(store.fetch("a"), initial.float().reshape(-1))


def test_zeros_take_their_room_but_are_not_written(make: Maker) -> None:
    store = make()
    store.create("a", 10_000, torch.float32)
    assert store.path.stat().st_blocks * 512 >= 40_000
    assert "a" in store
    assert not store.fetch("a").any()


# ---- what fails ----------------------------------------------------------------------------------------------------


def test_the_caller_holds_all_buffers(make: Maker) -> None:
    store = make(count=2)
    for key in "abc":
        store.create(key, 10, torch.float32)
    store.fetch("a")
    store.fetch("b")
    store.prefetch("c")  # no room: nothing happens
    with pytest.raises(
        RuntimeError, match=r"no buffer for 'c': all 2 are held \('a', 'b'\).*buffer_count to at least 3"
    ):
        store.fetch("c")
    store.drop("a")
    store.fetch("c")


def test_wrong_calls(make: Maker) -> None:
    store = make()
    store.create("a", 10, torch.float32)
    store.fetch("a")
    for call, error, text in (
        (lambda: store.fetch("a"), RuntimeError, "'a' was fetched already"),
        (lambda: store.fetch("none"), KeyError, "no key 'none' in .*rank0.swap"),
        (lambda: store.commit("none"), KeyError, "no key 'none'"),
        (lambda: store.create("a", 10, torch.float32), ValueError, "'a' exists already"),
        (
            lambda: store.create("b", 10, torch.float32, torch.zeros(9)),
            ValueError,
            "expected 10 initial elements, found 9",
        ),
        (lambda: store.create("b", 10, torch.qint8), ValueError, "found torch.qint8"),
        (lambda: store.create("b", 1 << 16, torch.float32), ValueError, r"at least 262,144 bytes \(65,536 elements\)"),
        (lambda: make(count=0), ValueError, "expected buffer_count and buffer_nbytes >= 1, found 0"),
    ):
        with pytest.raises(error, match=text):
            call()
    store.drop("a")
    with pytest.raises(RuntimeError, match="drop of 'a', which is not fetched"):
        store.drop("a")
    store.close()
    store.close()
    with pytest.raises(RuntimeError, match="the store is closed"):
        store.fetch("a")


def test_a_failed_write_is_heard_of_and_the_key_is_lost(engine: str, make: Maker) -> None:
    store = make()
    good = values(1000)
    store.create("good", 1000, torch.float32, good)
    store.create("bad", 10_000, torch.float32, values(10_000))
    store.flush()
    store.fetch("bad")
    store._engine.fault(1, errno.EIO)
    store.commit("bad")
    with pytest.raises(AioError, match=r"'bad': .*writing stopped at offset \d+: expected 40960 bytes.*rank0.swap"):
        store.flush()
    store.flush()  # said once
    with pytest.raises(AioError, match="'bad': "):  # what the file has of it is undefined
        store.fetch("bad")
    assert torch.equal(store.fetch("good"), good)


def test_a_failed_read_can_be_tried_again(engine: str, make: Maker) -> None:
    store, kept = make(), values(10_000)
    store.create("a", 10_000, torch.float32, kept)
    store.flush()
    store._engine.fault(1, errno.EIO)
    store.prefetch("a")
    with pytest.raises(AioError, match=r"'a': .*reading stopped at offset \d+"):
        store.fetch("a")
    assert torch.equal(store.fetch("a"), kept)


def test_a_file_that_was_cut(engine: str, make: Maker) -> None:
    store = make()
    store.create("a", 10_000, torch.float32, values(10_000))
    store.flush()
    os.truncate(store.path, 8192)
    with pytest.raises(AioError, match=r"'a': the file ends there; .* expected 40960 bytes, found 8192"):
        store.fetch("a")


def test_a_small_disk(engine: str, make: Maker, small_disk: Path) -> None:
    store, kept = make(small_disk), values(10_000)
    store.create("a", 10_000, torch.float32, kept)

    def fill() -> None:
        for index in range(100):
            store.create(f"more{index}", BUFFER // 4, torch.float32)

    with pytest.raises(AioError, match=r"no room: [\d,]+ bytes are needed, [\d,]+ are free.*rank0.swap") as caught:
        fill()
    assert caught.value.errno == errno.ENOSPC
    assert torch.equal(store.fetch("a"), kept)


# ---- folders -------------------------------------------------------------------------------------------------------


def test_folders_that_cannot_be_used(make: Maker, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    for folder in (tmp_path / "file", Path("/sys/swap")):  # even the super user may not write there
        with pytest.raises(AioError, match=f"offload_optimizer.nvme_path {folder} cannot be used: .*choose a folder"):
            make(folder)
        with pytest.raises(AioError, match=f"zero_optimization.offload_param.nvme_path {folder} cannot be used"):
            MappedFiles(folder, rank=0)


def test_a_missing_folder_is_made_and_left_empty(make: Maker, tmp_path: Path) -> None:
    store = make(tmp_path / "a" / "b")
    assert store.path.is_relative_to(tmp_path / "a" / "b" / swap_folder.BASE)
    store.close()
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_two_stores_in_one_folder(make: Maker) -> None:
    first, second = make(), make()
    for number, store in enumerate((first, second)):
        store.create("a", 10, torch.float32, torch.full((10,), float(number)))
        store.flush()
    first.close()
    assert second.fetch("a").tolist() == [1.0] * 10


def test_what_a_killed_process_left_goes_at_the_next_start(make: Maker, tmp_path: Path) -> None:
    alive = make()
    here, there = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons dislike forks beside threads
        child = os.fork()
    if not child:
        try:
            store = NvmeStore(tmp_path, rank=1, aio=AIO, pin=False, buffer_count=1, buffer_nbytes=BUFFER)
            store.create("a", 1000, torch.float32)
            os.write(there, os.fsencode(store.path))
            signal.pause()
        finally:
            os._exit(1)
    os.close(there)
    try:
        left = Path(os.fsdecode(os.read(here, 4096)))
        make()
        assert left.exists()  # its process lives
    finally:
        os.close(here)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert left.exists()
    newest = make()
    assert not left.parent.exists()
    assert alive.path.exists()
    assert newest.path.exists()


def test_a_process_that_ends_removes_its_files(pool: WorkerPool, tmp_path: Path) -> None:
    program = f"""
import torch
from pathlib import Path
from deepspeed.runtime.swap_tensor.aio_config import AioConfig
from deepspeed.runtime.swap_tensor.nvme_store import NvmeStore
store = NvmeStore(Path({str(tmp_path)!r}), rank=0, aio=AioConfig(), pin=False, buffer_count=2, buffer_nbytes=4096)
store.create("a", 1000, torch.float32, torch.ones(1000))
assert store.path.exists()
raise SystemExit(3)  # with a write under way
"""
    assert [ended.code for ended in run_programs(pool, program)] == [3]
    assert list(tmp_path.iterdir()) == []


def test_network_file_systems_are_told_of(make: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(swap_folder.logger, "warning", said.append)
    monkeypatch.setattr(swap_folder, "_file_system", lambda path: "nfs4")
    make()
    make()
    assert len(said) == 1
    assert "network file system (nfs4)" in said[0]


def test_the_speed_of_a_disk(engine: str, tmp_path: Path) -> None:
    speed = measure_disk(tmp_path / "new", AIO)
    assert speed.read > 1e6
    assert speed.write > 1e6
    assert speed.engine == engine
    assert speed.step_seconds(int(speed.read), int(speed.write)) == pytest.approx(2, rel=1e-3)
    assert "a step reads 1 GB and writes 2 GB: at least" in speed.describe(10**9, 2 * 10**9)
    assert measure_disk(tmp_path / "new") is speed
    assert list((tmp_path / "new").iterdir()) == []
