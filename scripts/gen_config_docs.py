"""Write docs/config.md: the reference of every config key, taken from the section classes.

Type, range and default come from the fields, effect, place and example from the docstring under each field. With
`--check` nothing is written, and the exit code is 1 when the file is out of date.

A field docstring reads `[where] effect. Example: value.`; `[where]` (a ZeRO stage, a condition) and the example are
optional.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from pydantic.fields import FieldInfo

from deepspeed.runtime.config_schema import ConfigSections
from deepspeed.runtime.config_utils import DeepSpeedConfigModel, field_metadata, nested_model
from deepspeed.runtime.config_walk import NEEDS_A_WRAPPER, default_text, describe
from deepspeed.runtime.feature_status import MISSING_FEATURES
from deepspeed.runtime.optimizer_config import (
    BUILT_IN_TITLES,
    OPTIMIZER_PARAMS,
    SCHEDULER_PARAMS,
    SCHEDULER_REQUIRED,
    optimizer_params,
)

OUTPUT = Path(__file__).resolve().parent.parent / "docs" / "config.md"

INTRODUCTION = """\
# Config reference

This page is generated from the source: `make docs` writes it, a test fails when it is out of date.

A config is a mapping, a path to a JSON or HJSON file (comments, unquoted keys, trailing commas), or base64 text of
one. It goes to `deepspeed.initialize(config=...)` or behind `--deepspeed_config`.

```json config
{
  "train_micro_batch_size_per_gpu": 4,
  "gradient_accumulation_steps": 8,
  "bf16": {"enabled": true},
  "zero_optimization": {"stage": 2},
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}
}
```

## How a config is read

- **All problems come in one error**, a line each: full key path, what was found, what is allowed, the nearest known
  key, what to change. It is `deepspeed.runtime.config.DeepSpeedConfigError`, a `ValueError` and an `AssertionError`.
- **Unknown keys.** Inside a section an unknown key is an error. At top level, and in sections marked *open*, a key
  that is one or two edits from a known one, or that belongs into another section, is an error; any other is kept and
  named in one line. `DS_CONFIG_STRICT=1` makes every unknown key an error.
- **Comments.** A key that begins with `_`, `#` or `//`, or is `comment` or `comments`, is a remark of the author,
  in any section: accepted, also under `DS_CONFIG_STRICT=1`, and named in one line. HJSON files may have real comments.
- **Numbers.** `2.0` and `5e8` are integers. Sizes may have a fraction, which is cut off. A number in quotes is an
  error, except for `zero_optimization.stage`.
- **`"auto"`** stands for a value that a wrapper such as the Hugging Face Trainer fills in. Left in place, it means the
  default, and one line names the keys; the keys below have no sensible default, so for them it is an error:
  {needs_a_wrapper}.
