"""ShardLayout: every element lives exactly once, whatever the sizes; no processes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.runtime.zero.layout import Fragment, ShardLayout

RUNS = st.lists(st.integers(0, 97), min_size=1, max_size=12).map(
    lambda sizes: [(f"p{index}", size) for index, size in enumerate(sizes)]
)
WORLDS = st.integers(1, 9)
LIMITS = st.none() | st.integers(1, 200)
ALIGNS = st.sampled_from([1, 2, 4, 16])
BUILDERS = st.sampled_from([ShardLayout.by_element, ShardLayout.by_parameter])


@settings(max_examples=300, deadline=None)
@given(BUILDERS, RUNS, WORLDS, LIMITS, ALIGNS, ALIGNS)
def test_fragments_of_all_ranks_tile_every_parameter(build, run, world, limit, param_align, piece_align):
    layout = build(run, world, segment_numel=limit, param_align=param_align, piece_align=piece_align)
    seen = {name: [0] * numel for name, numel in run}
    answered = set()
    for rank in range(world):
        used = [0] * layout.shard_numel
        for fragment in layout.fragments(rank):
            answered.add(fragment.name)
            for i in range(fragment.numel):
                seen[fragment.name][fragment.param_start + i] += 1
                used[fragment.shard_start + i] += 1
        assert max(used, default=0) <= 1
    assert all(count == 1 for counts in seen.values() for count in counts)
    assert answered == {name for name, _ in run}


@settings(max_examples=200, deadline=None)
@given(BUILDERS, RUNS, WORLDS, LIMITS, ALIGNS)
def test_a_shard_is_the_concatenation_of_its_pieces(build, run, world, limit, align):
    layout = build(run, world, segment_numel=limit, param_align=align, piece_align=align)
    slots = {slot.name: slot for slot in layout.slots}
    for rank in range(world):
        for fragment in layout.fragments(rank):
            if not fragment.numel:
                continue
            flat = slots[fragment.name].start + fragment.param_start
            segment = next(s for s in layout.segments if s.start <= flat < s.end)
            expected = segment.start + rank * segment.piece_numel + (fragment.shard_start - segment.shard_start)
            assert world == 1 or flat == expected


@settings(max_examples=200, deadline=None)
@given(BUILDERS, RUNS, WORLDS, LIMITS, ALIGNS)
def test_record_round_trip(build, run, world, limit, align):
    layout = build(run, world, segment_numel=limit, param_align=align)
    assert ShardLayout.from_record(layout.as_record()) == layout


@settings(max_examples=200, deadline=None)
@given(RUNS, WORLDS, LIMITS, ALIGNS)
def test_by_parameter_never_cuts_a_parameter(run, world, limit, align):
    layout = ShardLayout.by_parameter(run, world, segment_numel=limit, param_align=align)
    sizes = dict(run)
    for rank in range(world):
        assert all(fragment.numel == sizes[fragment.name] for fragment in layout.fragments(rank))


@settings(max_examples=200, deadline=None)
@given(RUNS, WORLDS, st.integers(1, 200))
def test_number_of_segments_is_what_the_bucket_allows(run, world, limit):
    layout = ShardLayout.by_element(run, world, segment_numel=limit)
    step = max(world, limit // world * world)
    assert len(layout.segments) == -(-layout.numel // step)
    assert layout.numel - layout.param_numel < world


def test_one_rank_owns_every_parameter_whole_even_across_segments():
    layout = ShardLayout.by_element([("a", 10), ("b", 25)], 1, segment_numel=8)
    assert list(layout.fragments(0)) == [Fragment("a", 0, 0, 0, 10), Fragment("b", 1, 0, 10, 25)]


def test_ten_thousand_ranks_cost_one_rank_nothing_extra():
    layout = ShardLayout.by_element([(f"p{i}", 1_000_003) for i in range(50)], 10_000, segment_numel=5_000_000)
    fragments = list(layout.fragments(9_999))
    assert len(fragments) <= 2 * len(layout.segments)
    assert layout.shard_numel * 10_000 == layout.numel


def test_unknown_record_version_is_refused():
    with pytest.raises(ValueError, match="version 7"):
        ShardLayout.from_record({"version": 7})
