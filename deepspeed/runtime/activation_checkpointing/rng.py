"""Random number states for recomputation and for tensor parallelism.

Owns: named generator states that take turns in the device's default generator (`CudaRNGStatesTracker`), and snapshots
of all state that a recomputation must see again (`RngSnapshot`). Does not own the seeds' meaning: with tensor
parallelism a dropout on a split activation needs a different stream on each rank, one on a whole activation the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed.accelerator.real_accelerator import get_accelerator
from deepspeed.utils.bwc import bwc_tensor_model_parallel_rank

__all__ = [
    "CudaRNGStatesTracker",
    "RngSnapshot",
    "get_cuda_rng_tracker",
    "seed_model_parallel",
    "reseed_model_parallel",
]

MODEL_PARALLEL_STREAM = "model-parallel-rng"

# Keeps the streams of split activations away from those of whole ones for nearby user seeds.
_MODEL_PARALLEL_OFFSET = 2718


def set_device_rng_state(new_state: torch.Tensor, device: int = -1) -> None:
    """Set the state of a device's default generator; -1 is the current device."""
    get_accelerator().set_rng_state(new_state, None if device == -1 else device)


class CudaRNGStatesTracker:
    """Named states of the device's default generator (any accelerator; the name is historical)."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forget all states."""
        self.states_ = {}
        self.seeds_ = set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """A copy of the table of states; `set_states` takes it back, so it can be saved in a checkpoint."""
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Replace all states."""
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """Start the stream ``name`` from ``seed``. ValueError if the name or the seed is taken."""
        if seed in self.seeds_:
            raise ValueError(f"random stream {name!r}: seed {seed} already exists; two equal streams would repeat")
        if name in self.states_:
            raise ValueError(f"random stream {name!r} already exists")
        self.seeds_.add(seed)
        accelerator = get_accelerator()
        before = accelerator.get_rng_state()
        accelerator.manual_seed(seed)
        self.states_[name] = accelerator.get_rng_state()
        accelerator.set_rng_state(before)

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL_STREAM) -> Iterator[None]:
        """Context in which the device draws from the stream ``name``, which goes on where it last stopped."""
        if name not in self.states_:
            raise ValueError(
                f"random stream {name!r} is not added; existing: {sorted(self.states_) or 'none'} "
                "(model_parallel_cuda_manual_seed adds the model-parallel one)"
            )
        accelerator = get_accelerator()
        before = accelerator.get_rng_state()
        accelerator.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = accelerator.get_rng_state()
            accelerator.set_rng_state(before)


_TRACKER = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """The tracker of this process."""
    return _TRACKER


def seed_model_parallel(seed: int, mpu: Any) -> None:
    """Seed the device with ``seed`` (same on all tensor-parallel ranks) and the model-parallel stream by rank."""
    _TRACKER.reset()
    get_accelerator().manual_seed(seed)
    _TRACKER.add(MODEL_PARALLEL_STREAM, seed + _MODEL_PARALLEL_OFFSET + bwc_tensor_model_parallel_rank(mpu))


def reseed_model_parallel(seed: int, mpu: Any) -> None:
    """Start the model-parallel stream anew from ``seed`` and the rank; other streams go on."""
    with _TRACKER.fork():
        get_accelerator().manual_seed(seed + _MODEL_PARALLEL_OFFSET + bwc_tensor_model_parallel_rank(mpu))


@dataclass(frozen=True)
class RngSnapshot:
    """Everything random that a function may draw from, at one moment."""

    host: torch.Tensor
    device: torch.Tensor | None
    """None where the host's generator is the device's."""
    streams: dict[str, torch.Tensor]

    @classmethod
    def take(cls) -> RngSnapshot:
        """Snapshot of now."""
        accelerator = get_accelerator()
        device = None if accelerator.name == "cpu" else accelerator.get_rng_state()
        return cls(torch.get_rng_state(), device, _TRACKER.get_states())

    def set(self) -> None:
        """Make this the present state."""
        torch.set_rng_state(self.host)
        if self.device is not None:
            get_accelerator().set_rng_state(self.device)
        _TRACKER.set_states(dict(self.streams))

    @contextlib.contextmanager
    def replay(self) -> Iterator[None]:
        """Context that draws the same numbers as were drawn after the snapshot; the present is back afterwards."""
        now = RngSnapshot.take()
        self.set()
        try:
            yield
        finally:
            now.set()
