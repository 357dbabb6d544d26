"""``python -m deepspeed.checkpoint diff DIR OTHER``: how two checkpoints differ, by name, whatever their layouts.

Weights, buffers, masters and optimizer state are put together and compared one tensor at a time, so memory does not
grow with the model. Equal means equal bit by bit; where values differ, the largest difference is told (by torch, which
is imported for it: equal checkpoints are compared without).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import reader
from deepspeed.checkpoint.constants import dtype_name
from deepspeed.checkpoint.tool import contents
from deepspeed.checkpoint.tool.table import print_table, shown
from deepspeed.utils.torch_archive.tensors import PlainTensor

if TYPE_CHECKING:
    import torch

DIFFERENT = 1
VALUES = "values"
_PIECE_NUMEL = 1 << 22  # elements compared at a time
_PIECE_NBYTES = 4 << 20
_PLAIN_KEYS = (keys.GLOBAL_STEPS, keys.GLOBAL_SAMPLES, keys.SKIPPED_STEPS, keys.LR_SCHEDULER)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    contents.add_tag_arguments(parser)
    parser.add_argument("other", type=Path, help="the one to compare it with")
    parser.add_argument("--other-tag", help="tag in OTHER (default: the one `latest` names)")
    parser.add_argument("--name", default="", help="only tensors whose name holds this text")
    parser.add_argument("--tolerance", type=float, default=0.0, help="largest difference that counts as none")


def run(options: argparse.Namespace) -> int:
    left = contents.open_tag(options.dir, options.tag)
    right = contents.open_tag(options.other, options.other_tag)
    facts = compare(left, right, options.name, options.tolerance)
    if options.json:
        print(json.dumps(facts, indent=1))
    else:
        show(facts)
    return 0 if facts["same"] else DIFFERENT


# ---- facts ---------------------------------------------------------------------------------------------------------


def compare(left: reader.SavedTag, right: reader.SavedTag, part_of_name: str, tolerance: float) -> dict[str, Any]:
    """The whole answer as plain data. ``tensors`` lists those that differ, are new or are gone."""
    rows, count = [], 0
    for row in _rows(left, right, part_of_name):
        count += 1
        if row["problem"] is not None and (row["problem"] != VALUES or row["max_difference"] > tolerance):
            rows.append(row)
    plain = [
        {"key": key, "left": repr(left.model.get(key)), "right": repr(right.model.get(key))}
        for key in _PLAIN_KEYS
        if repr(left.model.get(key)) != repr(right.model.get(key))
    ]
    return {
        "left": str(left.folder), "right": str(right.folder), "compared": count, "same": not rows and not plain,
        "tensors": rows, "values": plain,
    }  # fmt: skip


def _rows(left: reader.SavedTag, right: reader.SavedTag, part_of_name: str) -> Iterator[dict[str, Any]]:
    others = {(item.name, item.what): item for item in contents.items(right) if part_of_name in item.name}
    for item in contents.items(left):
        if part_of_name in item.name:
            yield _row(item, others.pop((item.name, item.what), None))
    for item in others.values():
        yield {"name": item.name, "what": item.what, "problem": "only in the second", "max_difference": None}


def _row(item: contents.Item, other: contents.Item | None) -> dict[str, Any]:
    row: dict[str, Any] = {"name": item.name, "what": item.what, "problem": None, "max_difference": 0.0}
    if other is None:
        return row | {"problem": "only in the first", "max_difference": None}
    if item.shape != other.shape:
        return row | {"problem": f"shape {item.shape} and {other.shape}", "max_difference": None}
    value, found = item.stored(), other.stored()
    if not isinstance(value, PlainTensor) or not isinstance(found, PlainTensor):
        same = repr(value) == repr(found)
        return row if same else row | {"problem": f"{value!r} and {found!r}", "max_difference": None}
    if item.dtype == other.dtype and value.dtype == found.dtype and same_bytes(value.bytes(), found.bytes()):
        return row
    largest, count = difference(item.value(), other.value())
    if item.dtype != other.dtype:
        shown = f"dtype {dtype_name(item.dtype)} and {dtype_name(other.dtype)}"
        return row | {"problem": shown, "max_difference": largest, "differing": count}
    return row if count == 0 else row | {"problem": VALUES, "max_difference": largest, "differing": count}


def same_bytes(left: memoryview, right: memoryview) -> bool:
    """Whether two runs of bytes of one length are equal, a few MiB at a time."""
    starts = range(0, len(left), _PIECE_NBYTES)
    return all(bytes(left[at : at + _PIECE_NBYTES]) == bytes(right[at : at + _PIECE_NBYTES]) for at in starts)


def difference(left: torch.Tensor, right: torch.Tensor) -> tuple[float, int]:
    """``(largest absolute difference, elements that differ)`` of two tensors of one shape.

    NaN in both places is no difference, NaN in one of them an infinite one.
    """
    import torch

    largest, count = 0.0, 0
    for a, b in zip(left.reshape(-1).split(_PIECE_NUMEL), right.reshape(-1).split(_PIECE_NUMEL), strict=True):
        wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
        differs = (a != b) & ~(a.isnan() & b.isnan())
        here = int(differs.sum())
        if here:
            gap = (a[differs].to(wide) - b[differs].to(wide)).abs()
            largest = max(largest, float(gap.nan_to_num(nan=math.inf).max()))
            count += here
    return largest, count


# ---- text ----------------------------------------------------------------------------------------------------------


def show(facts: dict[str, Any]) -> None:
    """Print what differs."""
    print(shown(f"{facts['left']} and {facts['right']}"))
    for entry in facts["values"]:
        print(shown(f"{entry['key']}: {entry['left']} and {entry['right']}"))
    if facts["tensors"]:
        rows = []
        for row in facts["tensors"]:
            largest = "" if row["max_difference"] is None else f"{row['max_difference']:.3g}"
            rows.append((row["name"], row["what"], row["problem"], largest, str(row.get("differing", ""))))
        print_table(("name", "what", "difference", "largest", "elements"), rows)
    found = len(facts["tensors"])
    print(f"{facts['compared']} tensors compared, {found or 'none'} differ{'s' if found == 1 else ''}")
