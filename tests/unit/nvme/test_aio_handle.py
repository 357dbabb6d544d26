"""`aio_handle`: every size, offset and address, against ordinary files; what fails names the file."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deepspeed.native.build import NativeUnavailable
from deepspeed.ops.aio import engine as engine_module
from deepspeed.ops.aio import files
from deepspeed.ops.aio.engine import AioEngine
from deepspeed.ops.aio.errors import AioError
from deepspeed.ops.aio.files import AioFile
from deepspeed.ops.aio.handle import aio_handle
from deepspeed.ops.aio.module import aio_module, pin_memory_module

BLOCK = 16384


@pytest.fixture
def handle(engine: str) -> Iterator[aio_handle]:
    made = aio_handle(BLOCK, 4, False, True, 2)
    assert engine in repr(made)
    yield made
    made._engine.close()


def noise(nbytes: int, shift: int = 0) -> torch.Tensor:
    """Random bytes at an address that is ``shift`` beyond what torch gives.  # (nbytes,) uint8"""
    return torch.randint(0, 256, (nbytes + shift,), dtype=torch.uint8)[shift:]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


@pytest.mark.parametrize("offset", (0, 1, 4096, 5000))
@pytest.mark.parametrize("nbytes", (0, 1, 4095, 4096, 4097, 5 * BLOCK + 511))
def test_any_size_offset_and_address(handle: aio_handle, tmp_path: Path, nbytes: int, offset: int) -> None:
    file = tmp_path / "file"
    for tensor in (
        noise(nbytes),
        noise(nbytes, shift=1),
        handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8)).copy_(noise(nbytes)),
    ):
        before = b"z" * 7000
        file.write_bytes(before)
        assert handle.sync_pwrite(tensor, str(file), offset) == 1
        expected = bytearray(before)
        if nbytes:
            expected.extend(bytes(max(0, offset + nbytes - len(expected))))
            expected[offset : offset + nbytes] = raw(tensor)
        assert file.read_bytes() == bytes(expected)
        back = torch.zeros_like(tensor)
        assert handle.sync_pread(back, str(file), offset) == 1
        assert torch.equal(back, tensor)


def test_many_at_once(handle: aio_handle, tmp_path: Path) -> None:
    written = [torch.randn(1000 + 777 * index) for index in range(40)]
    for index, tensor in enumerate(written):
        assert handle.async_pwrite(tensor, str(tmp_path / f"{index}")) == 0
    assert handle.wait() == 40
    read = [torch.zeros_like(tensor) for tensor in written]
    for index, tensor in enumerate(read):
        assert handle.async_pread(tensor, str(tmp_path / f"{index}")) == 0
    assert handle.wait() == 40
    assert all(map(torch.equal, written, read))
    assert handle.wait() == 0


def test_a_transfer_waits_for_the_one_before(engine: str, tmp_path: Path) -> None:
    """The memory is written out, then read into: the order must hold however long the write takes."""
    made = AioEngine(4096, 2, 1)
    file = AioFile(tmp_path / "file", write=True, create=True)
    first, second, memory = noise(1 << 20), noise(1 << 20), torch.empty(1 << 20, dtype=torch.uint8)
    made.start(True, file, second, 1 << 20).wait()
    for _ in range(10):
        memory.copy_(first)
        write = made.start(True, file, memory, 0)
        read = made.start(False, file, memory, 1 << 20, after=write)
        read.wait()
        write.wait()
        assert torch.equal(memory, second)
        made.start(False, file, memory, 0).wait()
        assert torch.equal(memory, first)
    made.close()
    file.close()


