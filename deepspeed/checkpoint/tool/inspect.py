"""``python -m deepspeed.checkpoint inspect DIR``: what a checkpoint holds and where each element lies."""

from __future__ import annotations

import argparse
import json
from typing import Any

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import names, reader
from deepspeed.checkpoint.constants import dtype_name
from deepspeed.checkpoint.tool import contents
from deepspeed.checkpoint.tool.table import print_table, shown

_COUNTERS = (keys.GLOBAL_STEPS, keys.GLOBAL_SAMPLES, keys.SKIPPED_STEPS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    contents.add_tag_arguments(parser)
    parser.add_argument("--name", default="", help="only tensors whose name holds this text")
    parser.add_argument("--fragments", action="store_true", help="one line per piece: file, key, offset, elements")


def run(options: argparse.Namespace) -> int:
    saved = contents.open_tag(options.dir, options.tag)
    facts = describe(saved, options.name)
    if options.json:
        print(json.dumps(facts, indent=1))
    else:
        show(facts, options.fragments)
    return 0


# ---- facts ---------------------------------------------------------------------------------------------------------


def describe(saved: reader.SavedTag, part_of_name: str = "") -> dict[str, Any]:
    """The whole answer as plain data."""
    record = saved.record or {}
    return {
        "folder": str(saved.folder),
        "written_by": str(saved.model.get(keys.DS_VERSION)),
        "zero_stage": saved.stage,
        "ranks": int(saved.model.get(keys.DP_WORLD_SIZE, 1)),
        "axes": dict(record.get("axes", {})),
        "optimizer": list(record.get("optimizer", [])),
        "counters": {key: saved.model[key] for key in _COUNTERS if key in saved.model},
        "lr_scheduler": saved.model.get(keys.LR_SCHEDULER) is not None,
        "client_state": sorted(str(key) for key in saved.model if key not in keys.LIBRARY_KEYS),
        "files": files(saved),
        "tensors": [item_facts(item) for item in contents.items(saved) if part_of_name in item.name],
    }


def files(saved: reader.SavedTag) -> list[dict[str, Any]]:
    """Name and size of every file of the tag folder that a save writes; ``listed``: named by the manifest."""
    known = saved.manifest.files if saved.manifest is not None else {}
    return [
        {"name": entry.name, "nbytes": entry.stat().st_size, "listed": entry.name in known}
        for entry in sorted(saved.folder.iterdir())
        if names.is_checkpoint_file(entry.name)
    ]


def item_facts(item: contents.Item) -> dict[str, Any]:
    """One value: what it is, and its pieces. ``offset`` and ``numel`` count elements of the tensor ``key``."""
    return {
        "name": item.name,
        "what": item.what,
        "role": item.role,
        "shape": None if item.shape is None else list(item.shape),
        "dtype": None if item.dtype is None else dtype_name(item.dtype),
        "pieces": [
            {"file": part.file, "key": part.key, "offset": part.offset, "start": part.start, "numel": part.numel}
            for part in item.extents
        ],
    }


# ---- text ----------------------------------------------------------------------------------------------------------


def show(facts: dict[str, Any], fragments: bool) -> None:
    """Print the tables. Files have numbers, which the table of tensors refers to."""
    total = sum(entry["nbytes"] for entry in facts["files"])
    counters = ", ".join(f"{key} {value}" for key, value in facts["counters"].items())
    print(shown(facts["folder"]))
    print(
        shown(
            f"written by {facts['written_by']} at stage {facts['zero_stage']} on {facts['ranks']} ranks, optimizer "
            f"{(facts['optimizer'] or ['none'])[0]}; {counters}"
        )
    )
    print(shown(f"client_state: {', '.join(facts['client_state']) or 'none'}"))
    print(f"{len(facts['files'])} files, {total:,} bytes:")
    numbers = {}
    for number, entry in enumerate(facts["files"], 1):
        numbers[entry["name"]] = number
        print(shown(f"{number:4} {entry['nbytes']:15,}  {entry['name']}"))
    columns = ("key", "offset", "elements") if fragments else ("pieces",)
    rows: list[list[str]] = []
    for item in facts["tensors"]:
        rows += piece_rows(item, numbers) if fragments else [summary_row(item, numbers)]
    print_table(("name", "what", "shape", "dtype", "file", *columns), rows)


def summary_row(item: dict[str, Any], numbers: dict[str, int]) -> list[str]:
    """One line for one value."""
    used = sorted({numbers[piece["file"]] for piece in item["pieces"]})
    where = ", ".join(map(str, used)) if len(used) < 5 else f"{used[0]} ... {used[-1]}"
    role = item["what"] if item["what"] != "weight" or item["role"] == "parameter" else item["role"]
    return [item["name"], role, shown_shape(item), item["dtype"] or "", where, str(len(item["pieces"]))]


def piece_rows(item: dict[str, Any], numbers: dict[str, int]) -> list[list[str]]:
    """One line for every piece of one value."""
    start = summary_row(item, numbers)[:4]
    rows = []
    for piece in item["pieces"]:
        elements = f"{piece['start']}:{piece['start'] + piece['numel']}"
        rows.append([*start, str(numbers[piece["file"]]), piece["key"], str(piece["offset"]), elements])
    return rows


def shown_shape(item: dict[str, Any]) -> str:
    return "" if item["shape"] is None else "x".join(map(str, item["shape"])) or "scalar"
