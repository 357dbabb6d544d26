"""Slices of tensor parallelism joined to one parameter and cut again."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.checkpoint.universal.patterns import Patterns, cut, join
from deepspeed.checkpoint.universal_checkpoint import SubparamShape
from deepspeed.utils import torch_file

INFO: dict[str, Any] = {
    keys.UNIVERSAL_CHECKPOINT_VERSION_KEY: 0.4,
    keys.TP_REPLICATED_PARAMETER_PATTERNS: [r".*norm\.weight"],
    keys.PARAMETER_TO_AVERAGE_PATTERNS: [r".*router"],
    keys.PARAMETER_WITH_ROW_PARALLELISM_PATTERNS: [r".*\.down\..*"],
    keys.PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0: [r".*gate_up.*"],
    keys.VOCABULARY_PARAMETER_PATTERNS: [r"embed\.weight"],
    keys.ORIGINAL_VOCAB_SIZE: 5,
    keys.PARAMETER_WITH_SUB_PARAMS: [
        {"patterns": [r".*qkv\.weight"], "shape": ((4, 2, 2), 3), "partition_dim": 0},
        {"patterns": [r".*fused\.weight"], "shape": (2, (4, 2), 3), "partition_dim": 1},
    ],
    keys.SUB_PARAM_SHARD_WIDTHS: {r".*qkv\.weight": [[2, 2], [1, 1], [1, 1]], r".*fused\.weight": [[2, 2], [1, 1]]},
}


def numbered(*shape: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def rows(whole: torch.Tensor, *chosen: int) -> torch.Tensor:
    return whole[list(chosen)]


QKV, FUSED, GATE_UP = numbered(8, 3), numbered(2, 6, 3), numbered(4, 3)
SLICES: dict[str, tuple[torch.Tensor, list[torch.Tensor]]] = {
    "l.norm.weight": (numbered(3), [numbered(3), numbered(3)]),
    "l.linear.weight": (numbered(4, 3), list(numbered(4, 3).chunk(2))),
    "l.down.weight": (numbered(3, 4), list(numbered(3, 4).chunk(2, dim=1))),
    "l.down.bias": (numbered(3), [numbered(3), numbered(3)]),
    "l.gate_up.weight": (GATE_UP, [rows(GATE_UP, 0, 2), rows(GATE_UP, 1, 3)]),
    "l.qkv.weight": (QKV, [rows(QKV, 0, 1, 4, 6), rows(QKV, 2, 3, 5, 7)]),
    "l.fused.weight": (FUSED, [FUSED[:, [0, 1, 4]], FUSED[:, [2, 3, 5]]]),
    "embed.weight": (numbered(5, 2), [numbered(3, 2), torch.cat([numbered(2, 2, start=6), torch.zeros(1, 2)])]),
    "gain": (torch.tensor(3.0), [torch.tensor(3.0), torch.tensor(3.0)]),
}


@pytest.mark.parametrize("name", SLICES)
def test_two_slices_make_the_whole_and_come_back(name: str) -> None:
    whole, slices = SLICES[name]
    category = Patterns(INFO).of(name)
    joined = join(name, slices, category)
    assert torch.equal(joined, whole)
    entry = category.entry(joined)
    for rank, part in enumerate(slices):
        assert torch.equal(cut(name, entry, part.shape, rank, 2, category.widths), part)
    assert cut(name, entry, whole.shape, 0, 1) is joined


def test_the_entry_says_how_to_cut() -> None:
    expected: dict[str, dict[str, Any]] = {
        "l.norm.weight": {}, "l.linear.weight": {"cat_dim": 0}, "l.down.weight": {"cat_dim": 1},
        "l.gate_up.weight": {"cat_dim": 0, "param_n_sub_params": 2},
        "embed.weight": {"cat_dim": 0, "vocab_tensor": True},
        "l.qkv.weight": {"sub_param_shape": SubparamShape([r".*qkv\.weight"], ((4, 2, 2), 3), 0)}, "router": {},
    }  # fmt: skip
    for name, found in expected.items():
        assert Patterns(INFO).of(name).entry(None) == {**found, "param": None}, name


def test_fused_rows_of_a_flattened_parameter() -> None:
    """The shape may have more dims than the parameter: two heads of (q, k) rows each."""
    flat = [part.reshape(6, 3) for part in SLICES["l.fused.weight"][1]]
    category = Patterns(INFO).of("l.fused.weight")
    joined = join("l.fused.weight", flat, category)
    assert torch.equal(joined, FUSED.reshape(12, 3))
    entry = category.entry(joined)
    assert all(torch.equal(cut("f", entry, part.shape, rank, 2), part) for rank, part in enumerate(flat))


def test_an_average_and_what_differs() -> None:
    slices = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]
    assert join("router", slices, Patterns(INFO).of("router")).tolist() == [2.0, 3.0]
    with pytest.raises(CheckpointError, match=r"'norm\.weight' is said to be replicated"):
        join("norm.weight", slices, Patterns(INFO).of("norm.weight"))


def test_patterns_that_do_not_fit() -> None:
    patterns = Patterns({keys.TP_REPLICATED_PARAMETER_PATTERNS: ["a", "ab"], keys.VOCABULARY_PARAMETER_PATTERNS: ["v"]})
    with pytest.raises(CheckpointError, match=r"'abc' matches \['a', 'ab'\]"):
        patterns.of("abc")
    with pytest.raises(CheckpointError, match=keys.ORIGINAL_VOCAB_SIZE):
        patterns.of("v")
    assert patterns.unused() == ["a", "ab"]  # an ambiguous match is no use
    patterns.of("ax")
    assert patterns.unused() == ["ab"]
    without = {key: value for key, value in INFO.items() if key != keys.SUB_PARAM_SHARD_WIDTHS}
    with pytest.raises(CheckpointError, match=keys.SUB_PARAM_SHARD_WIDTHS):
        Patterns(without).of("l.qkv.weight")
    older = Patterns({**without, keys.UNIVERSAL_CHECKPOINT_VERSION_KEY: 0.3})
    assert torch.equal(join("l.qkv.weight", SLICES["l.qkv.weight"][1], older.of("l.qkv.weight")), QKV)
    wrong = Patterns({**INFO, keys.SUB_PARAM_SHARD_WIDTHS: {r".*qkv\.weight": [[3, 2], [1, 1], [1, 1]]}})
    with pytest.raises(CheckpointError, match="sub-parameters of"):
        join("l.qkv.weight", SLICES["l.qkv.weight"][1], wrong.of("l.qkv.weight"))


def test_a_slice_that_does_not_fit_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"'w' has shape \(4, 3\)"):
        cut("w", {"param": numbered(4, 3), "cat_dim": 0}, (3, 3), 0, 2)


def test_the_class_path_in_files_is_the_historical_one() -> None:
    file = io.BytesIO()
    torch_file.save(SubparamShape(["a"], ((1, 2), 3), 0), file)
    file.seek(0)
    found = torch.load(file, weights_only=False)
    assert type(found) is SubparamShape
    assert type(found).__module__ == "deepspeed.checkpoint.universal_checkpoint"
