"""``python -m deepspeed.checkpoint convert --to deepspeed TAG_DIR OUT_DIR``: the same state in another layout.

The result is a tag in ``OUT_DIR``, of the same name, stage and number of ranks, with ``latest`` beside it; DeepSpeed
loads it at that number of ranks, and its own tools read it. (Here every layout loads as it is; to load a tag of
DeepSpeed no conversion is needed.)

Owns: the command. Does not own: the content (``reference/writer.py``).
Invariant: the tag appears when all of its files are complete.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

from deepspeed.checkpoint import names, reader
from deepspeed.checkpoint.disk import durable
from deepspeed.checkpoint.disk.manifest import is_complete
from deepspeed.checkpoint.disk.scripts import copy_scripts
from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.checkpoint.reference.writer import ReferenceWriter
from deepspeed.checkpoint.tool import contents
from deepspeed.utils.torch_file import TorchFile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--to", choices=("deepspeed",), required=True, help="deepspeed: the order its engines expect")
    contents.add_tag_arguments(parser)
    parser.add_argument("out", type=Path, help="checkpoint folder to write the tag into")


def run(options: argparse.Namespace) -> int:
    saved = contents.open_tag(options.dir, options.tag, plain=False)
    facts = convert(saved, options.out)
    if options.json:
        print(json.dumps(facts, indent=1))
    else:
        print(f"{facts['folder']}: {len(facts['files'])} files, {facts['nbytes']:,} bytes")
        for note in facts["notes"]:
            print(f"  {note}")
    return 0


def convert(saved: reader.SavedTag, out: Path) -> dict[str, Any]:
    """Write ``saved`` to ``out/<tag>`` and name it in ``out/latest``; what was done, as plain data.

    Raises CheckpointError when the tag is not one of ours, exists in ``out``, or holds what their files cannot.
    """
    if not saved.ours:
        raise CheckpointError(f"{saved.folder} was not written by this release; it needs no conversion")
    tag = saved.folder.resolve().name
    final = out / tag
    if final.exists():
        raise CheckpointError(f"{final} exists; give another folder to convert into")
    files = [*saved.model_files(), *(saved.optim_files() if saved.shards else [])]
    saved.check_files(files, 0, 1)
    writer, token = ReferenceWriter(saved), durable.new_token()
    aside = durable.saving_folder(final, token)
    made = not out.exists()
    aside.mkdir(parents=True)
    nbytes = {}
    try:
        for name, content in writer.files():
            nbytes[name] = durable.write_torch(aside / name, TorchFile(content)).nbytes
        if saved.shards:
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
    notes = ["random states and the data position have no place in DeepSpeed's files and are left out", *writer.notes]
    return {"folder": str(final), "files": nbytes, "nbytes": sum(nbytes.values()), "notes": notes}
