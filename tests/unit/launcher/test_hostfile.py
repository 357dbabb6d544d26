"""Hostfile, include / exclude grammar, trimming, world info: text and integers only."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.launcher import runner
from deepspeed.launcher.hostfile import (
    apply_num_nodes_and_gpus,
    decode_world_info,
    encode_world_info,
    fetch_hostfile,
    parse_hostfile,
    parse_inclusion_exclusion,
    parse_node_config,
    parse_node_config_list,
    parse_resource_filter,
)

POOL = {"w0": [0, 1, 2, 3], "w1": [0, 1]}


def test_hostfile_skips_blank_lines_and_comments_and_ignores_what_follows_the_number() -> None:
    lines = ["", "  w1 slots=2  ", "# w9 slots=1", "10.0.0.2  slots=4 max_slots=8", "user@w3\tslots=1# note"]
    assert list(parse_hostfile(lines).items()) == [("w1", 2), ("10.0.0.2", 4), ("user@w3", 1)]


@pytest.mark.parametrize(
    ("lines", "said"),
    (
        (["w0 slots=2", "w0 slots=2"], "line 2: host 'w0' is listed twice"),
        (["w0"], "line 1: found 'w0'"),
        (["w0 slots=x"], "line 1"),
        (["w0 slots=-1"], "line 1"),
        (["w0 slots=1000000000000"], "line 1: 1000000000000 slots of host 'w0'; at most 65536"),
        (["this is bad slots=1"], "line 1"),
        (["w0 slots=2", "", "this is bad"], "line 3"),
        ([], "names no host"),
        (["# w0 slots=1", ""], "names no host"),
    ),
)
def test_bad_hostfiles_are_refused_with_the_line(lines: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_hostfile(lines)


def test_missing_hostfile_is_none_and_a_bad_one_names_the_file(tmp_path: Path) -> None:
    assert fetch_hostfile(str(tmp_path / "none")) is None
    bad = tmp_path / "bad"
    bad.write_text("w0\n")
    with pytest.raises(ValueError, match=str(bad)):
        fetch_hostfile(str(bad))


@pytest.mark.parametrize(
    ("text", "expected"),
    (("w0", ("w0", [])), ("w0:0", ("w0", [0])), ("w0:0,2", ("w0", [0, 2])), ("w0: 1", ("w0", [1]))),
)
def test_node_config(text: str, expected: tuple[str, list[int]]) -> None:
    assert parse_node_config(text) == expected


@pytest.mark.parametrize("text", ("w0:", "w0:a", "w0:0:1", "w0:0-3"))
def test_bad_node_config_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="whole numbers"):
        parse_node_config(text)


def test_node_config_list_joins_mentions_of_one_host() -> None:
    assert parse_node_config_list("w0:0@w1@w0:2") == {"w0": [0, 2], "w1": []}


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    (
        ("", "", POOL),
        ("w0", "", {"w0": [0, 1, 2, 3]}),
        ("w1@w0", "", POOL),  # hosts keep the order of the hostfile, which is rank order
        ("w0:3,1", "", {"w0": [1, 3]}),
        ("w0:1,1", "", {"w0": [1]}),
        ("w0:0@w0:1", "", {"w0": [0, 1]}),
        ("w0:0,2@w1:1", "", {"w0": [0, 2], "w1": [1]}),
        ("", "w0", {"w1": [0, 1]}),
        ("", "w0:0", {"w0": [1, 2, 3], "w1": [0, 1]}),
        ("", "w1:0,1", {"w0": [0, 1, 2, 3]}),
        ("", "w0@w1", {}),
    ),
)
def test_filter(include: str, exclude: str, expected: dict[str, list[int]]) -> None:
    found = parse_resource_filter(POOL, include_str=include, exclude_str=exclude)
    assert list(found.items()) == list(expected.items())


@pytest.mark.parametrize(
    ("include", "exclude", "said"),
    (
        ("w0", "w1", "exclude each other"),
        ("w9", "", "'w9' is not in the pool"),
        ("", "w9", "'w9' is not in the pool"),
        ("w0:9", "", "no slot 9; its slots: 0, 1, 2, 3"),
        ("", "w1:0,7", "no slot 7"),
        ("w0@", "", "''"),
    ),
)
def test_bad_filters_are_refused(include: str, exclude: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_resource_filter(POOL, include_str=include, exclude_str=exclude)


@given(
    st.dictionaries(st.sampled_from(["a", "b", "c"]), st.integers(1, 5), min_size=1),
    st.data(),
)
def test_include_and_exclude_of_the_same_slots_are_complements(pool: dict[str, int], data: st.DataObject) -> None:
    """Every slot is kept by exactly one of the two."""
    specs, named = [], {}
    for host, slots in pool.items():
        chosen = data.draw(st.lists(st.integers(0, slots - 1), unique=True))
        if chosen:
            named[host] = sorted(chosen)
            specs.append(f"{host}:{','.join(map(str, chosen))}")
    if not specs:
        return
    kept = parse_inclusion_exclusion(pool, "@".join(specs), "")
    rest = parse_inclusion_exclusion(pool, "", "@".join(specs))
    assert kept == named
    for host, slots in pool.items():
        assert sorted(map(int, [*kept.get(host, []), *rest.get(host, [])])) == list(range(slots))


def test_counts_keep_the_first_hosts_and_slots() -> None:
    assert apply_num_nodes_and_gpus(POOL, -1, -1) == POOL
    assert apply_num_nodes_and_gpus(POOL, 1, -1) == {"w0": [0, 1, 2, 3]}
    assert apply_num_nodes_and_gpus(POOL, -1, 2) == {"w0": [0, 1], "w1": [0, 1]}
    assert apply_num_nodes_and_gpus({"w0": [1, 3, 5]}, -1, 2) == {"w0": [1, 3]}


def test_counts_beyond_what_is_there_are_refused() -> None:
    with pytest.raises(ValueError, match="--num_nodes 3: only 2 available: w0, w1"):
        apply_num_nodes_and_gpus(POOL, 3, -1)
    with pytest.raises(ValueError, match="host 'w1' offers 2 slots"):
        apply_num_nodes_and_gpus(POOL, -1, 3)


@given(st.dictionaries(st.text(min_size=1), st.lists(st.integers(0, 99)), min_size=1))
def test_world_info_survives_the_round_trip_as_one_shell_safe_word(world: dict[str, list[int]]) -> None:
    encoded = encode_world_info(world)
    assert set(encoded) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_=")
    assert decode_world_info(encoded) == world


def test_world_info_with_plain_counts_means_the_first_slots() -> None:
    assert decode_world_info(encode_world_info({"a": 2})) == {"a": [0, 1]}


def test_broken_world_info_is_refused() -> None:
    with pytest.raises(ValueError, match="--world_info"):
        decode_world_info("not base64 at all!")


def test_historical_names_live_in_the_runner() -> None:
    assert runner._parse_hostfile(["w0 slots=1"]) == {"w0": 1}
    assert runner.fetch_hostfile is fetch_hostfile
    assert runner.parse_resource_filter is parse_resource_filter
    assert runner.parse_inclusion_exclusion is parse_inclusion_exclusion
    assert runner.DLTS_HOSTFILE == "/job/hostfile"
    assert runner.DEEPSPEED_ENVIRONMENT_NAME == ".deepspeed_env"
    assert set(runner.LAUNCHER_CLASSES) >= {"pdsh", "openmpi", "mpich", "impi", "slurm", "mvapich"}
