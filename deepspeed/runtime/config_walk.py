"""From a raw mapping to validated sections, with every problem found on the way.

Owns the walk over the input beside the tree of section classes (unknown keys, "auto", deprecated keys, null, sizes with
fractions) and the translation of pydantic's errors into problems. Does not own any rule between sections. Invariant:
the input is never modified; each problem names the path as the user wrote it.
"""

from __future__ import annotations

import enum
import math
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar

import annotated_types
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from deepspeed.runtime.config_problems import SECRET, Problem, near_miss, nearest, show
from deepspeed.runtime.config_report import Report
from deepspeed.runtime.config_types import Rule
from deepspeed.runtime.config_utils import (
    AUTO,
    DeepSpeedConfigModel,
    deprecated_moves,
    drops_auto,
    field_rules,
    find_field,
    nested_model,
)

Section = TypeVar("Section", bound=DeepSpeedConfigModel)

HUGGING_FACE = "the Hugging Face integration (Trainer, accelerate) normally fills it"
NEEDS_A_WRAPPER: dict[str, str] = {
    "train_batch_size": HUGGING_FACE,
    "train_micro_batch_size_per_gpu": HUGGING_FACE,
    "gradient_accumulation_steps": HUGGING_FACE,
    "optimizer.type": HUGGING_FACE,
    "optimizer.params.lr": HUGGING_FACE,
    "optimizer.params.muon_lr": HUGGING_FACE,
    "optimizer.params.adam_lr": HUGGING_FACE,
    "scheduler.type": HUGGING_FACE,
    "scheduler.params.warmup_max_lr": HUGGING_FACE,
    "scheduler.params.warmup_num_steps": HUGGING_FACE,
    "scheduler.params.total_num_steps": HUGGING_FACE,
    "scheduler.params.cycle_min_lr": "it has no default",
    "scheduler.params.cycle_max_lr": "it has no default",
}
"""Keys for which no default is sensible -> who fills them. Every other "auto" falls back to the default."""

BLOCKS_THAT_MAY_BE_AUTO = frozenset({"tensorboard", "wandb", "csv_monitor", "comet", "timers"})


def join(path: str, key: object) -> str:
    """Dotted path of `key` below `path`."""
    return f"{path}.{key}" if path else str(key)


def clean(model: type[DeepSpeedConfigModel], data: Mapping[str, Any], path: str, report: Report) -> dict[str, Any]:
    """`data` with field names for keys and without what needs no validation; what was wrong goes to `report`.

    `path` is the canonical path of the section, empty for the root.
    """
    data = _move_deprecated(model, data, path, report)
    out: dict[str, Any] = {}
    for key, value in data.items():
        found = find_field(model, key) if isinstance(key, str) else None
        if found is None:
            _unknown(model, key, value, path, report)
            if model.free_keys and not is_comment(key):
                out[str(key)] = value
            continue
        name, field = found
        here = join(path, name)
        if name != key:
            report.spelling[here] = join(report.written(path), key)
        if name in out:
            report.add(_twice(here, name, field, report))
            continue
        kept, value = _clean_value(model, name, field, value, here, report)
        if kept:
            out[name] = value
    return out


def _twice(here: str, name: str, field: FieldInfo, report: Report) -> Problem:
    parent = here.rpartition(".")[0]
    names = f"{join(report.written(parent), name)} and {join(report.written(parent), field.alias)}"
    report.taint(here)
    return Problem(here, f"found both {names}, which are one key", "keep one of them")


