"""``python -m deepspeed.checkpoint merge NODE0 NODE1 ... --out OUT``: one tag from the disks of several nodes.

With ``checkpoint.use_node_local_storage`` every node holds what its own ranks wrote. Put together, the files are an
ordinary tag, which loads at any number of ranks and stage. The folders may be given in any order.

Owns: the command. Does not own: what a tag needs to be whole (``reader.py``).
Invariant: the tag appears in ``OUT`` when every file of every rank is there and every byte is the one that was saved.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepspeed.checkpoint import names
from deepspeed.checkpoint.disk import durable
from deepspeed.checkpoint.disk.manifest import Manifest, is_complete, read_manifest, wrong_checksums, wrong_sizes
from deepspeed.checkpoint.disk.scripts import copy_scripts
from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.checkpoint.tool import contents


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dirs", type=Path, nargs="+", help="checkpoint folder of each node")
    parser.add_argument("--tag", help="the tag (default: the one that `latest` names)")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder to write the whole tag into")
    parser.add_argument("--json", action="store_true", help="print one object for programs")


def run(options: argparse.Namespace) -> int:
    facts = merge([contents.tag_folder(path, options.tag) for path in options.dirs], options.out)
    if options.json:
        print(json.dumps(facts, indent=1))
    else:
        print(f"{facts['folder']}: {facts['files']} files of {facts['nodes']} nodes, {facts['nbytes']:,} bytes")
    return 0


def merge(folders: Sequence[Path], out: Path) -> dict[str, Any]:
    """Copy the tags in ``folders`` into ``out/<tag>``, named in ``out/latest``; what was done, as plain data.

    A file that several nodes have (the model states of stages 0 to 2) comes from the first. Raises CheckpointError when
    the tags are of different saves, a rank's file is on none of the disks, bytes are damaged, or the tag exists.
    """
    manifests = [_manifest_of(folder) for folder in folders]
    tag, final = folders[0].name, out / folders[0].name
    _same_save(folders, manifests)
    if final.exists():
        raise CheckpointError(f"{final} exists; give another folder to merge into")
    sources: dict[str, Path] = {}
    for folder, found in zip(folders, manifests, strict=True):
        sources = {**dict.fromkeys(found.files, folder), **sources}
    whole = Manifest(
        {name: written for found in reversed(manifests) for name, written in found.files.items()},
        manifests[0].number, manifests[0].global_steps, manifests[0].world_size, manifests[0].ds_version,
        manifests[0].save,
    )  # fmt: skip
    token = durable.new_token()
    aside = durable.saving_folder(final, token)
    made = not out.exists()
    aside.mkdir(parents=True)
    try:
        for name, folder in sources.items():
            with open(folder / name, "rb") as source, durable.written_aside(aside / name) as target:
                shutil.copyfileobj(source, target, 4 << 20)
        whole.write(aside)
        _check(aside, whole, folders)
        copy_scripts(out)
        durable.publish_folder(aside, final, token)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        if made:
            with contextlib.suppress(OSError):
                out.rmdir()
        raise
    durable.write_text(out / names.LATEST, tag)
    durable.clear_leftovers(final.parent, is_complete)
    return {"folder": str(final), "files": len(sources), "nodes": len(folders), "nbytes": whole.nbytes}


def _manifest_of(folder: Path) -> Manifest:
    found = read_manifest(folder)
    if found is None:
        raise CheckpointError(f"{folder} has no {names.MANIFEST}: not a complete tag of this release")
    problems = wrong_sizes(folder, found)
    if problems:
        raise CheckpointError(f"{folder} is not complete: {'; '.join(problems)}")
    return found


def _same_save(folders: Sequence[Path], manifests: Sequence[Manifest]) -> None:
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise CheckpointError(f"a folder is given twice: {', '.join(str(folder) for folder in folders)}")
    first = manifests[0]
    for folder, found in zip(folders, manifests, strict=True):
        if (folder.name, found.global_steps, found.world_size) != (
            folders[0].name,
            first.global_steps,
            first.world_size,
        ):
            raise CheckpointError(
                f"{folder} is of step {found.global_steps} on {found.world_size} ranks, {folders[0]} of step "
                f"{first.global_steps} on {first.world_size} ranks: not one save. --tag names a tag that all have"
            )
        if found.save != first.save:
            raise CheckpointError(f"{folder} and {folders[0]} were written by two saves, perhaps of two runs: not one")


def _check(folder: Path, whole: Manifest, folders: Sequence[Path]) -> None:
    problems = wrong_checksums(folder, whole, whole.files)
    if problems:
        raise CheckpointError("; ".join(problems))
    saved = contents.open_tag(folder)
    saved.model_files()
    parsed = [names.parse_optim_file(name) for name in whole.files]
    held = {parts.dp_rank for parts in parsed if parts is not None}
    missing = sorted(set(range(saved.shards)) - held)
    if missing:
        from deepspeed.comm.activity import format_ranks

        raise CheckpointError(
            f"{', '.join(str(path) for path in folders)} hold the optimizer states of {format_ranks(sorted(held))} of "
            f"{saved.shards}; those of {format_ranks(missing)} are on disks of other nodes: give their folders too"
        )
