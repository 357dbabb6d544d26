"""Train batch, micro batch, accumulation steps and data-parallel ranks: one equation.

    train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x data-parallel ranks

Pure integers (samples, steps, ranks); no process group. Invariant: a `BatchTriple` satisfies the equation.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed.runtime.config_problems import Problem

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"


@dataclass(frozen=True)
class BatchTriple:
    """The numbers in force."""

    train_batch_size: int
    """Samples per optimizer step, all ranks."""
    micro_batch_size: int
    """Samples per forward, one rank."""
    accumulation_steps: int
    """Forwards per optimizer step."""
    dp_world_size: int
    """Data-parallel ranks."""
    inferred: tuple[str, ...] = ()
    """Keys that were not in the config."""

    def __str__(self) -> str:
        """The equation with its numbers, and which of them were inferred."""
        text = _equation(self.train_batch_size, self.micro_batch_size, self.accumulation_steps, self.dp_world_size)
        return text + (f" (not in the config: {', '.join(self.inferred)})" if self.inferred else "")


def resolve_batch(train: int | None, micro: int | None, steps: int | None, dp_world_size: int) -> BatchTriple | Problem:
    """Fill in what is missing; a problem when the equation does not hold.

    Args:
        train: train_batch_size of the config, None when absent.
        micro: train_micro_batch_size_per_gpu, likewise.
        steps: gradient_accumulation_steps, likewise.
        dp_world_size: number of data-parallel ranks, at least 1.
    """
    ranks = dp_world_size
    inferred = tuple(key for key, value in ((TRAIN, train), (MICRO, micro), (STEPS, steps)) if value is None)
    if micro is None:
        if train is None:
            also = f"{STEPS} {steps} alone does not fix a batch" if steps is not None else "no batch size is given"
            return Problem(TRAIN, f"missing, and so is {MICRO}: {also}", f"add {MICRO}, or {TRAIN}")
        steps = 1 if steps is None else steps
        if train % (steps * ranks):
            return _no_fit(train, f"{STEPS} {steps} x data-parallel ranks {ranks}", steps * ranks)
        micro = train // (steps * ranks)
    elif steps is None and train is not None:
        if train % (micro * ranks):
            return _no_fit(train, f"{MICRO} {micro} x data-parallel ranks {ranks}", micro * ranks)
        steps = train // (micro * ranks)
    steps = 1 if steps is None else steps
    product = micro * steps * ranks
    train = product if train is None else train
    if product != train:
        return Problem(
            TRAIN,
            f"found {train}; expected {product} = {MICRO} {micro} x {STEPS} {steps} x data-parallel ranks {ranks}",
            f"set {TRAIN} to {product}, or remove one of the three keys and let it be inferred",
        )
    return BatchTriple(train, micro, steps, ranks, inferred)


def _no_fit(train: int, factors: str, divisor: int) -> Problem:
    lower, upper = train // divisor * divisor, -(-train // divisor) * divisor
    choice = f"{upper}" if lower == 0 else f"{lower} or {upper}"
    return Problem(
        TRAIN,
        f"found {train}; expected a multiple of {divisor} = {factors}",
        f"set {TRAIN} to {choice}, or change the other numbers",
    )


def _equation(train: int, micro: int, steps: int, ranks: int) -> str:
    return f"{TRAIN} {train} = {MICRO} {micro} x {STEPS} {steps} x data-parallel ranks {ranks}"


def accumulation_note(config_steps: int | None, wrapper_steps: int, who: str) -> str | None:
    """One line when a wrapper accumulates another number of steps than the config says; None when they agree.

    Args:
        config_steps: gradient_accumulation_steps of the config, None when absent.
        wrapper_steps: number the wrapper uses.
        who: name of the wrapper for the line.
    """
    if config_steps == wrapper_steps:
        return None
    said = "does not set it (1 is taken)" if config_steps is None else f"says {config_steps}"
    return (
        f"{STEPS}: {who} accumulates {wrapper_steps} micro-batches, the config {said}; gradients, learning rate and "
        f"schedule follow the config. Set {STEPS} to {wrapper_steps} in the config to agree."
    )
