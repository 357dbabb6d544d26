"""Finding where a bad number began: by parameter name, for messages. Runs only after something has gone wrong."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepspeed.runtime.zero.shard_group import ShardGroup
from deepspeed.utils.logging import logger


class UnusedParameters(AssertionError, RuntimeError):
    """``ignore_unused_parameters: false`` and a trainable parameter got no gradient on any rank."""


@torch.no_grad()
def first_non_finite(groups: Sequence[ShardGroup]) -> str | None:
    """``"<parameter> (inf)"`` of the first gradient held here with inf or nan; None when all are finite.

    Order is registration order, so what is named is the earliest layer, not the first bucket.
    """
    bad: list[tuple[int, str]] = []
    for group in groups:
        for bound in group.fragments:
            grad = group.grad_of(bound)
            if grad is None or not grad.numel():
                continue
            grad = grad.coalesce().values() if grad.is_sparse else grad
            if not torch.isfinite(grad).all():
                kind = "nan" if torch.isnan(grad).any() else "inf"
                bad.append((group.order[bound.position], f"{group.names[bound.position]} ({kind})"))
    return min(bad)[1] if bad else None


def unread_gradients(groups: Sequence[ShardGroup]) -> list[str]:
    """Names of sharded parameters whose ``grad`` holds something once everything has been reduced."""
    return [
        name
        for group in groups
        if group.sharded
        for name, param in zip(group.names, group.params, strict=True)
        if param.grad is not None and param.numel()  # a parameter of no elements is in no bucket
    ]


def tell_unread_gradients(groups: Sequence[ShardGroup]) -> bool:
    """A warning when sharded parameters have a ``grad`` that nobody will read; whether there was one to give."""
    unread = unread_gradients(groups)
    if unread:
        logger.warning(
            f"gradients written to param.grad after backward are not used, the reduced ones lie in shards: "
            f"{', '.join(unread[:8])}. Use deepspeed.utils.safe_set_full_grad, or gradient_clipping to clip"
        )
    return bool(unread)


def refuse_unused(groups: Sequence[ShardGroup], touched: Sequence[Sequence[int]]) -> None:
    """Raises :class:`UnusedParameters` when a flag of ``touched`` (per group and parameter, over all ranks) is 0."""
    unused = [
        name
        for group, flags in zip(groups, touched, strict=True)
        for name, flag in zip(group.names, flags, strict=True)
        if not flag
    ]
    if unused:
        shown = ", ".join(unused[:8]) + (f" and {len(unused) - 8} more" if len(unused) > 8 else "")
        raise UnusedParameters(
            f"{len(unused)} trainable parameters got no gradient on any rank in this window: {shown}. No weight "
            "was changed. Use them in forward, freeze them (requires_grad=False), or set "
            "zero_optimization.ignore_unused_parameters to true"
        )


def report_overflow(groups: Sequence[ShardGroup], loss_scale: float | None, *, first_rank: bool) -> None:
    """One line about a skipped step, from the ranks that know where it began, and from the first. None: no scaling."""
    where = first_non_finite(groups)
    found = f"first seen here in {where}" if where else "seen on another rank"
    if where or first_rank:
        # Lowering the loss scale is at work in fp16; elsewhere nothing will mend it by itself.
        log = logger.warning if loss_scale is None else logger.info
        scale = "" if loss_scale is None else f" at loss scale {loss_scale:g}"
        log(f"gradient overflow{scale}: step skipped, {found}")
