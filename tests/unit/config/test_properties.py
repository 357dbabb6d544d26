"""Random configs: whatever is accepted resolves, freezes and says so; whatever is refused names a key of the input."""

from __future__ import annotations

import copy
import enum
import typing
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.config_problems import Problem
from deepspeed.runtime.config_schema import ConfigSections
from deepspeed.runtime.config_utils import DeepSpeedConfigModel, nested_model
from deepspeed.runtime.config_walk import describe

NUMBERS = st.sampled_from([0, 1, 2, 3, 0.5, 1.0, 1.5, 16, 1e3, 5e8, -1, float("inf")])
WORDS = st.sampled_from(
    ["auto", "none", "cpu", "fp16", "bf16", "fp32", "mean", "sum", "step", "Warn", "info", "x", "2"]
)
ANYTHING = st.one_of(NUMBERS, WORDS, st.booleans(), st.none(), st.just({}), st.just([]), st.just(["norm"]))


def attempt(config: dict[str, Any]) -> tuple[DeepSpeedConfig | None, tuple[Problem, ...]]:
    """The config, or why it is refused; any other exception fails the test."""
    try:
        return DeepSpeedConfig.parse(config), ()
    except DeepSpeedConfigError as error:
        return None, error.problems


def plausible(field: Any) -> st.SearchStrategy[Any]:
    """Mostly values the field may take, sometimes anything."""
    text = describe(field)
    options = [typing.get_args(item) for item in (field.annotation, *typing.get_args(field.annotation))]
    literals = [value for found in options for value in found if isinstance(value, (str, int))]
    if isinstance(field.annotation, type) and issubclass(field.annotation, enum.Enum):
        literals = [member.value for member in field.annotation]
    if literals:
        good: st.SearchStrategy[Any] = st.sampled_from(literals)
    elif "true or false" in text:
        good = st.booleans()
    elif "integer" in text or "number" in text:
        good = st.sampled_from([1, 2, 4.0, 8])
    elif text.startswith("one of "):
        good = st.sampled_from(text.removeprefix("one of ").split(" (")[0].split(" or null")[0].split(", "))
    else:
        good = ANYTHING
    return st.one_of(good, good, good, ANYTHING)


def sections(model: type[DeepSpeedConfigModel], depth: int = 0) -> st.SearchStrategy[dict[str, Any]]:
    """A few fields of a section, under their names or aliases."""
    entries: dict[str, st.SearchStrategy[Any]] = {}
    for name, field in model.model_fields.items():
        inner = nested_model(field)
        value = st.deferred(lambda inner=inner: sections(inner, depth + 1)) if inner else plausible(field)
        entries[name] = value
        if field.alias:
            entries[field.alias] = value
    return st.lists(st.sampled_from(sorted(entries)), unique=True, max_size=4).flatmap(
        lambda names: st.fixed_dictionaries({name: entries[name] for name in names})
    )


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(config=sections(ConfigSections), ranks=st.integers(1, 4))
def test_accepted_configs_resolve_and_refusals_name_keys(config: dict[str, Any], ranks: int) -> None:
    config = {"train_micro_batch_size_per_gpu": 2, **config}
    before = copy.deepcopy(config)
    parsed, refusal = attempt(config)
    if parsed is None:
        assert refusal
        for problem in refusal:
            assert problem.detail
            for path in problem.path.split(", "):
                assert path.split(".")[0] in config
    else:
        consistent = config.get("train_batch_size") is None
        if consistent and parsed.train_micro_batch_size_per_gpu is not None:
            resolved = parsed.resolve(ranks)
            triple = resolved.batch_triple
            assert triple is not None
            assert resolved.train_batch_size == triple.micro_batch_size * triple.accumulation_steps * ranks
        assert all(isinstance(line, str) for line in parsed.notes())
        parsed.sections.model_dump()
        assert DeepSpeedConfig.parse(config).sections == parsed.sections
    assert config == before


@settings(max_examples=80, deadline=None)
@given(
    st.recursive(
        ANYTHING, lambda inner: st.dictionaries(st.text(max_size=8), inner, max_size=3) | st.lists(inner, max_size=3)
    )
)
def test_no_input_causes_another_error(value: Any) -> None:
    """Any JSON value in any place is accepted or refused by one class of error."""
    for config in ({"zero_optimization": value}, {"optimizer": value}, {"fp16": {"loss_scale": value}}, {"x": value}):
        parsed, refusal = attempt({"train_batch_size": 1, **config})
        assert (parsed is None) == bool(refusal)
