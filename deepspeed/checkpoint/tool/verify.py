"""``python -m deepspeed.checkpoint verify DIR``: is every byte the one that was saved, and every element there?

Sizes and CRC-32 of all files against the manifest, files the save did not write, whether ``latest`` names a whole tag,
and whether the layout record finds every element of every tensor. A tag without a manifest (another release wrote it)
is checked record by record by the checksums inside its archives. Of a universal folder, the files that its record lists
and the elements in them.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import names, reader, trusted
from deepspeed.checkpoint.disk.manifest import read_manifest, wrong_checksums, wrong_sizes
from deepspeed.checkpoint.errors import CheckpointError, OneNodesPart
from deepspeed.checkpoint.tool import contents
from deepspeed.checkpoint.universal.record import UniversalRecord
from deepspeed.utils.torch_archive.tensors import PlainTensor

DAMAGED = 1  # the exit status, also for a part of a save


@dataclass
class Verdict:
    """What was found about one tag folder. Problems make it damaged, notes do not. ``part``: its bytes are those that
    were saved, but other nodes hold the rest of the save."""

    folder: Path
    files: int = 0
    nbytes: int = 0
    tensors: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    part: bool = False

    @property
    def state(self) -> str:
        return "one node's PART of a save" if self.part else "DAMAGED" if self.problems else "ok"

    def facts(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder), "files": self.files, "nbytes": self.nbytes, "tensors": self.tensors,
            "problems": self.problems, "notes": self.notes, "part": self.part,
        }  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    contents.add_tag_arguments(parser)
    parser.add_argument("--all", action="store_true", help="every tag of the checkpoint folder")


def run(options: argparse.Namespace) -> int:
    verdicts = [verify(folder) for folder in chosen_folders(options.dir, options.tag, options.all)]
    damaged = any(verdict.problems for verdict in verdicts)
    if options.json:
        print(json.dumps({"ok": not damaged, "tags": [verdict.facts() for verdict in verdicts]}, indent=1))
        return DAMAGED if damaged else 0
    for verdict in verdicts:
        counts = f"{verdict.files} files, {verdict.nbytes:,} bytes, {verdict.tensors} tensors"
        print(f"{verdict.folder}: {verdict.state}, {counts}")
        for line in verdict.problems:
            print(f"  {line}")
        for line in verdict.notes:
            print(f"  note: {line}")
    return DAMAGED if damaged else 0


def chosen_folders(path: Path, tag: str | None, everything: bool) -> list[Path]:
    """Tag folders to look at. Raises CheckpointError when there are none."""
    if not everything:
        folder = contents.tag_folder(path, tag)
        if not folder.is_dir():
            where = reader.describe(folder.parent)
            raise CheckpointError(f"there is no tag {folder.name!r} in {folder.parent}; {where}")
        return [folder]
    found = [path / name for name in reader.tags_in(path)]
    if not found:
        raise CheckpointError(f"{reader.describe(path)}: there is no tag in it")
    return found


def verify(folder: Path) -> Verdict:
    """Everything that can be said about one tag folder."""
    verdict = Verdict(folder)
    present = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    verdict.notes += [f"{name} is a file of an unfinished save" for name in present if names.is_partial_file(name)]
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        verdict.problems.append(str(error))
        return verdict
    if manifest is None:
        verdict.notes.append(f"there is no {names.MANIFEST}: checked by the checksums inside the archives")
        ours = [name for name in present if names.is_checkpoint_file(name)]
        verdict.problems += [line for name in ours for line in torn_records(folder / name)]
    else:
        ours = [name for name in sorted(manifest.files) if (folder / name).is_file()]  # in folders too
        verdict.problems += wrong_sizes(folder, manifest)
        verdict.problems += wrong_checksums(folder, manifest, [n for n in ours if right_size(folder, manifest, n)])
        for name in present:
            if name not in manifest.files and name != names.MANIFEST and names.is_checkpoint_file(name):
                verdict.problems.append(f"{name} looks like a checkpoint file, but this save did not write it")
    verdict.files, verdict.nbytes = len(ours), sum((folder / name).stat().st_size for name in ours)
    if not verdict.problems:
        check_elements(verdict)
    return verdict


def right_size(folder: Path, manifest: Any, name: str) -> bool:
    return not wrong_sizes(folder, manifest, [name])


def torn_records(path: Path) -> Iterator[str]:
    """One line when ``path`` is an archive with damaged records, or none at all."""
    if path.suffix != ".pt":
        return
    import zipfile

    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, OSError) as error:
        yield f"{path.name} cannot be read: {error}"
        return
    if damaged is not None:
        yield f"{path.name} is damaged: record {damaged} has another checksum than was saved"


def check_elements(verdict: Verdict) -> None:
    """Open the tag and look every element of every tensor up."""
    try:
        if (verdict.folder / names.UNIVERSAL_COMMON).exists():
            check_universal(verdict)
            return
        saved = contents.open_tag(verdict.folder)
        saved.model_files()
        if saved.shards:
            saved.optim_files()
        verdict.tensors = sum(item.shape is not None for item in contents.items(saved))
    except (CheckpointError, ValueError) as error:
        verdict.problems.append(str(error))
        verdict.part = isinstance(error, OneNodesPart)


def check_universal(verdict: Verdict) -> None:
    """Look up every file that the record lists. Raises CheckpointError where that cannot be read."""
    common = verdict.folder / names.UNIVERSAL_COMMON
    data = trusted.load_plain(common)
    if not isinstance(data, dict) or keys.UNIVERSAL_RECORD not in data:
        verdict.notes.append(f"{names.UNIVERSAL_COMMON} does not say what each parameter has: files alone are checked")
        return
    for name, entry in UniversalRecord.from_data(data[keys.UNIVERSAL_RECORD], common).parameters.items():
        for stem in entry.stems():
            file = names.universal_file(name, stem)
            if not (verdict.folder / file).is_file():
                verdict.problems.append(f"{file} is missing: {stem} of parameter {name!r}")
                continue
            verdict.tensors += 1
            if stem == keys.FP32_WEIGHT_KEY:
                verdict.problems += wrong_weight(verdict.folder / file, math.prod(entry.shape))


def wrong_weight(path: Path, numel: int) -> Iterator[str]:
    """One line when the master in ``path`` has not ``numel`` elements."""
    found = trusted.load_plain(path)
    value: Any = found.get(keys.PARAM) if isinstance(found, dict) else found
    held = value.numel() if isinstance(value, PlainTensor) else 0
    if held != numel:
        yield f"{path.name} of parameter {path.parent.name!r} has {held} elements, {numel} were saved"
