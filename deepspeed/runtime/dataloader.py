"""Batches for one rank: `DeepSpeedDataLoader`, and `RepeatingLoader` for loops that count steps instead of epochs.

Owns: each rank's share of the samples, their order in each epoch, and the position in that order, which a checkpoint
keeps. Does not own: what a batch means, moving it to the device.

Invariants:
- The order of an epoch depends on (seed, epoch) alone. The loader draws nothing from torch's global random generators,
  so stopping, saving and resuming does not shift the random numbers the model sees.
- After `load_state_dict` the next batch is the one the saved loader would have handed out next. Batches are skipped by
  index, without loading their samples, except those of an iterable dataset.
- A pass through the loader is an epoch of its own: the sampler gets `set_epoch(0)`, `set_epoch(1)`, ... unless the user
  sets its epoch between passes; then that one counts. A pass that has handed out nothing does not count.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
)

from deepspeed import comm as dist
from deepspeed.accelerator.real_accelerator import get_accelerator
from deepspeed.utils.logging import log_dist

# A process of its own for loading pays only where the training process waits for a device meanwhile.
_WORKERS_WITH_DEVICE = 2


class _Timer(Protocol):
    def start(self) -> None: ...


class DeepSpeedDataLoader:
    """Iterable and iterator over this rank's batches; `len()` counts them (micro-batches of one epoch).

    Args:
        dataset: map-style or iterable dataset. An iterable dataset is read as it is by every rank: dividing it is its
            own business.
        batch_size: samples per batch on this rank (the micro-batch size).
        pin_memory: copy batches to pinned memory; without effect where there is no device to copy to.
        local_rank: with a rank below 0 and no sampler, every rank sees all samples in random order; otherwise they are
            divided over the data-parallel ranks.
        tput_timer: started each time a batch is asked for.
        collate_fn: list of samples -> batch; default: torch's.
        num_local_io_workers: loading processes; None: 2, or none when training on the CPU.
        data_sampler: yields sample indices for this rank, instead of the division above.
        data_parallel_world_size, data_parallel_rank: number and index of the ranks that divide the samples; default:
            all ranks of the job.
        dataloader_drop_last: leave out the last batch of an epoch when it is not full.
        deepspeed_dataloader_config: settings of the data efficiency library; must be empty.

    Raises:
        ValueError: a batch size below 1.
        NotImplementedError: settings of the data efficiency library.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        pin_memory: bool,
        local_rank: int,
        tput_timer: _Timer | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
        data_sampler: Iterable[int] | None = None,
        data_parallel_world_size: int | None = None,
        data_parallel_rank: int | None = None,
        dataloader_drop_last: bool = False,
        deepspeed_dataloader_config: Mapping[str, Any] | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1; got {batch_size}")
        if deepspeed_dataloader_config:
            raise NotImplementedError(
                f"deepspeed_dataloader_config = {dict(deepspeed_dataloader_config)}: curriculum sampling is not built"
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.tput_timer = tput_timer
        self.collate_fn = collate_fn
        self.dataloader_drop_last = dataloader_drop_last
        on_cpu = get_accelerator().device_name() == "cpu"
        self.pin_memory = pin_memory and not on_cpu
        if num_local_io_workers is None:
            num_local_io_workers = 0 if on_cpu else _WORKERS_WITH_DEVICE
        self.num_local_io_workers = num_local_io_workers

        self._num_replicas, self._rank = _replicas(data_parallel_world_size, data_parallel_rank)
        self._seed = torch.initial_seed()
        self._order_random, self._worker_random = torch.Generator(), torch.Generator()
        # Where the next pass begins while nothing has been handed out since it was decided.
        self._epoch, self._first = 0, 0
        self._untouched = True
        # Batches of the epoch that lie behind us.
        self._position = 0
        self.data: Iterator[Any] | None = None

        self.data_sampler: Any = None
        if isinstance(dataset, IterableDataset):
            self._batches: _BatchesFrom | None = None
            if self._num_replicas > 1:
                log_dist(
                    f"data loader: {type(dataset).__name__} is an iterable dataset, so each of the "
                    f"{self._num_replicas} data-parallel ranks reads what it yields there: it has to divide its "
                    "samples by rank itself",
                    ranks=[0],
                )
        else:
            self.data_sampler = data_sampler if data_sampler is not None else self._make_sampler(local_rank)
            self._batches = _BatchesFrom(BatchSampler(self.data_sampler, batch_size, dataloader_drop_last))
        self._sampler_epoch = getattr(self.data_sampler, "epoch", None)
        self._sampler_state: dict[str, Any] | None = None
        self.dataloader = self._make_loader()

    def _make_sampler(self, local_rank: int) -> Sampler[int]:
        if local_rank < 0:
            return RandomSampler(self.dataset, generator=self._order_random)  # type: ignore[arg-type]
        return DistributedSampler(self.dataset, num_replicas=self._num_replicas, rank=self._rank)

    def _make_loader(self) -> DataLoader[Any]:
        common: dict[str, Any] = {
            "collate_fn": self.collate_fn,
            "num_workers": self.num_local_io_workers,
            "pin_memory": self.pin_memory,
            "generator": self._worker_random,
        }
        if self._batches is None:
            return DataLoader(
                self.dataset, batch_size=self.batch_size, drop_last=self.dataloader_drop_last, **common
            )
        return DataLoader(self.dataset, batch_sampler=self._batches, **common)

    # ---- iteration -------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Batches of one epoch on this rank; TypeError if the dataset or the sampler has no length."""
        return len(self.dataloader) if self._batches is None else len(self._batches.batches)

    def __iter__(self) -> DeepSpeedDataLoader:
        """Begin the next epoch; after `load_state_dict`, and while nothing was handed out, the current one."""
        if not self._untouched:
            self._epoch, self._first = self._epoch + 1, 0
            self._untouched = True
        own = getattr(self.data_sampler, "epoch", None)
        if isinstance(own, int) and own not in (self._sampler_epoch, self._epoch):
            # Set by the user, as training loops around a DistributedSampler do.
            self._epoch, self._first = own, 0
        self._prepare_epoch()
        if self._batches is not None:
            self._batches.first = self._first
            self.data = iter(self.dataloader)
        else:
            self.data = iter(self.dataloader)
            if self._first:
                log_dist(f"data loader: reading {self._first} batches again to go on behind them", ranks=[0])
                for _ in islice(self.data, self._first):
                    pass
        self._position = self._first
        return self

    def __next__(self) -> Any:
        """The next batch; begins an epoch if none is running."""
        if self.data is None:
            iter(self)
        assert self.data is not None
        if self.tput_timer is not None:
            self.tput_timer.start()
        self._untouched = False
        batch = next(self.data)
        self._position += 1
        return batch

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the epoch of the next pass, from its first batch on."""
        self._epoch, self._first, self._untouched = epoch, 0, True
        self._sampler_epoch = getattr(self.data_sampler, "epoch", None)

    def _prepare_epoch(self) -> None:
        self._order_random.manual_seed(_mix(self._seed, self._epoch, 0))
        # Not the saved seed: a checkpoint is written by one rank, and ranks must not share their workers' seeds.
        self._worker_random.manual_seed(_mix(torch.initial_seed(), self._epoch, self._rank + 1))
        if isinstance(self.data_sampler, RandomSampler) and self.data_sampler.generator is None:
            # It would draw its order from the global generator, which cannot be resumed.
            self.data_sampler.generator = self._order_random
        for target in (self.data_sampler, self.dataset):
            set_epoch = getattr(target, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(self._epoch)
        self._sampler_epoch = getattr(self.data_sampler, "epoch", None)
        self._sampler_state = _state_of(self.data_sampler)

    # ---- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Epoch, batches handed out, seed, and what is needed to find the place with another number of ranks.

        Plain numbers (and what the sampler's own `state_dict()` gave at the start of the epoch, if it has one: loading
        processes make the sampler run ahead of the batches).
        """
        return {
            "epoch": self._epoch,
            "batches": self._position,
            "seed": self._seed,
            "batch_size": self.batch_size,
            "num_replicas": self._num_replicas,
            "sampler": self._sampler_state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken: the next pass (or `next()`) goes on within that epoch.

        Another batch size or number of ranks: the loader goes on behind the same number of samples, rounded down to
        whole batches.
        """
        per_step = self.batch_size * self._num_replicas
        samples = int(state["batches"]) * int(state["batch_size"]) * int(state["num_replicas"])
        first, again = divmod(samples, per_step)
        if again:
            log_dist(
                f"data loader: resuming behind {samples} samples with {per_step} per step: {again} samples come again",
                ranks=[0],
                level=logging.WARNING,
            )
        if state.get("sampler") is not None:
            self.data_sampler.load_state_dict(state["sampler"])
        self._seed, self._epoch = int(state["seed"]), int(state["epoch"])
        self._first = self._position = first
        self._untouched, self.data = True, None
        self._sampler_epoch = getattr(self.data_sampler, "epoch", None)


def _mix(seed: int, epoch: int, stream: int) -> int:
    """A seed for a generator; large odd factors, so that neighbouring arguments give unrelated streams."""
    mixed = seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9 + stream * 0x94D049BB133111EB
    return mixed & 0x7FFF_FFFF_FFFF_FFFF


def _state_of(sampler: Any) -> dict[str, Any] | None:
    state_dict = getattr(sampler, "state_dict", None)
    return state_dict() if callable(state_dict) else None


class _BatchesFrom(Sampler[list[int]]):
    """Batches of indices, from number `first` on."""

    def __init__(self, batches: BatchSampler) -> None:
        self.batches = batches
        self.first = 0

    def __iter__(self) -> Iterator[list[int]]:
        return islice(iter(self.batches), self.first, None)

    def __len__(self) -> int:
        return max(0, len(self.batches) - self.first)


def _replicas(world_size: int | None, rank: int | None) -> tuple[int, int]:
    initialized = dist.is_initialized()
    if world_size is None:
        world_size = dist.get_world_size() if initialized else 1
    if rank is None:
        rank = dist.get_rank() % world_size if initialized else 0
    return world_size, rank


class RepeatingLoader:
    """Iterator that begins the wrapped loader anew whenever it ends, so it never stops.

    Args:
        loader: anything that can be iterated several times. Its `state_dict` and `load_state_dict`, if it has them, are
            passed through.

    Raises:
        ValueError: (from `next`) the loader is empty.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __len__(self) -> int:
        """Length of one round."""
        return len(self.loader)

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
        for batch in self.data_iter:
            return batch
        raise ValueError(
            f"{type(self.loader).__name__} yields nothing, so it cannot be repeated (too few samples for one batch, or "
            "an iterator that can be read only once?)"
        )

    def state_dict(self) -> dict[str, Any]:
        """State of the wrapped loader."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the wrapped loader and go on from there."""
        self.loader.load_state_dict(state)
        self.data_iter = iter(self.loader)
