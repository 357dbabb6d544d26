"""Any run of elements is found again, whatever cut it was saved with; holes are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.checkpoint import index
from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.runtime.zero.layout import ShardLayout
from deepspeed.utils.zero_to_fp32 import record_fragments

sizes = st.lists(st.integers(0, 40), min_size=1, max_size=6)


def layout_of(numels: list[int], world: int, segment: int | None, align: int, whole: bool) -> ShardLayout:
    build = ShardLayout.by_parameter if whole else ShardLayout.by_element
    run = [(f"p{i}", numel) for i, numel in enumerate(numels)]
    return build(run, world, segment_numel=segment, param_align=align, piece_align=align)


def saved_index(layout: ShardLayout, values: dict[str, torch.Tensor]) -> tuple[index.FragmentIndex, list[int]]:
    """An index over files as ranks of ``layout`` would write them, and the list of files opened so far."""
    opened: list[int] = []
    record = {"groups": [{"layout": layout.as_record()}]}
    made = index.FragmentIndex(owners=index.owners_of(record["groups"]))

    def open_rank(rank: int) -> None:
        opened.append(rank)
        fragments = [(f.name, f.param_start, f.numel) for f in layout.fragments(rank)]
        flat = torch.cat([values[n][s : s + k] for n, s, k in fragments]) if fragments else torch.empty(0)
        state = {"exp_avg": flat * 2, "step": torch.full((len(fragments),), 5.0)}
        table = {
            key: {"key": key, "kind": kind, "holders": None} for key, kind in (("exp_avg", "flat"), ("step", "scalar"))
        }
        index.add_fragments(made, f"rank{rank}", fragments, state, table, flat, "group 0")

    made.open_rank = open_rank
    return made, opened


def numbered(numels: list[int]) -> dict[str, torch.Tensor]:
    return {f"p{i}": torch.arange(numel) + 1000.0 * i for i, numel in enumerate(numels)}


@settings(deadline=None)
@given(
    sizes, st.integers(1, 5), st.integers(1, 5), st.sampled_from([None, 8, 24]), st.sampled_from([1, 4]), st.booleans()
)
def test_every_layout_reads_every_other(
    numels: list[int], old: int, new: int, segment: int | None, align: int, whole: bool
) -> None:
    values = numbered(numels)
    made, _ = saved_index(layout_of(numels, old, segment, align, whole), values)
    target = layout_of(numels, new, 16, 1, False)
    for rank in range(new):
        for part in target.fragments(rank):
            right = values[part.name][part.param_start : part.param_start + part.numel]
            for what, factor in ((index.MASTER, 1), ("exp_avg", 2)):
                got = torch.full((part.numel,), -1.0)
                index.copy_into(got, made.cover(part.name, what, part.param_start, part.numel), part.param_start)
                assert torch.equal(got, right * factor)
            (step,) = made.cover(part.name, "step", part.param_start, part.numel)
            assert float(step.whole()) == 5.0


@settings(deadline=None)
@given(sizes, st.integers(1, 5), st.sampled_from([None, 8, 24]), st.sampled_from([1, 4]), st.booleans())
def test_the_recovery_script_agrees_with_the_layout(
    numels: list[int], world: int, segment: int | None, align: int, whole: bool
) -> None:
    layout = layout_of(numels, world, segment, align, whole)
    for rank in range(world):
        in_file = list(record_fragments(layout.as_record(), rank))
        assert joined(in_file) == joined([(f.name, f.param_start, f.numel) for f in layout.fragments(rank)])


def joined(parts: list[tuple[str, int, int]]) -> list[tuple[str, int]]:
    """Element by element, with empty parts kept."""
    return [(name, start + i) for name, start, numel in parts for i in (range(numel) if numel else [-1])]


def test_only_files_that_hold_something_asked_for_are_opened() -> None:
    numels = [40, 40]
    made, opened = saved_index(layout_of(numels, 4, None, 1, False), numbered(numels))
    made.cover("p0", index.MASTER, 0, 10)
    assert opened == [0]
    made.cover("p1", "exp_avg", 35, 5)
    assert opened == [0, 3]


def extent(**changes: Any) -> index.Extent:
    values = {"file": "f", "key": "k", "offset": 0, "start": 0, "numel": 4, "kind": "flat", "value": torch.arange(4.0)}
    return index.Extent(**{**values, **changes})


def test_holes_are_named() -> None:
    made = index.FragmentIndex()
    made.add("p", index.MASTER, extent(numel=4))
    made.add("p", index.MASTER, extent(start=6, numel=4))
    with pytest.raises(CheckpointError, match=r"fp32 of parameter 'p': elements 4 to 10 .*'f'"):
        made.cover("p", index.MASTER, 0, 10)
    with pytest.raises(CheckpointError, match="no file"):
        made.cover("p", "exp_avg", 0, 10)


def test_overlaps_are_read_once() -> None:
    made = index.FragmentIndex()
    made.add("p", index.MASTER, extent(numel=4))
    made.add("p", index.MASTER, extent(start=2, numel=4, value=torch.arange(2.0, 6.0)))
    got = torch.empty(6)
    index.copy_into(got, made.cover("p", index.MASTER, 0, 6), 0)
    assert torch.equal(got, torch.arange(6.0))


def test_state_of_its_own_shape_is_not_cut() -> None:
    made = index.FragmentIndex()
    made.add("p", "row", extent(kind="tensor", numel=6, value=torch.ones(2)))
    assert made.cover("p", "row", 0, 6)[0].whole().shape == (2,)
    with pytest.raises(CheckpointError, match=r"'row' of parameter 'p' .* cannot be cut"):
        made.cover("p", "row", 0, 3)


def test_a_tensor_of_the_wrong_length_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"file: group 0\.master has 3 elements, its layout record says 4"):
        index.add_fragments(index.FragmentIndex(), "file", [("p", 0, 4)], {}, {}, torch.ones(3), "group 0")


def test_torch_state_dicts_over_whole_parameters() -> None:
    made = index.FragmentIndex()
    state = {1: {"exp_avg": torch.arange(6.0).view(2, 3), "step": torch.tensor(4.0), "note": "x"}}
    index.add_parameter_states(made, "model", ["a", "b"], [4, 6], state)
    assert not made.knows("a")
    got = torch.empty(2)
    index.copy_into(got, made.cover("b", "exp_avg", 3, 2), 3)
    assert got.tolist() == [3.0, 4.0]
    assert float(made.cover("b", "step", 3, 2)[0].whole()) == 4.0
    assert made.cover("b", "note", 3, 2)[0].whole() == "x"
