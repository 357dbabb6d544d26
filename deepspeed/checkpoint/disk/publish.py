"""What is left of a save once the ranks have agreed on it: write aside, agree, rename, ``latest``, retention.

Nothing here reads the engine, so it may run beside training (``disk/background.py``).

Owns: the order of these steps. Does not own: content (``writer.py``), atomicity (``disk/durable.py``), validity
(``disk/manifest.py``).
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed.checkpoint import agree, names, reader
from deepspeed.checkpoint.disk import direct, durable
from deepspeed.checkpoint.disk.manifest import Manifest, complete_tags, is_complete
from deepspeed.checkpoint.disk.scripts import copy_scripts
from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.git_version_info import version
from deepspeed.utils.logging import logger
from deepspeed.utils.torch_file import TorchFile, Written

_SPARE_NBYTES = 1 << 20  # archive overhead, manifest and scripts beside the data
Gather = Callable[[Any, str], list[Any]]


@dataclass(frozen=True)
class SaveRequest:
    """What one rank brings to the first agreement of a save."""

    tag: str
    token: str
    nbytes: int
    leader: bool


@dataclass(frozen=True)
class SaveJob:
    """One save that all ranks have agreed on: what is left to do needs no engine."""

    folder: Path
    tag: str
    files: dict[str, TorchFile]
    requests: list[SaveRequest]
    save_latest: bool
    global_steps: int

    @property
    def token(self) -> str:
        return self.requests[0].token

    @property
    def final(self) -> Path:
        return self.folder / self.tag

    @property
    def aside(self) -> Path:
        return durable.saving_folder(self.final, self.token)

    @property
    def doing(self) -> str:
        return f"saving checkpoint {self.tag!r} to {self.folder}"


class Publication:
    """Carries jobs out. ``leads``: this rank renames folders; ``config``: the ``checkpoint`` section."""

    def __init__(self, rank: int, world: int, leads: bool, config: Any) -> None:
        self.rank, self.world, self.leads, self.config = rank, world, leads, config

    def carry_out(self, job: SaveJob, gather: Gather) -> None:
        """Write and publish; reads nothing of the engine. Raises CheckpointError, the same on all ranks."""
        begun = time.monotonic()
        try:
            agree.together(job.doing, lambda: self._make_room(job), gather=gather)
            _, reports = agree.together(job.doing, lambda: self._write(job), lambda done: done, gather)
            agree.together(job.doing, lambda: self._publish(job, self._merged(reports, job.requests)), gather=gather)
        except CheckpointError:
            if self.leads:
                shutil.rmtree(job.aside, ignore_errors=True)
            raise
        if self.config.writer is not None and self.config.writer.show_statistics:
            nbytes, seconds = job.requests[self.rank].nbytes, time.monotonic() - begun
            logger.info(f"{job.doing}: {nbytes:,} bytes in {seconds:.2f} s, {nbytes / seconds / 1e9:.2f} GB/s")

    def _make_room(self, job: SaveJob) -> None:
        """The folder to write to, with enough space around it. Nobody has written yet."""
        if not self.leads:
            return
        job.aside.mkdir(parents=True, exist_ok=True)
        free, total = shutil.disk_usage(job.aside).free, sum(request.nbytes for request in job.requests)
        if free < total + _SPARE_NBYTES:
            raise CheckpointError(f"{job.aside.parent} has {free:,} bytes free, the checkpoint needs {total:,}")

    def _write(self, job: SaveJob) -> dict[str, Written]:
        job.aside.mkdir(parents=True, exist_ok=True)
        how = direct.writing_of(self.config.writer)
        return {name: durable.write_torch(job.aside / name, content, how) for name, content in job.files.items()}

    def _merged(self, reports: list[dict[str, Written]], requests: list[SaveRequest]) -> dict[str, Written]:
        """Every file of the folder this rank publishes."""
        ranks = range(self.world)
        if self.config.use_node_local_storage:
            leaders = [rank for rank in ranks if requests[rank].leader and rank <= self.rank]
            following = [rank for rank in ranks if requests[rank].leader and rank > self.rank]
            ranks = range(leaders[-1] if leaders else 0, following[0] if following else self.world)
        return {name: written for rank in ranks for name, written in reports[rank].items()}

    def _publish(self, job: SaveJob, files: dict[str, Written]) -> None:
        if not self.leads:
            return
        folder, final, aside, token = job.folder, job.final, job.aside, job.token
        siblings = complete_tags(final.parent)
        number = 1 + max((number for number, _ in siblings), default=0)
        Manifest(files, number, job.global_steps, self.world, version, token).write(aside)
        durable.publish_folder(aside, final, token)
        if not is_complete(final):
            raise CheckpointError(f"{final} is not complete right after it was written: is another job saving there?")
        if any(names.parse_optim_file(name) for name in files):
            copy_scripts(folder)
        if job.save_latest:
            durable.write_text(folder / names.LATEST, job.tag)
        self._retain(folder, final, token)
        durable.clear_leftovers(final.parent, is_complete)

    def _retain(self, folder: Path, final: Path, token: str) -> None:
        """Delete the oldest complete tags beyond ``checkpoint.keep_last``, never the one ``latest`` names.

        Tags with folders (``run/7``) lie below the file ``latest``; tags that hold other tags stay for these.
        """
        keep = self.config.keep_last
        if keep is None:
            return
        found = [tag for _, tag in complete_tags(final.parent) if tag != final.name]
        pointed = set()
        for place in (folder, final.parent):
            with contextlib.suppress(ValueError):
                named = reader.read_latest(place)
                if named is not None:
                    pointed.add(place / named)
        for tag in found[: max(0, len(found) + 1 - keep)]:
            if final.parent / tag not in pointed and not reader.tags_in(final.parent / tag):
                durable.delete_folder(final.parent / tag, tag, token)
