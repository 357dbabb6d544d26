"""Which config keys a training run reads: the proof that a key which is accepted is not ignored.

Reads by the code that parses and checks configs do not count, nor do copies from a section to an attribute of
`DeepSpeedConfig`: of such an attribute the reads count, as reads of the keys it was made from.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any

from deepspeed.runtime import config as config_module
from deepspeed.runtime.config_schema import ConfigSections
from deepspeed.runtime.config_utils import DeepSpeedConfigModel, nested_model

_ANSWERS = ("dynamic_loss_scale_args", "pipeline", "initial_dynamic_scale")  # what sections compute for those who ask


def _parses(frame: Any) -> bool:
    """Whether the code in `frame` only reads configs to parse, check or copy them."""
    name = frame.f_globals.get("__name__", "")
    last = name.rpartition(".")[2]
    sections = last == "config" or (last.endswith("_config") and last != "applied_config")
    parser = name.startswith(("pydantic", "deepspeed.runtime.config")) or last == "feature_status" or sections
    return parser and frame.f_code.co_name not in _ANSWERS


def _keys_in(expression: ast.AST) -> set[str]:
    """Dotted paths below `s` or `self.sections` in an expression of config.py."""
    found = set()
    for node in ast.walk(expression):
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and (node.id == "s" or (node.id, parts[0]) == ("self", "sections")):
            found.add(".".join(parts if node.id == "s" else parts[1:]))
    return found


def _copies() -> dict[str, set[str]]:
    """Attribute of `DeepSpeedConfig` -> keys it is made from."""
    made: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(inspect.getsource(config_module))):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Attribute):
                made.setdefault(target.attr, set()).update(_keys_in(node.value))
        elif isinstance(node, ast.FunctionDef) and node.decorator_list:
            made.setdefault(node.name, set()).update(*(_keys_in(statement) for statement in node.body))
    return {name: keys for name, keys in made.items() if keys}


def _places(model: type[DeepSpeedConfigModel], path: str, found: dict[type, list[str]]) -> dict[type, list[str]]:
    """Section class -> paths at which it stands, each with its dot."""
    found.setdefault(model, []).append(f"{path}." if path else "")
    for name, field in model.model_fields.items():
        inner = nested_model(field)
        if inner is not None:
            _places(inner, f"{path}.{name}" if path else name, found)
    return found


class _Noted(dict[str, Any]):
    """A section as a dictionary whose look-ups are noted."""

    def __init__(self, values: dict[str, Any], path: str, read: set[str]) -> None:
        super().__init__(values)
        self.path, self.read = path, read

    def __getitem__(self, key: str) -> Any:
        self.read.add(f"{self.path}.{key}")
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(f"{self.path}.{key}")
        return super().get(key, default)


@contextlib.contextmanager
def noted_reads() -> Iterator[set[str]]:
    """Inside, every key that anybody reads is added to the set, by its path of field names."""
    read: set[str] = set()
    copies, places = _copies(), _places(ConfigSections, "", {})
    plain = object.__getattribute__

    def of_section(self: Any, name: str) -> Any:
        if name in type(self).__pydantic_fields__ and not _parses(sys._getframe(1)):
            read.update(place + name for place in places.get(type(self), ()))
        return plain(self, name)

    def of_config(self: Any, name: str) -> Any:
        if name in copies and not _parses(sys._getframe(1)):
            read.update(copies[name])
        value = plain(self, name)
        return _Noted(value, "aio", read) if name == "aio_config" else value

    DeepSpeedConfigModel.__getattribute__ = of_section  # type: ignore[method-assign]
    config_module.DeepSpeedConfig.__getattribute__ = of_config  # type: ignore[method-assign]
    try:
        yield read
    finally:
        del DeepSpeedConfigModel.__getattribute__
        del config_module.DeepSpeedConfig.__getattribute__