def test_a_file_without_direct_access(handle: aio_handle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_DIRECT", 0)
    tensor, back = noise(3 * BLOCK + 5), torch.zeros(3 * BLOCK + 5, dtype=torch.uint8)
    handle.sync_pwrite(tensor, str(tmp_path / "file"))
    handle.sync_pread(back, str(tmp_path / "file"))
    assert torch.equal(tensor, back)


# ---- what fails ----------------------------------------------------------------------------------------------------


def test_a_short_file_is_an_error_before_memory_changes(handle: aio_handle, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(5000))
    tensor = torch.ones(8192, dtype=torch.uint8)
    with pytest.raises(AioError, match=r"offset 5000: expected 8192 bytes, found 4900.*file'"):
        handle.sync_pread(tensor, str(file), 100)
    assert bool((tensor == 1).all())


def test_a_file_cut_while_it_is_read(engine: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(10 * 4096))
    made, file = AioEngine(4096, 2, 1), AioFile(tmp_path / "file")
    os.truncate(tmp_path / "file", 3 * 4096 + 10)
    transfer = made.start(False, file, noise(10 * 4096), 0)
    with pytest.raises(AioError, match=f"offset {3 * 4096 + 10}: expected 40960 bytes, found {3 * 4096 + 10}"):
        transfer.wait()
    made.close()
    file.close()


def test_files_that_cannot_be_opened(handle: aio_handle, tmp_path: Path) -> None:
    tensor = noise(10)
    for name, number in ((tmp_path / "none" / "file", errno.ENOENT), (tmp_path, errno.EISDIR)):
        with pytest.raises(AioError) as caught:
            handle.sync_pwrite(tensor, str(name))
        assert (caught.value.errno, caught.value.filename) == (number, str(name))
    with pytest.raises(AioError, match="cannot be read"):
        handle.async_pread(tensor, str(tmp_path / "none"))
    assert handle.wait() == 0


@pytest.mark.parametrize("write", (True, False))
def test_an_error_of_the_disk(handle: aio_handle, tmp_path: Path, write: bool) -> None:
    """One block of two transfers fails: that transfer is an error, the other one ends well."""
    content = {str(tmp_path / name): noise(8 * BLOCK) for name in ("one", "two")}
    tensors = {}
    for name, values in content.items():
        Path(name).write_bytes(bytes(8 * BLOCK) if write else raw(values))
        tensors[name] = values if write else torch.zeros_like(values)
    handle._engine.fault(3, errno.EIO)
    for name, tensor in tensors.items():
        (handle.async_pwrite if write else handle.async_pread)(tensor, name)
    with pytest.raises(AioError, match=r"offset \d+: expected 131072 bytes") as caught:
        handle.wait()
    assert caught.value.errno == errno.EIO
    (good,) = set(content) - {caught.value.filename}
    assert Path(good).read_bytes() == raw(content[good])
    assert torch.equal(tensors[good], content[good])
    handle.sync_pwrite(content[good], caught.value.filename)  # the handle goes on
    assert Path(caught.value.filename).read_bytes() == raw(content[good])


def test_transfers_that_move_half_go_on(handle: aio_handle, tmp_path: Path) -> None:
    handle._engine.fault(0, 0)
    tensor, back = noise(9 * BLOCK + 99), torch.zeros(9 * BLOCK + 99, dtype=torch.uint8)
    handle.sync_pwrite(tensor, str(tmp_path / "file"), 7)
    handle.sync_pread(back, str(tmp_path / "file"), 7)
    assert torch.equal(tensor, back)


def test_a_full_disk_changes_nothing(handle: aio_handle, small_disk: Path) -> None:
    old = small_disk / "old"
    old.write_bytes(b"a" * 300_000)
    for name in ("old", "new"):
        with pytest.raises(AioError, match=r"bytes are needed, [\d,]+ are free") as caught:
            handle.sync_pwrite(noise(2 << 20), str(small_disk / name))
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(small_disk / name))
    assert old.read_bytes() == b"a" * 300_000
    assert [path.name for path in small_disk.iterdir()] == ["old"]
    handle.sync_pwrite(noise(500_000), str(small_disk / "new"))  # what the failed ones took is free again


def test_tensors_no_file_can_be_read_into(handle: aio_handle, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(10_000))
    for tensor, text in (
        (torch.arange(100.0)[::2], r"contiguous tensor, found shape \(50,\)"),
        (torch.empty(5, device="meta"), "host memory, found one on meta"),
    ):
        with pytest.raises(ValueError, match=text):
            handle.sync_pwrite(tensor, str(tmp_path / "file"))
        with pytest.raises(ValueError, match=text):
            handle.sync_pread(tensor, str(tmp_path / "file"))


def test_settings_below_one_are_refused() -> None:
    for position, name in enumerate(("block_size", "queue_depth")):
        values = [4096, 4]
        values[position] = 0
        with pytest.raises(ValueError, match=f"expected {name} >= 1, found 0"):
            aio_handle(*values)


