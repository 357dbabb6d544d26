"""The ledger of started collectives: divergence is seen, and nothing else is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from deepspeed.comm.ledger import Ledger, Page, open_ledger, remove_left_over


class Group:
    """A process group's own count of collectives."""

    def __init__(self) -> None:
        self.count = 0

    def _get_sequence_number_for_group(self) -> int:
        return self.count


class Rank:
    """One rank's ledger and page; `start` plays a collective of the package, `direct` one of torch itself."""

    def __init__(self, path: Path, rank: int, size: int, name: str = "0") -> None:
        self.ledger = Ledger(str(path), rank, size)
        self.group = Group()
        page = self.ledger.page(self.group, name, list(range(size)), rank)
        assert page is not None
        self.page: Page = page
        self.calls = 0

    def start(self, kind: str, size: int = 0) -> str | None:
        answer = self.page.mark(self.calls + 1, kind, size)
        self.calls += 1
        self.group.count += 1
        return answer

    def direct(self) -> None:
        self.group.count += 1


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[Rank]]:
    made = [Rank(tmp_path / "ledger", rank, 3) for rank in range(3)]
    yield made
    for rank in made:
        rank.ledger.close()


def test_ranks_in_step_agree(ranks: list[Rank]) -> None:
    for number in range(200):  # several times around the ring
        kind = ("all_gather", "barrier", "reduce_scatter")[number % 3]
        assert [rank.start(kind, number * 64) for rank in ranks] == [None] * 3


def test_the_second_to_come_sees_another_kind_and_the_first_sees_it_on_a_second_look(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.start("barrier")
    assert ranks[0].start("all_gather", 64) is None
    assert ranks[0].page.compare(2) is None
    assert ranks[1].start("barrier") == "rank 0 has started all_gather as the same call"
    assert ranks[0].page.compare(2) == "rank 1 has started barrier as the same call"
    assert ranks[2].start("all_gather", 64) == "rank 1 has started barrier as the same call"


def test_another_size_of_the_same_kind_is_seen(ranks: list[Rank]) -> None:
    ranks[2].start("reduce_scatter", 4096)
    assert ranks[0].start("reduce_scatter", 8192) == (
        "rank 2 has started reduce_scatter of another size or source as the same call"
    )
    assert ranks[0].start("all_gather", 1 << 31) is None
    assert ranks[1].start("reduce_scatter", 4096) is not None
    assert ranks[1].start("all_gather", 1 << 32) is not None  # sizes beyond the bits of the mark differ too


def test_a_rank_that_is_ahead_is_no_divergence(ranks: list[Rank]) -> None:
    for number in range(70):  # more than the ring holds: what rank 1 compares with has been overwritten
        assert ranks[0].start("broadcast", number) is None
    for number in range(70):
        assert ranks[1].start("broadcast", number) is None


def test_calls_past_the_package_on_one_rank_silence_the_comparison(ranks: list[Rank]) -> None:
    ranks[0].direct()  # torch's own barrier on one rank, the package's on the other: one and the same barrier
    ranks[1].start("barrier")
    for _ in range(100):
        assert ranks[0].start("all_reduce", 4) is None
        assert ranks[1].start("all_gather", 8) is None


def test_a_new_group_of_an_old_name_does_not_see_the_old_marks(tmp_path: Path) -> None:
    old = [Rank(tmp_path / "ledger", rank, 2) for rank in range(2)]
    for rank in old:
        rank.start("barrier")
        rank.page.clear()
    ledger = old[0].ledger
    group = Group()
    page = ledger.page(group, "0", [0, 1], 0)
    assert page is not None
    assert page.mark(1, "all_gather", 4) is None
    for rank in old:
        rank.ledger.close()


def test_groups_share_nothing(tmp_path: Path) -> None:
    first, second = Rank(tmp_path / "ledger", 0, 2, "0"), Rank(tmp_path / "ledger", 1, 2, "a group of its own")
    first.start("barrier")
    assert second.start("all_gather", 4) is None
    for rank in (first, second):
        rank.ledger.close()


def test_the_file_has_no_name_once_all_have_it_open(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    first = Ledger(str(path), 0, 2)
    first.unlink_when_shared(2)
    assert path.exists()
    assert path.stat().st_mode & 0o077 == 0  # nobody else's business
    second = Ledger(str(path), 1, 2)
    first.unlink_when_shared(2)
    assert not path.exists()
    second.close()
    second.close()
    group: Any = Group()
    assert second.page(group, "0", [0, 1], 1) is None
    first.close()


def test_all_ranks_of_a_store_open_one_file() -> None:
    store = dist.HashStore()
    ledgers = [open_ledger(store, rank, 2) for rank in range(2)]
    assert all(ledger is not None for ledger in ledgers)
    paths = {ledger._path for ledger in ledgers if ledger is not None}
    assert len(paths) == 1
    for ledger in ledgers:
        assert ledger is not None
        ledger.close()
    assert not any(path is not None and os.path.exists(path) for path in paths)


def test_a_world_too_large_for_the_file_has_no_ledger() -> None:
    assert open_ledger(dist.HashStore(), 0, 10_000) is None


def test_what_a_killed_job_left_is_removed_and_what_is_held_is_not(tmp_path: Path) -> None:
    left, held, young = (tmp_path / f"deepspeed-ledger-{name}" for name in ("a", "b", "c"))
    other = tmp_path / "somebody-else"
    for path in (left, young, other):
        path.write_bytes(b"")
    ledger = Ledger(str(held), 0, 2)
    for path in (left, held, other):
        os.utime(path, (0, 0))
    remove_left_over(str(tmp_path))
    assert sorted(tmp_path.iterdir()) == [held, young, other]
    ledger.close()
    assert sorted(tmp_path.iterdir()) == [young, other]
