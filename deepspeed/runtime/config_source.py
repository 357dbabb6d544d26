"""Where a config comes from: a mapping, a path to JSON or HJSON, or base64 text of one.

Owns reading and decoding, and the refusal of a key given twice. Invariant: the mapping passed in is never modified.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed.runtime.config_problems import DeepSpeedConfigError, DeepSpeedConfigTypeError

ConfigSource = Mapping[str, Any] | str | os.PathLike[str]


@dataclass(frozen=True)
class LoadedConfig:
    """A config as the user wrote it."""

    data: Mapping[str, Any]
    origin: str
    """For messages: "dict", the path, or "base64 text"."""


class _Pairs(list[tuple[str, Any]]):
    """An object of a document before its keys are checked; a type of its own tells it from a list."""


def load_source(source: ConfigSource) -> LoadedConfig:
    """Read a config from any accepted form.

    Raises:
        DeepSpeedConfigTypeError: `source` is neither mapping nor text nor path (a TypeError too).
        DeepSpeedConfigError: no such file, not base64, not JSON/HJSON, or a key given twice.
    """
    if isinstance(source, Mapping):
        return LoadedConfig(source, "dict")
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        if _is_file(path):
            return LoadedConfig(parse_document(path.read_text(encoding="utf-8"), str(path)), str(path))
        if isinstance(source, str):
            return LoadedConfig(_from_base64(source), "base64 text")
        raise DeepSpeedConfigError(f"DeepSpeed config: no such file: {path}")
    raise DeepSpeedConfigTypeError(
        f"DeepSpeed config: found {type(source).__name__}; expected a dict, a path to a JSON or HJSON file, or base64"
        " text of one"
    )


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # base64 text longer than a file name, or with a null byte
        return False


def _from_base64(text: str) -> Mapping[str, Any]:
    try:
        document = base64.urlsafe_b64decode(text.encode("ascii")).decode("utf-8")
        if not document.lstrip().startswith("{"):
            raise ValueError
    except (binascii.Error, ValueError):
        short = text if len(text) <= 80 else text[:77] + "..."
        looks_like_path = os.sep in text or text.lower().endswith((".json", ".hjson"))
        hint = f" (looked in {Path.cwd()})" if looks_like_path else ""
        raise DeepSpeedConfigError(
            f"DeepSpeed config: {short!r} is neither an existing file{hint} nor base64 text of a JSON document"
        ) from None
    return parse_document(document, "base64 text")


def parse_document(text: str, origin: str) -> dict[str, Any]:
    """A JSON or HJSON document (comments, unquoted keys, trailing commas) as a dictionary.

    Raises:
        DeepSpeedConfigError: not parseable, not an object, or keys given twice (all of them, with their paths).
    """
    try:
        pairs = json.loads(text, object_pairs_hook=_Pairs)
    except json.JSONDecodeError as problem:
        pairs = _parse_hjson(text, origin, problem)
    if not isinstance(pairs, _Pairs):
        raise DeepSpeedConfigError(f"DeepSpeed config ({origin}): found {type(pairs).__name__}; expected an object")
    twice: list[str] = []
    data = _checked(pairs, "", twice)
    if twice:
        raise DeepSpeedConfigError(f"DeepSpeed config ({origin}): Duplicate keys: {', '.join(twice)}; keep one of each")
    assert isinstance(data, dict)  # a _Pairs becomes a dict
    return data


_IN_JSON = {"True": "true", "False": "false", "None": "null"}


def _parse_hjson(text: str, origin: str, as_json: json.JSONDecodeError) -> Any:
    import hjson  # only for documents that are not plain JSON

    try:
        return hjson.loads(text, object_pairs_hook=_Pairs)
    except hjson.HjsonDecodeError as error:
        # What somebody who meant JSON did wrong is where JSON ends to make sense; HJSON reads on, often to the end.
        line = text.splitlines()[as_json.lineno - 1] if as_json.lineno <= len(text.splitlines()) else ""
        shown = line[max(0, as_json.colno - 41) : as_json.colno + 39].strip()
        python = re.search(r"\b(True|False|None)\b", line)
        hint = f" ({python[0]} is Python; JSON has {_IN_JSON[python[0]]})" if python else ""
        raise DeepSpeedConfigError(
            f"DeepSpeed config ({origin}) is not JSON: {as_json.msg} in line {as_json.lineno}, column {as_json.colno}, "
            f"near {shown!r}{hint}. It is not HJSON either: {error}"
        ) from None


def _checked(value: Any, path: str, twice: list[str]) -> Any:
    """`value` with objects as dictionaries; the path of every repeated key is added to `twice`."""
    if isinstance(value, _Pairs):
        out: dict[str, Any] = {}
        for key, item in value:
            here = f"{path}.{key}" if path else str(key)
            if key in out:
                twice.append(here)
            out[key] = _checked(item, here, twice)
        return out
    if isinstance(value, list):
        return [_checked(item, f"{path}[{i}]", twice) for i, item in enumerate(value)]
    return value
