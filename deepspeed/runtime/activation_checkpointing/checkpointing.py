"""Activation checkpointing: a function's inner activations are dropped after forward and computed again in backward.

Owns: the call `checkpoint`, and the settings of this process (`configure`). The inputs are kept by `saved_inputs`,
random numbers repeated by `rng`; the graph mechanics are torch's non-reentrant ``torch.utils.checkpoint``.

Invariants: losses, gradients and dropout masks equal those without checkpointing bit for bit; any arguments and
results (None, numbers, nested containers, keywords) pass through; without gradients the function is simply called.

The settings belong to the process: one `configure` serves all models.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import set_checkpoint_early_stop

from deepspeed.accelerator.real_accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing import rng
from deepspeed.runtime.activation_checkpointing.rng import CudaRNGStatesTracker, RngSnapshot, get_cuda_rng_tracker
from deepspeed.runtime.activation_checkpointing.saved_inputs import CheckpointStatistics
from deepspeed.runtime.activation_checkpointing.settings import (
    CheckpointOptions,
    Settings,
    check_options,
    options_of,
    tell_without_effect,
)
from deepspeed.utils.timer import SynchronizedWallClockTimer

__all__ = [
    "CheckpointOptions",
    "CudaRNGStatesTracker",
    "checkpoint",
    "checkpoint_statistics",
    "configure",
    "extract_tensors",
    "get_cuda_rng_tracker",
    "get_partition_size",
    "get_partition_start",
    "is_activation_to_checkpoint",
    "is_configured",
    "merge_tensors",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
]

_CUDA_RNG_STATE_TRACKER = get_cuda_rng_tracker()
_MODEL_PARALLEL_RNG_TRACKER_NAME = rng.MODEL_PARALLEL_STREAM
_set_cuda_rng_state = rng.set_device_rng_state


_settings = Settings()

# Historical module globals, as views of the settings.
_VIEWS: dict[str, Callable[[], Any]] = {
    "CONTIGUOUS_CHECKPOINTING": lambda: _settings.options.contiguous_memory_optimization,
    "CPU_CHECKPOINT": lambda: _settings.options.cpu_checkpointing,
    "PARTITION_ACTIVATIONS": lambda: _settings.options.partition_activations,
    "PROFILE_TIME": lambda: _settings.options.profile,
    "SYNCHRONIZE": lambda: _settings.options.synchronize_checkpoint_boundary,
    "deepspeed_checkpointing_enabled": lambda: _settings.configured,
    "mp_group": lambda: _settings.shard().group,
    "mp_rank": lambda: _settings.shard().rank,
    "mp_size": lambda: _settings.shard().size,
    "mpu": lambda: _settings.mpu,
    "num_layers": lambda: _settings.options.number_checkpoints,
}


def __getattr__(name: str) -> Any:
    if name in _VIEWS:
        return _VIEWS[name]()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# Settings


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set what `checkpoint` does with saved inputs, for the whole process.

    Args:
        mpu_: model-parallel unit (rank, size and group of tensor parallelism), or None.
        deepspeed_config: config (dict, path, base64 text, or parsed) whose section ``activation_checkpointing`` is
            taken; the arguments below win over it; None means their value is not given.
        partition_activations: keep only this rank's part of inputs that all model-parallel ranks have alike.
        contiguous_checkpointing: pack kept inputs into one block a forward; needs partition_activations and
            num_checkpoints.
        num_checkpoints: checkpoints of one forward.
        checkpoint_in_cpu: keep inputs in (page-locked) host memory.
        synchronize: wait for the device before and after each checkpoint, forward and backward.
        profile: print the milliseconds of each checkpoint on rank 0.

    Raises:
        DeepSpeedConfigError: contiguous_checkpointing without what it needs, or a bad config.
    """
    options = CheckpointOptions() if deepspeed_config is None else options_of(deepspeed_config)
    given: dict[str, Any] = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    options = replace(options, **{name: value for name, value in given.items() if value is not None})
    check_options(options)
    _settings.set(options, mpu_)
    _settings.configured = True
    tell_without_effect(options, _settings.shard())


