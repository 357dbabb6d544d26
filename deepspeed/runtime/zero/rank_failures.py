"""A failure beside training on one rank, told to all: the same error on every rank, at the same boundary.

Owns: the exception and its text. Does not own: how ranks find out that somebody has failed (``norm.py``) and what they
do until then: a rank whose work has failed takes part in every collective up to the next boundary.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch.distributed as torch_dist

from deepspeed.comm import objects
from deepspeed.comm.activity import format_ranks
from deepspeed.comm.group_facts import facts_of

__all__ = ["RankFailed", "raise_everywhere"]


class RankFailed(RuntimeError):
    """Work beside training has failed on some rank. The cause, on that rank, is its own error."""


def raise_everywhere(error: BaseException | None, group: Any) -> NoReturn:
    """Raise the same :class:`RankFailed` on all ranks of the group (None: the default group). Collective.

    ``error``: of this rank; None where all went well. One rank at least has one.
    """
    facts = facts_of(group)
    told: list[str | None] = [None] * facts.size
    own = None if error is None else f"{type(error).__name__}: {error}"
    objects.all_gather_object(told, own, group, what="the failures of ranks")
    ranks = torch_dist.get_process_group_ranks(group if group is not None else torch_dist.group.WORLD)
    by_text: dict[str, list[int]] = {}
    for rank, text in zip(ranks, told, strict=True):
        if text is not None:
            by_text.setdefault(text, []).append(rank)
    causes = "; ".join(f"{format_ranks(failed)}: {text}" for text, failed in by_text.items())
    raise RankFailed(
        f"the update in host memory beside training has failed on {causes}. Masters and optimizer states of that rank "
        "are not to be trusted: remove the cause and load the last checkpoint. No weight was changed in this step."
    ) from error
