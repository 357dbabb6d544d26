"""DeepSpeedDataLoader and RepeatingLoader: shares, order, position."""

from __future__ import annotations

import itertools
import logging
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from deepspeed.runtime.dataloader import DeepSpeedDataLoader, RepeatingLoader


class Numbers(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count
        self.read = 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        self.read += 1
        return index


class Stream(IterableDataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Any:
        return iter(range(self.count))


def loader(dataset: Any = None, count: int = 11, **kw: Any) -> DeepSpeedDataLoader:
    arguments: dict[str, Any] = {
        "dataset": Numbers(count) if dataset is None else dataset,
        "batch_size": 2,
        "pin_memory": False,
        "local_rank": 0,
        "tput_timer": None,
    }
    return DeepSpeedDataLoader(**{**arguments, **kw})


def lists(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def share(rank: int, world: int, **kw: Any) -> DeepSpeedDataLoader:
    return loader(data_parallel_world_size=world, data_parallel_rank=rank, **kw)


def test_first_epoch_is_that_of_a_distributed_sampler_with_seed_0() -> None:
    # Recorded from DeepSpeed 0.19.8.
    assert lists(share(1, 2)) == [[0, 3], [8, 1], [7, 10]]


@pytest.mark.parametrize("world", (1, 2, 3))
@pytest.mark.parametrize("drop_last", (False, True))
def test_ranks_divide_the_samples_and_len_counts_batches(world: int, drop_last: bool) -> None:
    loaders = [share(r, world, count=13, batch_size=3, dataloader_drop_last=drop_last) for r in range(world)]
    seen = [lists(one) for one in loaders]
    assert [len(batches) for batches in seen] == [len(one) for one in loaders]
    samples = [x for batches in seen for batch in batches for x in batch]
    assert set(samples) <= set(range(13))
    if not drop_last:
        # As many as needed are used twice, so that all ranks have the same number.
        assert set(samples) == set(range(13))
        assert len(samples) == -(-13 // world) * world
    else:
        assert {len(batch) for batches in seen for batch in batches} == {3}


def test_each_pass_is_an_epoch_with_an_order_of_its_own_that_all_ranks_agree_on() -> None:
    ranks = [share(r, 2, count=12) for r in range(2)]
    epochs = [[lists(one) for one in ranks] for _ in range(3)]
    for seen in epochs:
        assert sorted(x for batches in seen for batch in batches for x in batch) == list(range(12))
    assert len({str(seen) for seen in epochs}) == 3
    sampler = DistributedSampler(Numbers(12), num_replicas=2, rank=1)
    sampler.set_epoch(2)
    assert [x for batch in epochs[2][1] for x in batch] == list(sampler)


def test_epoch_set_by_the_user_counts() -> None:
    expected = share(0, 2)
    for _ in range(5):
        fifth = lists(expected)
    by_sampler = share(0, 2)
    by_sampler.data_sampler.set_epoch(4)
    assert lists(by_sampler) == fifth
    by_loader = share(0, 2)
    by_loader.set_epoch(4)
    assert lists(by_loader) == fifth
    sixth = lists(expected)
    assert lists(by_sampler) == lists(by_loader) == sixth


def test_pass_without_a_batch_does_not_count() -> None:
    one, other = share(0, 2), share(0, 2)
    iter(one)
    iter(one)
    assert lists(one) == lists(other)


def test_next_without_iter_begins_an_epoch() -> None:
    one = share(1, 2)
    assert next(one).tolist() == [0, 3]


def test_pass_that_was_broken_off_counts() -> None:
    one, other = share(0, 2), share(0, 2)
    next(iter(one))
    list(other)
    assert lists(one) == lists(other)


def test_own_sampler_and_own_collate_function() -> None:
    made = loader(count=5, data_sampler=SequentialSampler(range(5)), collate_fn=lambda samples: samples)
    assert list(made) == [[0, 1], [2, 3], [4]]
    assert len(made) == 3


def test_negative_local_rank_gives_every_rank_all_samples_in_random_order() -> None:
    one = loader(local_rank=-1, data_parallel_world_size=2, data_parallel_rank=1)
    first, second = lists(one), lists(one)
    for seen in (first, second):
        assert sorted(itertools.chain.from_iterable(seen)) == list(range(11))
    assert first != second
    torch.manual_seed(torch.initial_seed())
    assert lists(loader(local_rank=-1)) == first


def test_global_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    for made in (
        loader(local_rank=-1),
        share(0, 2),
        loader(dataset=Stream(5)),
        loader(data_sampler=RandomSampler(Numbers(5))),
    ):
        list(made)
    assert torch.equal(torch.get_rng_state(), before)


def endless(made: DeepSpeedDataLoader) -> Any:
    return (batch.tolist() for batch in RepeatingLoader(made))


KINDS = {
    "divided": lambda batch: share(1, 2, count=13, batch_size=batch),
    "random": lambda batch: loader(local_rank=-1, count=9, batch_size=batch),
    "own random sampler": lambda batch: loader(data_sampler=RandomSampler(Numbers(9)), count=9, batch_size=batch),
    "iterable": lambda batch: loader(dataset=Stream(7), batch_size=batch),
}


@given(kind=st.sampled_from(sorted(KINDS)), batch=st.integers(1, 4), before=st.integers(0, 20), again=st.booleans())
@settings(max_examples=60, deadline=None)
def test_resumed_loader_hands_out_the_same_next_batches(kind: str, batch: int, before: int, again: bool) -> None:
    make = KINDS[kind]
    unbroken = make(batch)
    stream = endless(unbroken)
    list(itertools.islice(stream, before))
    state = unbroken.state_dict()
    resumed = make(batch)
    if again:  # a loader that has been used before
        list(itertools.islice(endless(resumed), 3))
    torch.manual_seed(12345)  # the resumed process may be seeded otherwise
    resumed.load_state_dict(state)
    if again:
        resumed.load_state_dict(resumed.state_dict())
    assert list(itertools.islice(endless(resumed), 9)) == list(itertools.islice(stream, 9))


def test_resuming_skips_by_index_without_reading_samples() -> None:
    saved = loader(count=100)
    list(itertools.islice(saved, 30))
    dataset = Numbers(100)
    resumed = loader(dataset=dataset)
    resumed.load_state_dict(saved.state_dict())
    next(iter(resumed))
    assert dataset.read == 2


def test_iterator_made_before_loading_goes_on_from_the_loaded_place() -> None:
    saved = share(0, 2)
    list(itertools.islice(saved, 2))
    fresh = share(0, 2)
    running = RepeatingLoader(fresh)
    fresh.load_state_dict(saved.state_dict())
    assert next(running).tolist() == next(saved).tolist()


def test_state_taken_at_the_end_of_an_epoch_goes_on_with_the_next() -> None:
    saved = share(0, 2)
    list(itertools.islice(saved, len(saved)))  # the last batch, but not yet the end
    resumed = share(0, 2)
    resumed.load_state_dict(saved.state_dict())
    assert lists(resumed) == []
    assert lists(resumed) == lists(saved)


@pytest.mark.parametrize(("world", "batch"), ((1, 4), (4, 1), (2, 1)))
def test_resuming_with_other_ranks_and_batch_sizes_loses_and_repeats_nothing(world: int, batch: int) -> None:
    saved = [share(r, 2, count=24) for r in range(2)]
    seen = [x for one in saved for b in itertools.islice(one, 3) for x in b.tolist()]
    resumed = [share(r, world, count=24, batch_size=batch) for r in range(world)]
    for one in resumed:
        one.load_state_dict(saved[0].state_dict())
        seen += [x for b in one for x in b.tolist()]
    assert sorted(seen) == list(range(24))


def test_place_that_is_no_whole_step_is_rounded_down_and_told(caplog: pytest.LogCaptureFixture) -> None:
    saved = share(0, 2, count=24)
    list(itertools.islice(saved, 1))
    resumed = share(0, 1, count=24, batch_size=3)
    logger = logging.getLogger("DeepSpeed")
    logger.addHandler(caplog.handler)
    try:
        resumed.load_state_dict(saved.state_dict())
    finally:
        logger.removeHandler(caplog.handler)
    assert "1 samples come again" in caplog.text
    assert len(lists(resumed)) == 7


def test_sampler_with_a_state_of_its_own_is_restored() -> None:
    class Counting:
        """Yields numbers for ever; its state is the next one at the start of a pass."""

        def __init__(self) -> None:
            self.next = 0

        def __iter__(self) -> Any:
            for _ in range(6):
                self.next += 1
                yield self.next - 1

        def __len__(self) -> int:
            return 6

        def state_dict(self) -> dict[str, int]:
            return {"next": self.next}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.next = state["next"]

    def make() -> DeepSpeedDataLoader:
        return loader(dataset=Numbers(1000), data_sampler=Counting())

    unbroken = make()
    stream = endless(unbroken)
    list(itertools.islice(stream, 4))
    resumed = make()
    resumed.load_state_dict(unbroken.state_dict())
    assert list(itertools.islice(endless(resumed), 5)) == list(itertools.islice(stream, 5))


def test_iterable_dataset_has_no_length_and_hears_the_epoch() -> None:
    stream = Stream(5)
    made = loader(dataset=stream)
    assert lists(made) == [[0, 1], [2, 3], [4]]
    assert lists(made) == [[0, 1], [2, 3], [4]]
    assert stream.epochs == [0, 1]
    with pytest.raises(TypeError):
        len(made)
    assert lists(loader(dataset=Stream(5), dataloader_drop_last=True)) == [[0, 1], [2, 3]]


@pytest.fixture
def child_signal() -> Iterator[None]:
    """torch sets a SIGCHLD handler with the first loading process and leaves it there."""
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("child_signal")
def test_loading_processes_give_the_same_batches() -> None:
    alone = share(0, 2)
    with_workers = share(0, 2, num_local_io_workers=1)
    assert lists(with_workers) == lists(alone)
    assert alone.num_local_io_workers == 0
    list(itertools.islice(with_workers, 1))
    resumed = share(0, 2)
    resumed.load_state_dict(with_workers.state_dict())  # the process has read ahead; the place is what was handed out
    assert next(resumed).tolist() == next(with_workers).tolist()
    with_workers.data = None


def test_timer_starts_with_each_batch() -> None:
    class Timer:
        started = 0

        def start(self) -> None:
            self.started += 1

    timer = Timer()
    list(itertools.islice(loader(tput_timer=timer), 3))
    assert timer.started == 3


def test_what_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="batch_size must be at least 1; got 0"):
        loader(batch_size=0)
    with pytest.raises(NotImplementedError, match="curriculum"):
        loader(deepspeed_dataloader_config={"enabled": True})


def test_repeating_loader_starts_anew_for_ever() -> None:
    repeating = RepeatingLoader([1, 2])
    assert [next(repeating) for _ in range(5)] == [1, 2, 1, 2, 1]
    assert list(itertools.islice(repeating, 3)) == [2, 1, 2]
    assert len(repeating) == 2


def test_repeating_an_empty_loader_is_an_error_and_no_endless_loop() -> None:
    with pytest.raises(ValueError, match="list yields nothing"):
        next(RepeatingLoader([]))
    once = RepeatingLoader(iter([1]))
    assert next(once) == 1
    with pytest.raises(ValueError, match="read only once"):
        next(once)


def test_repeating_loader_passes_the_state_through() -> None:
    saved = RepeatingLoader(share(0, 2))
    for _ in range(4):
        next(saved)
    resumed = RepeatingLoader(share(0, 2))
    next(resumed)
    resumed.load_state_dict(saved.state_dict())
    assert next(resumed).tolist() == next(saved).tolist()