def _clean_value(
    model: type[DeepSpeedConfigModel], name: str, field: FieldInfo, value: Any, here: str, report: Report
) -> tuple[bool, Any]:
    """Whether the entry is kept, and its value."""
    inner = nested_model(field)
    written = report.written(here)
    if inner is not None and isinstance(value, DeepSpeedConfigModel):
        return True, value
    if isinstance(value, str) and value == AUTO and (inner is None or here in BLOCKS_THAT_MAY_BE_AUTO):
        if here in NEEDS_A_WRAPPER:
            report.unfilled.append(here)
            return False, None
        if drops_auto(model, name, value):
            report.auto_keys.append(written)
            return False, None
        return True, value
    # A null section or a null top-level setting means "not set" in generated configs; for clipping it means "off".
    absent = inner is not None or (model.keeps_unknown_keys and here != "gradient_clipping")
    if value is None and absent and not _takes_none(field):
        report.adjustments.append(f"{written}: null is taken as absent")
        return False, None
    if inner is not None and value is not None:
        if not isinstance(value, Mapping):
            report.taint(here)
            report.add(
                Problem(
                    written,
                    f"found {show(value)}; expected a mapping with keys {_some(inner.model_fields)}",
                    "write the section as {...}, or remove it",
                    wrong_type=True,
                )
            )
            return False, None
        return True, clean(inner, value, here, report)
    items = _item_model(field)
    if items is not None and isinstance(value, list):
        return True, [_clean_item(items, item, join(here, i), report) for i, item in enumerate(value)]
    if items is not None and isinstance(value, Mapping):
        return True, {key: _clean_item(items, item, join(here, key), report) for key, item in value.items()}
    if isinstance(value, Mapping) and _free_mapping(field):
        return True, _clean_free(value, here, report)
    return True, _floor(field, value, written, report)


def _clean_item(model: type[DeepSpeedConfigModel], item: Any, here: str, report: Report) -> Any:
    return clean(model, item, here, report) if isinstance(item, Mapping) else item


def _clean_free(value: Mapping[str, Any], here: str, report: Report) -> dict[str, Any]:
    """A mapping without a section class (`optimizer.params`): only "auto" is dealt with."""
    out: dict[str, Any] = {}
    for key, item in value.items():
        path = join(here, key)
        if is_comment(key):
            report.comments.append(path)
        elif isinstance(item, str) and item == AUTO:
            if path in NEEDS_A_WRAPPER:
                report.unfilled.append(path)
            else:
                report.auto_keys.append(path)
        else:
            out[str(key)] = item
    return out


def _floor(field: FieldInfo, value: Any, written: str, report: Report) -> Any:
    if isinstance(value, float) and not value.is_integer() and any(rule.floors for rule in rules(field)):
        if not math.isfinite(value):
            return value  # left for validation to report
        floored = next(rule.convert(value) for rule in rules(field) if rule.floors)
        report.adjustments.append(f"{written}: {value} is taken as {floored}")
        return floored
    return value


def _move_deprecated(
    model: type[DeepSpeedConfigModel], data: Mapping[str, Any], path: str, report: Report
) -> Mapping[str, Any]:
    """`data` with the values of deprecated keys under their new names; "auto" is left to the caller."""
    prefix = report.written(path) + "." if path else ""
    settled = {key: value for key, value in data.items() if not (isinstance(value, str) and value == AUTO)}
    for move in deprecated_moves(model, settled):
        data = move.apply(data)
        if move.clash or move.refused:
            path_of_key = prefix + move.old
            report.problems.append(Problem(path_of_key, move.message(prefix).removeprefix(path_of_key + ": ")))
        else:
            report.deprecations.append(move.message(prefix))
    return data


def is_comment(key: object) -> bool:
    """Whether ``key`` is a remark: it begins with "_", "#" or "//", or is "comment" or "comments"."""
    return str(key).startswith(("_", "#", "//")) or str(key) in ("comment", "comments")