def is_configured() -> bool:
    """Tell whether `configure` has been called in this process."""
    return _settings.configured


def differs_from(deepspeed_config: Any) -> list[str]:
    """Keys of ``activation_checkpointing`` in a config (any form) whose values are not those in force."""
    wanted = options_of(deepspeed_config)
    return [name for name, value in vars(wanted).items() if value != getattr(_settings.options, name)]


def reset() -> None:
    """End a forward's block of contiguous activations, for a forward that had no backward; otherwise not needed."""
    if _settings.keeper.arena is not None:
        _settings.keeper.arena.close()


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Switch partition_activations on or off; all else stays."""
    options = replace(_settings.options, partition_activations=partition_activation)
    check_options(options)
    _settings.set(options, _settings.mpu)


def set_num_layers(nlayers: int) -> None:
    """Set number_checkpoints (checkpoints of one forward); all else stays."""
    _settings.set(replace(_settings.options, number_checkpoints=nlayers), _settings.mpu)


def checkpoint_statistics() -> CheckpointStatistics:
    """Counts and bytes of all checkpoints of this process; `clear` starts anew."""
    return _settings.statistics


# Partitions


def is_activation_to_checkpoint(item: Any) -> bool:
    """Tell whether ``item`` is partitioned: a floating point tensor with an element for each model-parallel rank."""
    return isinstance(item, torch.Tensor) and item.is_floating_point() and item.numel() >= _settings.shard().size


def get_partition_size(item: torch.Tensor) -> int:
    """Elements of ``item`` that each model-parallel rank keeps; the last rank's part may be padded."""
    return _settings.shard().chunk(item.numel())


def get_partition_start(item: torch.Tensor) -> int:
    """First element of ``item`` that this rank keeps."""
    return get_partition_size(item) * _settings.shard().rank


# Random numbers


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device with ``seed`` and the stream "model-parallel-rng" with ``seed`` + 2718 + tensor-parallel rank.

    Draws inside ``get_cuda_rng_tracker().fork()`` come from that stream and differ between tensor-parallel ranks; all
    others are the same on them.
    """
    rng.seed_model_parallel(seed, _settings.mpu)


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Start the stream "model-parallel-rng" anew from ``seed``."""
    rng.reseed_model_parallel(seed, _settings.mpu)


# The checkpoint

# Keywords that torch's checkpoint takes; all others belong to the function.
_TORCH_KEYWORDS = ("context_fn", "determinism_check", "debug")
_TAKES_EARLY_STOP = "early_stop" in inspect.signature(torch_checkpoint).parameters


def extract_tensors(all_objects: Sequence[Any]) -> tuple[list[torch.Tensor], list[Any], list[bool]]:
    """Split a flat list into tensors and other objects; the third list says for each place whether it is a tensor."""
    flags = [isinstance(item, torch.Tensor) for item in all_objects]
    tensors = [item for item, is_tensor in zip(all_objects, flags, strict=True) if is_tensor]
    others = [item for item, is_tensor in zip(all_objects, flags, strict=True) if not is_tensor]
    return tensors, others, flags


def merge_tensors(
    tensor_objects: Sequence[torch.Tensor], non_tensor_objects: Sequence[Any], tensor_flags: Sequence[bool]
) -> tuple[Any, ...]:
    """Undo `extract_tensors`."""
    tensors, others = iter(tensor_objects), iter(non_tensor_objects)
    return tuple(next(tensors) if is_tensor else next(others) for is_tensor in tensor_flags)


class _Autocast:
    """Autocast state of the device, taken in forward and entered again in recomputation.

    torch looks at the device of the tensors it is given, which may be kept on the host.
    """

    def __init__(self) -> None:
        self._device = get_accelerator().name
        self._available = torch.amp.is_autocast_available(self._device)
        if self._available:
            self._enabled = torch.is_autocast_enabled(self._device)
            self._dtype = torch.get_autocast_dtype(self._device)
            self._cache = torch.is_autocast_cache_enabled()

    def again(self) -> contextlib.AbstractContextManager[Any]:
        if not self._available:
            return contextlib.nullcontext()
        return torch.autocast(self._device, dtype=self._dtype, enabled=self._enabled, cache_enabled=self._cache)


