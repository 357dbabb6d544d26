"""Every accepted form of a config, and what is said about the others."""

from __future__ import annotations

import base64
import copy
import json
from collections import OrderedDict
from pathlib import Path
from types import MappingProxyType

import pytest

from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError, DeepSpeedConfigWriter
from deepspeed.runtime.config_source import load_source, parse_document
from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys

CONFIG = {"train_batch_size": 8, "zero_optimization": {"stage": 1}}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.mark.parametrize("wrap", (dict, OrderedDict, MappingProxyType))
def test_mappings(wrap) -> None:
    assert DeepSpeedConfig.parse(wrap(CONFIG)).zero_optimization_stage == 1


@pytest.mark.parametrize("kind", (str, Path))
def test_paths(written: Path, kind) -> None:
    config = DeepSpeedConfig(kind(written))
    assert (config.train_batch_size, config.zero_optimization_stage) == (8, 1)
    assert config.origin == str(written)


def test_base64() -> None:
    text = base64.urlsafe_b64encode(json.dumps(CONFIG).encode()).decode()
    assert DeepSpeedConfig(text).train_batch_size == 8


def test_base64_longer_than_a_file_name() -> None:
    text = base64.urlsafe_b64encode(json.dumps({**CONFIG, "_comment": "x" * 5000}).encode()).decode()
    assert DeepSpeedConfig.parse(text).train_batch_size == 8


def test_hjson() -> None:
    document = """
    {
      # a comment
      train_batch_size: 8
      "zero_optimization": {"stage": 1,},  // trailing comma
    }
    """
    assert parse_document(document, "here") == CONFIG


def test_large_numbers_of_json_are_kept() -> None:
    assert parse_document('{"a": 5e8, "b": 1e-5, "c": Infinity}', "here") == {"a": 5e8, "b": 1e-5, "c": float("inf")}


@pytest.mark.parametrize(
    ("document", "paths"),
    (
        ('{"a": 1, "a": 2}', ["a"]),
        (
            '{"zero_optimization": {"stage": 1, "stage": 2}, "fp16": {}, "fp16": {}}',
            ["zero_optimization.stage", "fp16"],
        ),
        ('{"list": [{"x": 1}, {"y": 1, "y": 1}]}', ["list[1].y"]),
        ("{a: 1, b: {c: 1, c: 2}}", ["b.c"]),
    ),
)
def test_repeated_keys_are_named_with_their_path(document: str, paths: list[str]) -> None:
    with pytest.raises(ValueError, match="Duplicate keys") as caught:
        parse_document(document, "here")
    assert f": {', '.join(paths)};" in str(caught.value)


def test_duplicate_key_hook() -> None:
    assert dict_raise_error_on_duplicate_keys([("a", 1), ("b", 2)]) == {"a": 1, "b": 2}
    with pytest.raises(ValueError, match=r"Duplicate keys.*'a'"):
        dict_raise_error_on_duplicate_keys([("a", 1), ("a", 1)])


@pytest.mark.parametrize(
    ("source", "words"),
    (
        ("missing/ds_config.json", "'missing/ds_config.json' is neither an existing file (looked in "),
        ("no base64!", "'no base64!' is neither an existing file nor base64 text"),
        (base64.urlsafe_b64encode(b"\xff\xfe").decode(), "is neither an existing file nor base64 text"),
        (Path("missing.json"), "no such file: missing.json"),
    ),
)
def test_unreadable_sources(source, words: str) -> None:
    with pytest.raises(DeepSpeedConfigError) as caught:
        DeepSpeedConfig.parse(source)
    assert words in str(caught.value)


@pytest.mark.parametrize("source", (7, None, ["a"], 1.5))
def test_other_types_are_type_errors(source) -> None:
    with pytest.raises(TypeError, match=f"found {type(source).__name__}; expected a dict, a path"):
        DeepSpeedConfig(source)


@pytest.mark.parametrize(
    ("document", "words"),
    (
        ("[1]", "found list; expected an object"),
        ("{", "It is not HJSON either"),
        ('{"bf16": {"enabled": True},}', r"is not JSON: .* line 1, column 22, .*\(True is Python; JSON has true\)"),
        ('{"a": 1,\n"b": 2 "c": 3}', r"delimiter in line 2, column 8, near '\"b\": 2 \"c\": 3}'"),
    ),
)
def test_documents_that_are_no_object(document: str, words: str) -> None:
    with pytest.raises(DeepSpeedConfigError, match=words):
        parse_document(document, "here")


def test_input_is_not_modified() -> None:
    given = {
        **CONFIG,
        "zero_optimization": {
            "stage": 1,
            "cpu_offload": False,
            "reduce_bucket_size": "auto",
            "prefetch_bucket_size": 1.5,
        },
        "optimizer": {"type": "Adam", "params": {"lr": 1, "betas": [0.9, 0.99], "eps": "auto"}},
        "bfloat16": {"enabled": True},
    }
    before = copy.deepcopy(given)
    config = DeepSpeedConfig.parse(given).resolve(2)
    assert given == before
    assert config._param_dict is given


def test_writer(tmp_path: Path, written: Path) -> None:
    writer = DeepSpeedConfigWriter()
    writer.load_config(written)
    writer.add_config("steps_per_print", 5)
    writer.write_config(tmp_path / "out.json")
    assert load_source(tmp_path / "out.json").data == {**CONFIG, "steps_per_print": 5}
