"""`ReduceOp`: the reductions of the public collectives, independent of torch's own class."""

from __future__ import annotations

import enum
from typing import Any

import torch.distributed as torch_dist

__all__ = ["ReduceOp", "to_torch"]


class ReduceOp(enum.Enum):
    """How the ranks' values become one. AVG works on every backend (sum, then divide, where it is not native)."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BAND = 4
    BOR = 5
    BXOR = 6
    AVG = 7
    UNUSED = 8


_TO_TORCH: dict[ReduceOp, Any] = {
    op: getattr(torch_dist.ReduceOp, op.name) for op in ReduceOp if op is not ReduceOp.UNUSED
}


def to_torch(op: Any) -> Any:
    """torch's reduction for ours; torch's own are passed through.

    Raises:
        TypeError: `op` is neither.
    """
    if isinstance(op, ReduceOp):
        found = _TO_TORCH.get(op)
        if found is None:
            raise ValueError(f"{op} does not name a reduction; use one of {', '.join(o.name for o in _TO_TORCH)}")
        return found
    if isinstance(op, (torch_dist.ReduceOp, torch_dist.ReduceOp.RedOpType)):
        return op
    raise TypeError(f"expected a deepspeed.comm.ReduceOp or torch.distributed.ReduceOp, found {op!r}")