def _unknown(model: type[DeepSpeedConfigModel], key: object, value: Any, path: str, report: Report) -> None:
    written = join(report.written(path), key)
    if is_comment(key):
        report.comments.append(written)
        return
    if model.free_keys:
        return
    problem = model.explain_unknown_key(str(key), value)
    if problem is not None:
        report.add(problem)
        return
    names = [name for name, field in model.model_fields.items()]
    names += [field.alias for field in model.model_fields.values() if field.alias]
    if model.keeps_unknown_keys and near_miss(str(key), names) is None:
        report.unknown_keys.append(written)
        return
    detail = f"unknown key (found {show(value)})"
    below = [name for name, field in model.model_fields.items() if _section_has(field, str(key))]
    if below and path:
        places = " or ".join(join(join(report.written(path), name), key) for name in below)
        report.add(Problem(written, f"{detail}; it is a key of a section below: {places}", "move it there"))
        return
    hint = nearest(str(key), names)
    detail += f"; nearest known key: {join(report.written(path), hint)}" if hint else f"; known keys: {_some(names)}"
    report.add(Problem(written, detail, "rename it" if hint else "remove it"))


def _section_has(field: FieldInfo, key: str) -> bool:
    inner = nested_model(field)
    return inner is not None and find_field(inner, key) is not None


def validate(model: type[Section], cleaned: dict[str, Any], report: Report) -> Section | None:
    """`model` from a cleaned mapping; wrong values are reported and left at their defaults.

    Returns None when even that is impossible, which leaves the rules between sections unchecked.
    """
    while True:  # a value removed can uncover a rule of its section; each round removes at least one
        try:
            return model(strict=True, **cleaned)
        except ValidationError as error:
            removed = False
            for detail in error.errors(include_url=False):
                where = _canonical(model, detail["loc"])
                key = detail.get("ctx", {}).get("key") if detail["type"] == "ds_cross" else None
                full = join(where, key) if key else where
                report.add(_problem(model, detail, full, report))
                report.taint(full)
                removed |= _remove(cleaned, full.split("."))
            if not removed:
                return None


def _remove(data: Any, path: list[str]) -> bool:
    """Delete the deepest entry of `path` that `data` has."""
    if not isinstance(data, dict) or path[0] not in data:
        return False
    if len(path) > 1 and _remove(data[path[0]], path[1:]):
        return True
    del data[path[0]]
    return True


def _problem(model: type[DeepSpeedConfigModel], detail: ErrorDetails, path: str, report: Report) -> Problem:
    written = report.written(path)
    field = field_at(model, path)
    if detail["type"] == "ds_cross":
        return Problem(written, detail["msg"], keys=(path,))
    if detail["type"] == "missing":
        expected = describe(field) if field else "a value"
        return Problem(written, f"missing; expected {expected}", "add it", keys=(path,))
    default = field is not None and not field.is_required()
    change = f"change it, or remove it (default {default_text(field)})" if default and field else ""
    expected = str(detail.get("ctx", {}).get("expected") or "") if detail["type"] == "ds_value" else ""
    if field is not None:
        expected = describe(field) if len(expected) <= len(describe(field)) else expected
    found = "a value that is not shown" if path.endswith(SECRET) else show(detail["input"])
    return Problem(written, f"found {found}; expected {expected or detail['msg']}", change, keys=(path,))


def _canonical(model: type[DeepSpeedConfigModel], loc: Iterable[int | str]) -> str:
    """Path of field names for a pydantic location; union branches at its end are left out."""
    names: list[str] = []
    current: type[DeepSpeedConfigModel] | None = model
    field: FieldInfo | None = None
    for part in loc:
        found = find_field(current, part) if current is not None and isinstance(part, str) else None
        if found is not None:
            name, field = found
            names.append(name)
            current = nested_model(field)
        elif field is not None and (isinstance(part, int) or _item_model(field) is not None):
            names.append(str(part))
            current = _item_model(field)
        elif current is not None and isinstance(part, str):
            names.append(part)
            current = None
    return ".".join(names)


def _item_model(field: FieldInfo) -> type[DeepSpeedConfigModel] | None:
    """Section class of the items of a list or mapping field."""
    if typing.get_origin(field.annotation) in (list, dict):
        for argument in typing.get_args(field.annotation):
            if isinstance(argument, type) and issubclass(argument, DeepSpeedConfigModel):
                return argument
    return None