@contextlib.contextmanager
def _watched(options: CheckpointOptions, label: str) -> Iterator[None]:
    """Synchronize around the body and time it, as far as the options say."""
    if options.synchronize_checkpoint_boundary:
        get_accelerator().synchronize()
    timers = SynchronizedWallClockTimer() if options.profile else None
    if timers is not None:
        timers(label).start()
    try:
        yield
    finally:
        if timers is not None:
            timers(label).stop()
            timers.log([label], ranks=[0])
        if options.synchronize_checkpoint_boundary:
            get_accelerator().synchronize()


class _Region:
    """One call of a checkpointed function: run now with the caller's arguments, run again with restored ones."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any, preserve_rng_state: bool) -> None:
        leaves, self._structure = tree_flatten((args, kwargs))
        tensors, self._others, self._flags = extract_tensors(leaves)
        self._function = function
        self._options = _settings.options
        self._keeper = _settings.keeper
        self._rng = RngSnapshot.take() if preserve_rng_state else None
        self._autocast = _Autocast()
        self.stored, self._plans = self._keeper.keep(tensors)
        # Given up when forward starts: from then on only the kept form lives.
        self._arguments: tuple[Any, Any] | None = (args, kwargs)

    def __call__(self, *stored: torch.Tensor) -> Any:
        if self._arguments is not None:
            (args, kwargs), self._arguments = self._arguments, None
            with _watched(self._options, "forward"):
                return self._function(*args, **kwargs)
        self._keeper.statistics.num_recomputed += 1
        with _watched(self._options, "backward"):
            inputs = self._keeper.restore(stored, self._plans)
            args, kwargs = tree_unflatten(merge_tensors(inputs, self._others, self._flags), self._structure)
            replay = contextlib.nullcontext() if self._rng is None else self._rng.replay()
            with replay, self._autocast.again():
                return self._function(*args, **kwargs)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function(*args, **kwargs)`` without keeping its inner activations; backward computes them again.

    Args:
        function: draws random numbers from torch's generators and the RNG tracker only, if at all; they repeat.
        *args, **kwargs: anything, in any nesting. Tensors in lists, tuples, named tuples, dicts and registered
            containers are kept as `configure` says; tensors inside other objects stay alive as they are.

    Keywords with a meaning of their own, as in ``torch.utils.checkpoint.checkpoint``: ``preserve_rng_state`` (default
    True), ``context_fn``, ``determinism_check``, ``debug``, ``early_stop`` (default False here: recomputation runs to
    its end, so hooks that come in pairs around modules stay paired), and ``use_reentrant``, which is accepted and makes
    no difference: there is one algorithm, with the results of both.

    Returns what the function returns.
    """
    kwargs.pop("use_reentrant", None)
    preserve_rng_state = kwargs.pop("preserve_rng_state", True)
    early_stop = kwargs.pop("early_stop", False)
    control = {name: kwargs.pop(name) for name in _TORCH_KEYWORDS if name in kwargs}
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if torch.compiler.is_compiling():
        # The tracer knows torch's own function as an operator and plans the recomputation itself.
        return torch_checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **control, **kwargs
        )
    region = _Region(function, args, kwargs, preserve_rng_state)
    # Otherwise this frame would hold the originals until the function returns.
    del args, kwargs
    stored, region.stored = region.stored, []
    if _TAKES_EARLY_STOP:
        control["early_stop"] = early_stop
        return torch_checkpoint(region, *stored, use_reentrant=False, preserve_rng_state=False, **control)
    with set_checkpoint_early_stop(early_stop):
        return torch_checkpoint(region, *stored, use_reentrant=False, preserve_rng_state=False, **control)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`checkpoint` under the name of what it is."""
    return checkpoint(function, *args, **kwargs)
