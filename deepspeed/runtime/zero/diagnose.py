"""Finding where a bad number began: by parameter name, for messages. Runs only after something has gone wrong."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepspeed.runtime.zero.shard_group import ShardGroup


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
