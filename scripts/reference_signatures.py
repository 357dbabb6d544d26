"""Makes ``tests/conformance/data/signatures.json``. Run it with the reference's interpreter, from anywhere:

    DS_ACCELERATOR=cpu <reference>/bin/python scripts/reference_signatures.py

For every module that exists here under the same name, or that ``contract.toml`` names: its public functions and its
classes with their public methods, as `inspect.signature` shows them to anybody who has the release installed. For
packages and modules of the contract also their constants and what they pass on (``-> where it lives``); elsewhere that
only if our module of that name mentions it. A class knows its bases: a method stands where it is defined, once. The
form of a row is in ``tests/conformance/signature_text.py``, which the tests use too.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import re
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import tomllib

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "tests" / "conformance" / "data" / "signatures.json"
# Private names that clients call all the same; the others are nobody's contract.
PRIVATE = [
    "__call__", "_compute_loss", "_consolidated_16bit_state_dict", "_create_expert_data_and_model_parallel",
    "_get_data_parallel_group", "_get_data_parallel_rank", "_get_data_parallel_world_size",
    "_get_expert_parallel_group", "_get_expert_parallel_rank", "_get_sequence_parallel_group",
    "_get_sequence_parallel_rank", "_get_sequence_parallel_world_size", "_invalidate_trace",
    "_register_deepspeed_module", "_save_moe_checkpoint", "_set_cuda_rng_state", "_zero3_consolidated_16bit_state_dict",
]  # fmt: skip


def modules() -> list[str]:
    """Dotted names of the modules of this repository's package."""
    names = []
    for path in sorted((ROOT / "deepspeed").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[-1] != "__main__":
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def words_of(module: str) -> set[str]:
    """Every word in the text of our module of that name."""
    path = (ROOT / module.replace(".", "/")).with_suffix(".py")
    return set(re.findall(r"\w+", path.read_text())) if path.is_file() else set()


def wanted(name: str) -> bool:
    """Whether a name is part of the contract."""
    return not name.startswith("_") or name in PRIVATE


def _tables(decorated: Any) -> list[dict[str, Any]]:
    """The tables of validators and serializers of a pydantic class."""
    return [getattr(decorated, name) or {} for name in type(decorated).__dataclass_fields__]


def members(cls: type, text: Any) -> dict[str, str]:
    """The methods and properties that `cls` itself defines."""
    rows = {}
    decorated = getattr(cls, "__pydantic_decorators__", None)  # called by pydantic alone
    hidden = set() if decorated is None else {name for table in _tables(decorated) for name in table}
    for name, raw in vars(cls).items():
        if not wanted(name) or name in hidden:
            continue
        if isinstance(raw, (staticmethod, classmethod)):
            rows[name] = text.signature_text(text.unwrapped(raw.__func__), bound=isinstance(raw, classmethod))
        elif inspect.isfunction(raw):
            rows[name] = text.signature_text(text.unwrapped(raw), bound=True)
        elif isinstance(raw, property):
            rows[name] = "property"
        elif inspect.isclass(raw) and raw.__qualname__.startswith(cls.__qualname__):
            rows |= {f"{name}.{key}": row for key, row in members(raw, text).items()}
    return rows


def described(value: Any, text: Any) -> Any:
    """The row of a function or class at its home."""
    if inspect.isfunction(value):
        # `debug` holds whoever imported the module: no default that anybody could rely on.
        return text.signature_text(value).replace("debug='exec_module'", "debug=...")
    bases = [f"{c.__module__}.{c.__qualname__}" for c in value.__mro__[1:] if c.__module__.startswith("deepspeed")]
    pydantic = any(c.__module__.startswith("pydantic") for c in value.__mro__)
    row: dict[str, Any] = {"bases": bases} if bases else {}
    row["kind"] = "section" if pydantic else "class"
    if not pydantic and not issubclass(value, BaseException) and value.__init__ is not object.__init__:
        row["call"] = text.signature_text(value)
    return row | {"members": members(value, text)}


def collect(names: list[str], whole: set[str], text: Any) -> dict[str, dict[str, Any]]:
    """Rows by module; `whole`: modules whose constants and passed-on names count."""
    found: dict[str, dict[str, Any]] = {}

    def add(value: Any) -> str | None:
        """Writes a function or class at its home, with its bases; its dotted name, None if it is somebody else's."""
        value = text.unwrapped(value)
        home, name = getattr(value, "__module__", None) or "", getattr(value, "__qualname__", "<")
        if not home.startswith("deepspeed") or not (inspect.isclass(value) or inspect.isfunction(value)):
            return None
        if "<" in name or "." in name:
            return None
        if name not in found.setdefault(home, {}):
            found[home][name] = described(value, text)
            for base in value.__mro__[1:] if inspect.isclass(value) else ():
                add(base)
        return f"{home}.{name}"

    for name in names:
        try:
            module = importlib.import_module(name)
        except Exception:  # a module of ours alone, one that needs what is not installed, or `deepspeed.checkpointing`
            module = getattr(sys.modules["deepspeed"], name.removeprefix("deepspeed."), None)
        if not isinstance(module, types.ModuleType):
            continue
        mentioned = words_of(name)
        for key in filter(wanted, dir(module)):
            value = getattr(module, key, None)
            local = getattr(text.unwrapped(value), "__module__", None) == name
            if isinstance(value, types.ModuleType) or not (local or name in whole or key in mentioned):
                continue
            path = add(value)
            shown = text.default_text(value) if path is None and key.isupper() else "..."
            if path is not None and path != f"{name}.{key}":
                found.setdefault(name, {})[key] = f"-> {path}"
            elif shown != "..." and len(shown) < 200 and name in whole:
                found.setdefault(name, {})[key] = f"= {shown}"
    return found


def main() -> int:
    warnings.simplefilter("ignore")
    spec = importlib.util.spec_from_file_location("signature_text", ROOT / "tests/conformance/signature_text.py")
    assert spec is not None
    assert spec.loader is not None
    text = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = text
    spec.loader.exec_module(text)
    import deepspeed

    contract = tomllib.loads((ROOT / "tests" / "conformance" / "contract.toml").read_text())
    named = {*contract["works"], *contract["planned"]}
    packages = {name for name in modules() if (ROOT / name.replace(".", "/")).is_dir()}
    found = collect(sorted({*modules(), *named}), named | packages, text)
    lines = [f" {json.dumps(name)}: {{\n" + ",\n".join(
        f"  {json.dumps(key)}: {json.dumps(row, sort_keys=True)}" for key, row in sorted(rows.items())
    ) + "\n }" for name, rows in sorted(found.items()) if rows]  # fmt: skip
    release = deepspeed.__version__.split("+")[0]
    TARGET.write_text(f'{{"release": {json.dumps(release)},\n"modules": {{\n' + ",\n".join(lines) + "\n}}\n")
    print(f"{TARGET.relative_to(ROOT)}: {sum(map(len, found.values()))} names of {len(found)} modules, {release}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
