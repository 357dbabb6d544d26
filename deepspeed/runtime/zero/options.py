"""What an optimizer of the core is told beside stage and precision: plain values, from the config by ``build.py``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from deepspeed.runtime.swap_tensor.nvme_store import NvmeStore


@dataclass(frozen=True)
class ZenFlowOptions:
    """What is important, and when the rest is updated; see ``zenflow/executor.py``.

    ``topk``: the share of a weight's columns that is important. ``select_steps``: steps between choices; None: said
    later. ``update_interval``: steps of a window; None: it ends when what waits outgrows ``auto_ratio`` times the
    important gradients. ``overlap``: windows are applied beside training, with ``threads`` threads (None: as many as
    torch has). ``offload``: moments of important elements are in host memory between steps. ``warm_up``: first steps
    that update everything.
    """

    topk: float
    select_steps: int | None
    update_interval: int | None
    overlap: bool = False
    offload: bool = False
    auto_ratio: float = 0.99
    warm_up: int = 0
    threads: int | None = None


@dataclass(frozen=True)
class OffloadOptions:
    """Masters, states and reduced gradients live in host memory, and the update runs there.

    ``ratio``: the part of every group's elements that does; the rest stays on the device. ``unit_numel``: at most this
    many elements are updated at a time, while the ones before are on their way back to the device.
    """

    pin: bool = True
    ratio: float = 1.0
    unit_numel: int = 1 << 25
    speculate: bool = False  # update during backward, undo what is clipped or skipped
    # Makes the store that masters and states go to instead, with buffers of so many bytes.
    disk: Callable[[int], NvmeStore] | None = None
    zenflow: ZenFlowOptions | None = None  # update important columns at once, the rest later


@dataclass(frozen=True)
class ZeroOptions:
    """Values that choose among behaviours. ``bucket_numel`` None: a quarter of the model, at least 2**20 elements."""

    bucket_numel: int | None = None
    gather_numel: int | None = None  # at most this many elements per all-gather (and so per bucket)
    accept_unused: bool = True  # parameters without gradient on any rank are skipped, not an error
    overlap: bool = False
    pre_divide: float = 1.0
    sum_gradients: bool = False
    clip: float = 0.0
    compute_norm: bool = True
    elementwise: bool = True
    round_robin: bool = False
    accumulates: bool = False  # more than one backward per step is expected
    by_rows: frozenset[int] = frozenset()  # id() of embeddings whose gradients travel as touched rows
    comm_dtype_of: Callable[[nn.Parameter], torch.dtype | None] = field(default=lambda _: None)
    offload: OffloadOptions | None = None
