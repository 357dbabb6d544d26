"""From a tag to a universal folder: one file for every state of every parameter, whole, whatever ranks saved it.

    open the tag -> plan every file -> write them aside, several at a time -> verify the tag by the checksums of what
    was read -> manifest, rename -> pointer

Tensors go from mapped file to file a few MiB at a time, so memory does not grow with the model; only slices under
tensor parallelism are joined in memory, one state of one parameter per worker. Workers are threads: copying, checksums
and writing release the interpreter, and a thread is there at once where a process would first import torch.

Owns: order and atomicity of a conversion. Does not own: which files there are (``universal/plan.py``), the command line
(``ds_to_universal.py``), reading it back (``universal/reader.py``).
Invariant: the source is only read; the output appears complete, of a source with the bytes that were saved, or not at
all.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import names
from deepspeed.checkpoint.disk import durable
from deepspeed.checkpoint.disk.manifest import Manifest, is_complete
from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.checkpoint.reader import SavedTag, tags_in
from deepspeed.checkpoint.universal.plan import FileJob, open_sources, plan_conversion
from deepspeed.checkpoint.universal.record import UniversalRecord
from deepspeed.checkpoint.universal.sums import SourceSums
from deepspeed.git_version_info import version
from deepspeed.utils.crc32 import crc32
from deepspeed.utils.torch_archive import bridge
from deepspeed.utils.torch_archive.archive import Written
from deepspeed.utils.torch_archive.packs import ArchiveFile
from deepspeed.utils.torch_archive.save import PlainFile
from deepspeed.utils.torch_archive.symbols import NeedsTorch

_SPARE_NBYTES = 1 << 20  # model states, manifest
_COPY_NBYTES = 4 << 20
_FILE_NBYTES = 2048  # of each file beside its data


def convert(
    source: Path,
    output: Path,
    *,
    workers: int = 4,
    stage: int | None = None,
    strict: bool = True,
    inject_missing_state: bool = False,
) -> UniversalRecord:
    """Write the universal folder ``output`` of the tag folder ``source``, and ``latest_universal`` beside it.

    ``stage``: the ZeRO stage of DeepSpeed the folder is for (None: the one the tag was saved at); this release loads
    it at any stage. Raises CheckpointError when the tag is not complete, patterns do not fit, or writing fails; then
    what was at ``output`` before is still there.
    """
    _check_places(source, output)
    sources = open_sources(source, inject_missing_state)
    tags = [saved for part in sources for saved in part.slices]
    for saved in tags:
        saved.check_sizes([*_read_files(saved), *_random_states(saved)])
    try:
        record, jobs = plan_conversion(sources, stage)
    except Exception:
        for saved in tags:  # what does not fit together may be damaged: that is the better answer then
            _verify(saved, workers)
        raise
    unused = [pattern for part in sources for pattern in part.patterns.unused()]
    if strict and len(sources) == 1 and unused:
        raise CheckpointError(
            f"{keys.UNIVERSAL_CHECKPOINT_INFO} of {source} lists patterns that match no parameter: "
            f"{', '.join(map(repr, unused))}; --no_strict converts all the same"
        )
    try:
        _write(jobs, tags, output, workers)
    except OSError as error:
        raise CheckpointError(f"writing {output}: {error}; nothing was changed there") from error
    return record


def _check_places(source: Path, output: Path) -> None:
    if not source.is_dir():
        raise CheckpointError(f"{source} is not a folder; the input is a tag folder, like checkpoints/global_step10")
    if (source / names.UNIVERSAL_COMMON).exists():
        raise CheckpointError(f"{source} is a universal folder already; the input is the tag it was made of")
    if (source / names.LATEST).is_file() and not any(source.glob(f"*{keys.MODEL_FILE_SUFFIX}")):
        tags = ", ".join(str(source / tag) for tag in tags_in(source)) or "none"
        raise CheckpointError(f"{source} is a checkpoint folder; give one of its tags: {tags}")
    if not output.exists():
        return
    if output.resolve() == source.resolve():
        raise CheckpointError(f"input and output are the same folder, {source}")
    if not output.is_dir() or (any(output.iterdir()) and not (output / names.UNIVERSAL_COMMON).exists()):
        raise CheckpointError(
            f"{output} exists and is not a universal checkpoint, so it is not replaced; give another output folder"
        )


def _read_files(saved: SavedTag) -> list[str]:
    return [*saved.model_files(), *(saved.optim_files() if saved.stage >= 1 else ())]


def _random_states(saved: SavedTag) -> list[str]:
    """Files of random states the save wrote; they are copied, and compared with their checksums then."""
    return [name for name in saved.manifest.files if name.startswith("rng_state_")] if saved.manifest else []


def _verify(saved: SavedTag, workers: int, sums: SourceSums | None = None) -> None:
    """Every file of the tag has the bytes that were saved; ``sums`` knows those of what was read. CheckpointError."""
    files, shares, sum_of = _read_files(saved), max(saved.shards, 1), None if sums is None else sums.of_file
    checks = [partial(saved.check_files, files, share, shares, sum_of=sum_of) for share in range(shares)]
    run_together(checks, workers)


def _write(jobs: Sequence[FileJob], tags: Sequence[SavedTag], output: Path, workers: int) -> None:
    """Every file, aside; the tags are compared with their checksums before the folder gets its name."""
    saved, sums = tags[0], SourceSums()
    token = durable.new_token()
    aside = durable.saving_folder(output, token)
    output.parent.mkdir(parents=True, exist_ok=True)
    total = sum(job.nbytes + _FILE_NBYTES for job in jobs)
    free = shutil.disk_usage(output.parent).free
    if free < total + _SPARE_NBYTES:
        raise CheckpointError(f"{output.parent} has {free:,} bytes free, the universal checkpoint needs {total:,}")
    try:
        folders = sorted({(aside / job.path).parent for job in jobs})
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        ordered = sorted(jobs, key=lambda job: -job.nbytes)  # the largest first, so that no worker ends alone
        written = run_together([partial(_write_file, aside / job.path, job, sums) for job in ordered], workers)
        for tag in tags:
            _verify(tag, workers, sums)
        files = {job.path: done for job, done in zip(ordered, written, strict=True)}
        for folder in reversed(folders):
            durable.sync_folder(folder)
        steps = int(saved.model.get(keys.GLOBAL_STEPS, 0))
        Manifest(files, 0, steps, max(saved.shards, 1), version).write(aside)
        durable.publish_folder(aside, output, token)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    durable.write_text(output.parent / names.LATEST_UNIVERSAL, output.name)
    durable.clear_leftovers(output.parent, is_complete)


def _write_file(path: Path, job: FileJob, sums: SourceSums) -> Written:
    with durable.open_for_writing(path) as file:
        written = _pickled(job.make()).write(file, sums.seen) if job.copied is None else _copy(job.copied, file)
        file.flush()
        os.fsync(file.fileno())
    found = path.stat().st_size
    if found != written.nbytes:
        raise OSError(errno.EIO, f"{written.nbytes} bytes were written, the file has {found}", str(path))
    if job.saved is not None and written != job.saved:
        raise CheckpointError(f"{job.copied} is damaged: its bytes are not those that were saved")
    return written


def _copy(source: Path, target: BinaryIO) -> Written:
    nbytes = crc = 0
    with open(source, "rb") as file:
        while piece := file.read(_COPY_NBYTES):
            target.write(piece)
            nbytes, crc = nbytes + len(piece), crc32(piece, crc)
    return Written(nbytes, crc)


def _pickled(content: Any) -> ArchiveFile:
    """``content`` as a file; by torch where it holds more of torch than tensors."""
    try:
        return PlainFile(content)
    except NeedsTorch:
        from deepspeed.utils.torch_file import TorchFile

        return TorchFile(bridge.to_torch(content))


def run_together(works: Sequence[Callable[[], Any]], workers: int) -> list[Any]:
    """The results of ``works`` in order, from a few threads. The first error ends the others and is raised."""
    with ThreadPoolExecutor(max_workers=max(1, workers), thread_name_prefix="universal") as pool:
        futures = [pool.submit(work) for work in works]
        try:
            done, pending = wait(futures, return_when=FIRST_EXCEPTION)
        except BaseException:  # Ctrl-C: what has not begun must not be done before the pool lets go
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        for future in pending:
            future.cancel()
        for future in done:
            future.result()
        return [future.result() for future in futures]