@pytest.mark.parametrize(
    ("arguments", "said"),
    (
        ({"block_size": "1M"}, r"expected block_size >= 1, a whole number, found '1M' \(str\)"),
        ({"block_size": 4096.5}, r"found 4096.5 \(float\)"),
        ({"queue_depth": True}, "expected queue_depth"),
        ({"queue_depth": None}, "found None"),
        ({"intra_op_parallelism": [2]}, "expected intra_op_parallelism"),
        ({"single_submit": "no"}, r"single_submit\): expected True or False, found 'no'"),
        ({"overlap_events": "false"}, "overlap_events"),
    ),
)
def test_settings_of_another_type_are_refused(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        aio_handle(**arguments)  # type: ignore[arg-type]


def test_a_block_size_that_disks_do_not_take_is_told(caplog: pytest.LogCaptureFixture) -> None:
    assert aio_handle(block_size=5001).get_block_size() == 5001
    assert "block_size 5001 is not a multiple of 4096 bytes" in caplog.text
    assert "requests of 8192 bytes" in caplog.text


def test_what_is_no_tensor_or_file_is_named(handle: aio_handle, tmp_path: Path) -> None:
    name, tensor = str(tmp_path / "file"), torch.zeros(4)
    for call in (handle.sync_pwrite, handle.async_pwrite, handle.sync_pread, handle.async_pread):
        with pytest.raises(TypeError, match=r"expected a torch\.Tensor in host memory, found list"):
            call([1], name)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="expected the name of a file, found None"):
            call(tensor, None)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="file: expected file_offset >= 0, a whole number, found '0'"):
            call(tensor, name, "0")  # type: ignore[arg-type]
    for method in (handle.is_pinned, handle.free_cpu_locked_tensor):
        with pytest.raises(TypeError, match=r"expected a torch\.Tensor"):
            method([1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="num_elem"):
        handle.new_cpu_locked_tensor("3", tensor)  # type: ignore[arg-type]
    assert not os.listdir(tmp_path)


# ---- processes and systems -----------------------------------------------------------------------------------------


def test_a_forked_process_is_told(handle: aio_handle, tmp_path: Path) -> None:
    handle.sync_pwrite(noise(10), str(tmp_path / "file"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons dislike forks beside threads
        child = os.fork()
    if not child:
        code = 1
        try:
            handle.sync_pread(noise(10), str(tmp_path / "file"))
        except RuntimeError as problem:
            code = 0 if "make a handle after the fork" in str(problem) else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert handle.sync_pread(noise(10), str(tmp_path / "file")) == 1


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(name: str) -> None:
        raise NativeUnavailable(f"native library {name!r}: no C++ compiler found")

    monkeypatch.delenv("DS_AIO_ENGINE", raising=False)
    monkeypatch.setattr(engine_module, "load", unavailable)
    engine_module._library.cache_clear()
    engine_module._say_slow.cache_clear()
    said: list[str] = []
    monkeypatch.setattr(engine_module.logger, "warning", said.append)
    handles = [aio_handle(), aio_handle()]
    try:
        assert [handle._engine.name for handle in handles] == ["python", "python"]
        assert len(said) == 1
        assert "no C++ compiler found" in said[0]
        tensor = torch.ones(10)
        assert aio_module().deepspeed_memcpy(torch.zeros(10), tensor) == 0
    finally:
        engine_module._library.cache_clear()
        for handle in handles:
            handle._engine.close()


def test_an_engine_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_AIO_ENGINE", "spdk")
    with pytest.raises(ValueError, match="DS_AIO_ENGINE='spdk': expected one of uring, threads, python"):
        aio_handle()


# ---- the historical interface --------------------------------------------------------------------------------------


def test_answers_of_the_historical_names(tmp_path: Path) -> None:
    module, file = aio_module(), str(tmp_path / "file")
    handle = module.aio_handle(block_size=4096, queue_depth=8)
    assert (handle.get_block_size(), handle.get_queue_depth(), handle.get_intra_op_parallelism()) == (4096, 8, 1)
    assert (handle.get_single_submit(), handle.get_overlap_events()) == (False, False)
    tensor, back = torch.randn(3000), torch.zeros(3000)
    assert handle.write(tensor, file, True) == 0
    assert handle.pwrite(tensor, file, True, False) == 1
    assert handle.pwrite(tensor, file, False, True) == 0
    assert handle.wait() == 1
    assert handle.read(back, file, True) == 0
    assert handle.pread(back, file, True, False) == 1
    assert torch.equal(tensor, back)
    with open(file, "r+b") as opened:
        assert handle.async_pwrite(tensor[:10], opened.fileno(), 4096) == 0
        assert handle.wait() == 1
    assert handle.sync_pread(back[:10], file, 4096) == 1
    assert torch.equal(back[:10], tensor[:10])
    assert module.aio_write(tensor, file, 4096, 4, True, False, False) == 0
    assert module.aio_read(back, file, 4096, 4, True, True, True) == 0
    assert module.deepspeed_memcpy(back, tensor + 1) == 0
    assert torch.equal(back, tensor + 1)
    with pytest.raises(ValueError, match=r"expected 12000 bytes \(the target\), found 8"):
        module.deepspeed_memcpy(back, torch.ones(2))
    handle._engine.close()


@pytest.mark.parametrize("kind", ("aio_handle", "pin_handle"))
def test_pinned_tensors(kind: str) -> None:
    handle = aio_module().aio_handle() if kind == "aio_handle" else pin_memory_module().pin_handle()
    tensor = handle.new_cpu_locked_tensor(1001, torch.empty(0, dtype=torch.bfloat16))
    assert (tensor.shape, tensor.dtype, tensor.data_ptr() % 4096) == ((1001,), torch.bfloat16, 0)
    assert not tensor.any()
    assert handle.is_pinned(tensor[5:])
    assert not handle.is_pinned(torch.zeros(3))
    assert handle.free_cpu_locked_tensor(torch.zeros(3)) is False
    assert handle.free_cpu_locked_tensor(tensor) is True
    assert handle.free_cpu_locked_tensor(tensor) is False
    tensor.fill_(1)  # still ours while somebody holds it