def field_at(model: type[DeepSpeedConfigModel], path: str) -> FieldInfo | None:
    """The field at a canonical path, None when the path leaves the section classes."""
    current: type[DeepSpeedConfigModel] | None = model
    field: FieldInfo | None = None
    for part in path.split("."):
        if current is None and field is not None and _item_model(field) is not None:
            current, field = _item_model(field), None
            continue
        found = find_field(current, part) if current is not None else None
        if found is None:
            return None
        field = found[1]
        current = nested_model(field)
    return field


# ---- what a field takes, in words ----


def rules(field: FieldInfo) -> list[Rule]:
    """The conversion rules in the annotation of a field."""
    return [item for item in field_rules(field) if isinstance(item, Rule)]


def _takes_none(field: FieldInfo) -> bool:
    return type(None) in typing.get_args(field.annotation) or field.annotation in (Any, type(None))


def _free_mapping(field: FieldInfo) -> bool:
    options = [field.annotation, *typing.get_args(field.annotation)]
    return any(option is dict or typing.get_origin(option) is dict for option in options)


def describe(field: FieldInfo) -> str:
    """What a field takes: type and range, as it completes "expected ..."."""
    metadata = field_rules(field)
    words = [item.text for item in metadata if isinstance(item, Rule)] or [_type_words(field.annotation)]
    text = words[0]
    text = _with_range(text, metadata)
    if any(isinstance(item, annotated_types.MinLen) and item.min_length == 1 for item in metadata):
        text = "non-empty " + text
    return text + (" or null" if _takes_none(field) and "null" not in text and field.annotation is not Any else "")


def _with_range(text: str, metadata: Iterable[Any]) -> str:
    """`text` with one bound as a sign (`number >= 0`), with two as words (`number above 0 and below 1`)."""
    bounds: dict[str, str] = {}
    for item in metadata:
        for sign, kind in (
            (">", annotated_types.Gt),
            (">=", annotated_types.Ge),
            ("<", annotated_types.Lt),
            ("<=", annotated_types.Le),
        ):
            if isinstance(item, kind):
                value = getattr(item, kind.__name__.lower())
                value = int(value) if isinstance(value, float) and value.is_integer() else value
                bounds.setdefault(sign, str(value))
    if len(bounds) == 1:
        ((sign, value),) = bounds.items()
        return text if f" {sign} {value}" in text else f"{text} {sign} {value}"
    if not bounds:
        return text
    if bounds.keys() == {">=", "<="}:
        return f"{text} from {bounds['>=']} to {bounds['<=']}"
    words = {">": "above", ">=": "at least", "<": "below", "<=": "at most"}
    return f"{text} " + " and ".join(f"{words[sign]} {bounds[sign]}" for sign in words if sign in bounds)


def _type_words(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return _type_words(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_words(item) for item in typing.get_args(annotation) if item is not type(None))
    if origin is Literal:
        return "one of " + ", ".join(str(item) for item in typing.get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return "one of " + ", ".join(str(item.value) for item in annotation)
    if isinstance(annotation, type) and issubclass(annotation, DeepSpeedConfigModel):
        return "mapping"
    if origin is list or origin is tuple:
        return "list"
    if origin is dict or annotation is dict:
        return "mapping"
    names = {
        str: "string",
        int: "integer",
        float: "number",
        bool: "true or false",
        type(None): "null",
        Any: "any value",
    }
    return names.get(annotation) or ("path" if getattr(annotation, "__name__", "") == "Path" else "value")


def default_text(field: FieldInfo) -> str:
    """The default of a field as JSON text."""
    value = field.get_default(call_default_factory=True)
    if isinstance(value, DeepSpeedConfigModel):
        return "the defaults of the section"
    if isinstance(value, enum.Enum):
        value = value.value
    return show(value, 120).rpartition(" (")[0] or show(value)


def _some(names: Iterable[str | None], limit: int = 12) -> str:
    listed = [str(name) for name in names if name]
    return ", ".join(listed[:limit]) + (", ..." if len(listed) > limit else "")
