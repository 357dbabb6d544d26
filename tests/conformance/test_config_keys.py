"""The config surface: which keys exist, under which names, with which defaults.

`config_keys.toml` is our frozen list. `data/config_facts.json` holds facts about the reference releases (keys, aliases,
defaults, bounds), a union over both; every one of them must be a key of ours with the same meaning of "absent".
"""

from __future__ import annotations

import enum
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.config_schema import ConfigSections
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.config_walk import describe
from scripts.gen_config_docs import entry, page, sections

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib

HERE = Path(__file__).parent
FROZEN: dict[str, list[str]] = tomllib.loads((HERE / "config_keys.toml").read_text())["sections"]
FACTS: dict[str, dict[str, dict[str, Any]]] = json.loads((HERE / "data" / "config_facts.json").read_text())["sections"]
TOP_LEVEL: list[str] = json.loads((HERE / "data" / "config_facts.json").read_text())["top_level_sections"]
MODELS: dict[str, type[DeepSpeedConfigModel]] = {"": ConfigSections, **dict(sections(ConfigSections))}

# Where our default is written differently although it means the same, and the one list the reference fills at run time.
OTHER_DEFAULT = {
    "zero_optimization.overlap_comm": "resolved from the stage when the section is read; absent means the same",
    "expert_parallel.load_balance_coeff": "the reference marks absence with an object",
    "expert_parallel.expert_w3": "the reference marks absence with an object",
    "compression_training.weight_quantization.shared_parameters.fp16_mixed_quantize": "a section here",
}
# How `describe` says a bound: alone, or beside another one.
BOUND_WORDS = {"gt": ">|above", "ge": ">=|from|at least", "lt": "<|below", "le": "<=|to|at most"}


def test_key_list_is_frozen() -> None:
    ours = {
        path: [name + (f"/{field.alias}" if field.alias else "") for name, field in model.model_fields.items()]
        for path, model in MODELS.items()
    }
    assert ours == FROZEN


def test_every_reference_section_is_known() -> None:
    known = set(ConfigSections.model_fields) | {field.alias for field in ConfigSections.model_fields.values()}
    assert [key for key in TOP_LEVEL if key not in known] == []
    assert [path for path in FACTS if path not in MODELS] == []


@pytest.mark.parametrize("path", sorted(FACTS))
def test_reference_keys_have_their_names_and_defaults(path: str) -> None:
    fields = MODELS[path].model_fields
    differing = []
    for key, fact in FACTS[path].items():
        full = f"{path}.{key}" if path else key
        if key not in fields:
            differing.append(f"{full}: not a key of ours")
            continue
        field = fields[key]
        if fact.get("alias") != field.alias and "alias" in fact:
            differing.append(f"{full}: alias {field.alias}, the reference has {fact['alias']}")
        if bool(fact.get("required")) != field.is_required() and path and "NAME" not in path:
            differing.append(f"{full}: required {field.is_required()}")
        if "default" in fact and full not in OTHER_DEFAULT:
            ours = _plain(field.get_default(call_default_factory=True))
            if ours != fact["default"] and not (isinstance(ours, dict) and _means_defaults(ours, fact["default"])):
                differing.append(f"{full}: default {ours!r}, the reference has {fact['default']!r}")
        for bound, value in fact.get("constraints", {}).items():
            number = re.escape(str(int(value) if float(value).is_integer() else value))
            if not re.search(rf"({BOUND_WORDS[bound]}) {number}(?![\d.])", describe(field)):
                differing.append(f"{full}: takes {describe(field)}, the reference {bound} {value}")
    assert differing == []


def _plain(value: Any) -> Any:
    if isinstance(value, DeepSpeedConfigModel):
        return {key: _plain(item) for key, item in value}
    if isinstance(value, enum.Enum):
        return value.value
    return str(value) if type(value).__name__ == "dtype" else value


def _means_defaults(ours: dict[str, Any], reference: Any) -> bool:
    """Whether the reference writes the defaults of a section as an empty mapping, or as the same mapping."""
    return reference == {} or reference == ours


ATTRIBUTES: dict[str, Any] = json.loads((HERE / "data" / "config_attributes.json").read_text())

# Sections whose absence is None here and an object of defaults in the reference.
NONE_WHILE_ABSENT = {"expert_parallel_config"}


@pytest.mark.parametrize("name", sorted(ATTRIBUTES))
def test_attributes_clients_read(name: str) -> None:
    config = DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1})
    value = getattr(config, name)
    if name in NONE_WHILE_ABSENT:
        assert value is None
        return
    if hasattr(value, "model_dump"):
        value = value.model_dump(mode="json")
    elif hasattr(value, "repr"):
        value = value.repr()
    assert _holds(_plain(value), ATTRIBUTES[name])


def _holds(ours: Any, reference: Any) -> bool:
    """Whether two values are equal; a mapping of ours may have further keys (those of the other release)."""
    if isinstance(reference, dict):
        return isinstance(ours, dict) and all(key in ours and _holds(ours[key], reference[key]) for key in reference)
    return bool(ours == reference)


@pytest.mark.parametrize("key", ("stage3_prefetch_bucket_size", "prefetch_bucket_size"))
def test_a_key_and_its_alias_are_one(key: str) -> None:
    config = DeepSpeedConfig.parse({"zero_optimization": {key: 7}})
    assert config.zero_config.prefetch_bucket_size == 7


def test_every_field_is_documented() -> None:
    undocumented = []
    for path, model in MODELS.items():
        for name in model.model_fields:
            said = entry(model, name)
            if not said.effect or not said.example:
                undocumented.append(f"{path}.{name}: {said}")
    assert undocumented == []


def test_reference_page_is_up_to_date() -> None:
    assert (HERE.parents[1] / "docs" / "config.md").read_text() == page(), "run scripts/gen_config_docs.py"


@pytest.mark.parametrize("path", [path for path in sorted(MODELS) if not path.endswith(("[]", ".NAME"))])
def test_documented_examples_are_accepted(path: str) -> None:
    """The example of every field is a value that field takes."""
    refused = []
    for name, field in MODELS[path].model_fields.items():
        value = json.loads(entry(MODELS[path], name).example)
        try:
            MODELS[path](**{field.alias or name: value})
        except ValueError as error:
            # A switch may need its companions; then the value itself must not be what is refused.
            own = [item for item in error.errors() if name in item["loc"] or field.alias in item["loc"]]  # type: ignore[attr-defined]
            refused += [f"{path}.{name} = {value!r}: {item['msg']}" for item in own if item["type"] != "ds_cross"]
    assert refused == []