- **Settings without effect** at the chosen stage are named in one line each.
- **Settings of features this version does not have** are refused by name, see [the list](#not-in-this-version).

## Batch sizes

`train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x data-parallel ranks`

Two of the three keys fix the third. `train_batch_size` alone, or `train_micro_batch_size_per_gpu` alone, means one
accumulation step. The triple in force is printed at start.

## Combinations that are refused

| setting | with | what to do |
|---|---|---|
| `fp16.enabled` | `bf16.enabled` | turn one off |
| `bf16.bf16_optimizer_states` | `bf16.bf16_master_weights_and_grads` false | turn that on |
| `data_types.param_dtype` | another dtype than `fp16` and `bf16` give | remove it |
| `gradient_allreduce_op` sum | stage 3, `zenflow`, `compile.deepcompile` | use mean |
| `managed_gradient_accumulation` false | `compile.deepcompile` | turn one off |
| `zero_optimization.compute_grad_norm` false | stage 0, 3, `gradient_clipping` above 0, `zenflow`, offload | use true |
| `zero_optimization.offload_optimizer.ratio` below 1 | stage 0, 1, 2 | use 1.0 |
| `zero_optimization.offload_optimizer.device` nvme | stage 1, 2 | use stage 3 |
| `zero_optimization.zero_quantized_gradients` | `reduce_scatter` false at stage 3 | turn that on |
| `zero_optimization.zenflow` | no `offload_optimizer` to cpu, or `overlap_comm` false | set both |
| `zero_optimization.zenflow` | another optimizer than Adam and AdamW, `super_offload`, `mics_shard_size` | remove one |
| `optimizer.params.max_grad_norm` | anything | use `gradient_clipping` |
| a deprecated key | its replacement | remove the deprecated one |
"""


@dataclass(frozen=True)
class Entry:
    """What a field docstring says."""

    where: str
    effect: str
    example: str


@cache
def _class_docs(model: type) -> dict[str, str]:
    """Docstring under each field of one class (not of its bases)."""
    source = ast.parse(inspect.getsource(model).lstrip())
    found: dict[str, str] = {}
    body = typing.cast(ast.ClassDef, source.body[0]).body
    for field, text in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            if is_text and isinstance(text.value.value, str):  # type: ignore[attr-defined]
                found[field.target.id] = " ".join(text.value.value.split())  # type: ignore[attr-defined]
    return found


def entry(model: type[DeepSpeedConfigModel], name: str) -> Entry:
    """The docstring of a field, taken apart.

    Raises:
        ValueError: the field has none.
    """
    for base in model.__mro__:
        if base is DeepSpeedConfigModel:
            break
        text = _class_docs(base).get(name)
        if text:
            match = re.fullmatch(r"(?:\[(?P<where>[^\]]+)\] )?(?P<effect>.*?)(?: Example: (?P<example>.*?)\.)?", text)
            assert match is not None
            return Entry(match["where"] or "", match["effect"], match["example"] or "")
    raise ValueError(f"{model.__name__}.{name} has no docstring")


def sections(model: type[DeepSpeedConfigModel], path: str = "") -> Iterator[tuple[str, type[DeepSpeedConfigModel]]]:
    """Every section below `model` with its path, parents first."""
    for name, field in model.model_fields.items():
        inner = nested_model(field) or _items(field)
        if inner is not None:
            here = f"{path}.{name}" if path else name
            if _items(field) is not None:
                here += "[]" if typing.get_origin(field.annotation) is list else ".NAME"
            yield here, inner
            yield from sections(inner, here)


def _items(field: FieldInfo) -> type[DeepSpeedConfigModel] | None:
    if typing.get_origin(field.annotation) in (list, dict):
        for argument in typing.get_args(field.annotation):
            if isinstance(argument, type) and issubclass(argument, DeepSpeedConfigModel):
                return argument
    return None


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _row(model: type[DeepSpeedConfigModel], name: str, field: FieldInfo, path: str) -> str:
    said = entry(model, name)
    key = f"`{name}`" + (f" (`{field.alias}`)" if field.alias else "")
    if field_metadata(field).get("deprecated"):
        key += " *deprecated*"
    default = "required" if field.is_required() else default_text(field)
    section = nested_model(field)
    kind = f"[section](#{_anchor(path)})" if section is not None else describe(field)
    default = "absent" if section is not None and default == "null" else default
    default = "defaults" if default.startswith("the defaults") else f"`{default}`"
    example = f"`{said.example}`" if said.example else ""
    return "| " + " | ".join([key, _cell(kind), default, said.where, _cell(said.effect), example]) + " |"


def _table(model: type[DeepSpeedConfigModel], path: str, keep: typing.Callable[[FieldInfo], bool]) -> list[str]:
    rows = ["| key (alias) | type and range | default | where | effect | example |", "|---|---|---|---|---|---|"]
    for name, field in model.model_fields.items():
        if keep(field):
            rows.append(_row(model, name, field, f"{path}.{name}" if path else name))
    return rows


def _parameters(path: str) -> list[str]:
    """Parameter names of the built-in optimizers or schedules, after their section."""
    tables: dict[str, list[tuple[str, frozenset[str]]]] = {
        "optimizer": [(title, OPTIMIZER_PARAMS[title.lower()]) for title in BUILT_IN_TITLES if optimizer_params(title)],
        "scheduler": list(SCHEDULER_PARAMS.items()),
    }
    if path not in tables:
        return []
    rows = [
        f"| {kind} | "
        + ", ".join(f"`{name}`" for name in sorted(names))
        + " | "
        + ", ".join(f"`{name}`" for name in SCHEDULER_REQUIRED.get(kind, ()))
        + " |"
        for kind, names in tables[path]
    ]
    return [f"`{path}.params` by type:", "", "| type | parameters | required |", "|---|---|---|", *rows, ""]


def _anchor(path: str) -> str:
    return re.sub(r"[^\w\- ]", "", path.lower()).replace(" ", "-")


def page() -> str:
    """The whole page."""
    lines = [INTRODUCTION.replace("{needs_a_wrapper}", ", ".join(f"`{key}`" for key in NEEDS_A_WRAPPER))]
    lines += ["## Top-level settings", "", *_table(ConfigSections, "", lambda field: nested_model(field) is None), ""]
    lines += ["## Sections", "", *_table(ConfigSections, "", lambda field: nested_model(field) is not None), ""]
    for path, model in sections(ConfigSections):
        summary = " ".join((model.__doc__ or "").split("\n\n")[0].split())
        is_open = " *Open: unknown keys are kept and named.*" if model.keeps_unknown_keys else ""
        lines += [f"### {path}", "", summary + is_open, "", *_table(model, path, lambda field: True), ""]
        lines += _parameters(path)
    lines += ["## Not in this version", "", "Known keys that are refused by name until their feature is there.", ""]
    lines += ["| key | missing | instead |", "|---|---|---|"]
    lines += [f"| `{row.path}` | {_cell(row.what)} | {_cell(row.change)} |" for row in MISSING_FEATURES]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Write the page, or with --check compare it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the page is out of date")
    check = parser.parse_args(arguments).check
    text = page()
    if not check:
        OUTPUT.write_text(text, encoding="utf-8")
        print(f"wrote {OUTPUT.name}: {len(text.splitlines())} lines")
        return 0
    if OUTPUT.exists() and OUTPUT.read_text(encoding="utf-8") == text:
        return 0
    print(f"docs/{OUTPUT.name} is out of date; run: python scripts/gen_config_docs.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
