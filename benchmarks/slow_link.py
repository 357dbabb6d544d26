"""An emulated slow link between nodes, for benchmarks and tests on one machine: sleeps for what would cross it.

    with SlowLink(node_of_rank=[0, 0, 1, 1], bytes_per_s=50e6) as link:
        ...                       # training; every collective of deepspeed.comm that leaves a node is charged
    link.crossed_bytes            # what this rank's share of it was

It listens where the log of collectives does (``deepspeed.comm.pending.observer``), so the training code runs unchanged
and the package has no hook for it. Each rank has an equal share of its node's link, as a token bucket: a transfer ends
when all before it have ended and its own bytes are through, counted from its start; ``wait`` returns no earlier. A
transfer that computation covers therefore costs nothing, as on a real link.

What crosses is the least that any algorithm can send, per node and kind, whatever the backend here really does (so
plain collectives are not made to look worse than a good implementation of them): of M bytes gathered or
reduce-scattered over O nodes M(O-1)/O, of an all-reduce twice that, of a broadcast M(O-1)/O on average over sources, of
an all-to-all what each rank sends to others.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch.distributed as dist

from deepspeed.comm import pending
from deepspeed.comm.pending import Pending

# Kinds by how often M(O-1)/O leaves a node; everything that is not known is refused, never free of charge.
_TIMES = {
    "all_gather": 1,
    "all_gather_into_tensor": 1,
    "all_gather_coalesced": 1,
    "reduce_scatter": 1,
    "reduce_scatter_tensor": 1,
    "broadcast": 1,
    "all_reduce": 2,
    "all_reduce_coalesced": 2,
    "barrier": 0,
}


def crossing_bytes(name: str, nbytes: int, nodes: Sequence[int]) -> float:
    """Bytes that one rank's share of its node's link carries for a collective.

    Args:
        name: of the collective, as ``deepspeed.comm`` logs it.
        nbytes: of the whole tensor.
        nodes: the node of each rank of the group.
    """
    ranks, count = len(nodes), len(set(nodes))
    if count == 1:
        return 0.0
    per_node = ranks / count
    if name.startswith("all_to_all"):
        return nbytes / ranks * (ranks - per_node)
    if name not in _TIMES:
        raise ValueError(f"SlowLink: {name!r} has no price; known: {', '.join([*_TIMES, 'all_to_all'])}")
    return _TIMES[name] * nbytes * (count - 1) / count / per_node


class SlowLink:
    """Context manager; see the module. The ranks of a group must be spread evenly over their nodes."""

    def __init__(self, node_of_rank: Sequence[int], bytes_per_s: float) -> None:
        """``bytes_per_s``: of one node's link, each way; shared by its ranks. ``inf`` counts without sleeping."""
        self.crossed_bytes = 0.0
        self.slept_s = 0.0
        self._nodes = list(node_of_rank)
        self._share = bytes_per_s / max(self._nodes.count(node) for node in set(self._nodes))
        self._free_at = 0.0
        self._before: Any = None

    def __enter__(self) -> SlowLink:
        self._before, pending.observer = pending.observer, self._charge
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        pending.observer = self._before

    def _charge(self, call: Pending) -> None:
        if self._before is not None:
            self._before(call)
        group = call.facts.ref() if call.facts.ref is not None else None
        if group is None:
            return
        nodes = [self._nodes[rank] for rank in dist.get_process_group_ranks(group)]
        crossed = crossing_bytes(call.name, call.nbytes, nodes)
        if not crossed:
            return
        self.crossed_bytes += crossed
        self._free_at = max(self._free_at, call.started) + crossed / self._share
        pause = self._free_at - time.perf_counter()
        if pause > 0:
            self.slept_s += pause
            time.sleep(pause)
