"""The collectives of the training step: bounded, deterministic, with little Python around them.

Owns: which primitive of the backend carries each collective. Does not own: the wait (`pending.py`), groups (`mesh.py`),
the public look-alike of torch.distributed (`comm.py`), and the text of a failure (`watch.py`).
Invariant: a reduce-scatter gives an element the same bits whatever the bucket, the stage and the rank that owns it.

How, and why. CPU tensors of ranks on one host travel through shared memory (`same_host.py`). Backends that reduce
tensors themselves (nccl and its kin) get one native call. gloo, for ranks on several hosts, does not: its own
reduce-scatter is slower than its all-reduce, and its all-gather copies every piece twice. Measured in milliseconds,
best of 18-36 interleaved calls, torch 2.13, one thread a rank, loopback TCP, 2 shared cores, size = the full tensor:

    size, dtype, ranks           64 KiB   1 MiB   4 MiB  16 MiB  64 MiB
    reduce-scatter, fp32, 2
      gloo reduce_scatter          0.56    1.31    5.27   27.59   210.9
      gloo all_reduce, slice       0.47    0.99    4.59   17.25    64.6
      all-to-all of the peer half  0.24    0.53    2.77    7.40    29.0   <- chosen (2 ranks); half a bucket staged
    all-gather, bf16, 2
      gloo all_gather              0.38    0.61    3.02   14.68   175.8
      a broadcast per rank         0.33    0.57    1.45    5.84    27.7
      all-to-all of the peer half  0.27    0.49    1.56    6.54    33.1   <- chosen (2 ranks); one call, in place
    reduce-scatter, fp32, 3
      gloo reduce_scatter          2.04    2.23   11.08   36.20   216.8
      gloo all_reduce, slice       1.65    3.22    8.62   32.03    84.8
      send/recv pairs + sum        0.89    1.57    5.28   17.14    44.2
      all-to-all + sum             0.69    1.71    4.35   23.95    55.2   <- chosen (3 ranks and more)
    all-gather, bf16, 3
      gloo all_gather              0.75    2.11    4.55   21.09   324.7   <- chosen above 8 ranks
      a broadcast per rank         0.78    1.55    3.79   10.74    59.7   <- chosen (3 to 8 ranks)

The sum runs in `wait`, in fp32 and in rank order (`rank_sum.py`).
Wire convention of the counters: bytes this rank sends; reduce-scatter and all-gather of M bytes send M(N-1)/N,
an all-reduce 2M(N-1)/N, a broadcast of M bytes M(N-1)/N on average.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as torch_dist

from deepspeed.comm.exchanges import start_all_to_all, start_barrier, start_host_reduction
from deepspeed.comm.group_facts import Group, GroupFacts, facts_of
from deepspeed.comm.landing import LandShard, LocalSum, Scale
from deepspeed.comm.pending import DONE, Pending, WaitMode, What, announce
from deepspeed.comm.rank_sum import sum_in_rank_order
from deepspeed.comm.same_host import channel_of, in_background, sums_in_order
from deepspeed.comm.shm_channel import Channel, reduction_code

__all__ = [
    "Pending",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "reduce_scatter",
    "release_buffers",
]

# Above this many ranks a loop of broadcasts costs more Python and latency than gloo's own ring all-gather.
BROADCAST_GATHER_MAX_RANKS = 8


def _options(op: Any) -> Any:
    options: Any = torch_dist.AllreduceOptions()
    options.reduceOp = op
    return options


# Ready-made: handing torch the bare operation costs five times more, in a failed overload.
_OPTIONS: dict[str, Any] = {
    "sum": _options(torch_dist.ReduceOp.SUM),
    "avg": _options(torch_dist.ReduceOp.AVG),
    "max": _options(torch_dist.ReduceOp.MAX),
    "min": _options(torch_dist.ReduceOp.MIN),
    "product": _options(torch_dist.ReduceOp.PRODUCT),
}


def launch(
    works: tuple[Any, ...],
    finish: Callable[[], None] | None,
    facts: GroupFacts,
    name: str,
    what: What,
    tensor: torch.Tensor,
    async_op: bool,
) -> Pending:
    """The handle of works just started, with its finishing step; waited for unless `async_op`."""
    in_memory = tensor.is_cpu and facts.link.__class__ is Channel
    mode = WaitMode.SLICES if in_memory or facts.blocks_host(tensor.device) else WaitMode.STREAM
    pending = Pending(works, finish, facts, name, what, tensor.nbytes, mode)
    if async_op:
        in_background(works)
    else:
        pending.wait()
    return pending


def all_reduce(
    tensor: torch.Tensor,
    group: Group | None,
    *,
    op: str = "sum",
    what: What = "",
    async_op: bool = False,
    deterministic: bool = False,
    key: int = 0,
) -> Pending:
    """Reduce `tensor` over the group, in place.

    Args:
        tensor: contiguous, any shape. 1D when `deterministic`.
        op: "sum", "avg", "max", "min" or "product".
        deterministic: for "sum" and "avg": the bits of `reduce_scatter` followed by `all_gather`.
        key: see `reduce_scatter`.
    """
    facts = facts_of(group)
    options = _OPTIONS.get(op)
    if options is None:
        raise ValueError(f"all_reduce: unknown op {op!r}; known: {', '.join(_OPTIONS)}")
    if facts.size == 1 or tensor.numel() == 0:
        return DONE
    if deterministic and op in ("sum", "avg") and not sums_in_order(facts, tensor):
        return _all_reduce_in_rank_order(tensor, group, facts, op, what, async_op, key)
    announce(facts, "all_reduce", what, tensor.nbytes, call_mark(tensor.nbytes, key))
    channel = channel_of(facts, tensor, "all_reduce", what, tensor.nbytes)
    factor = 1.0 / facts.size if op == "avg" and not facts.knows_average(tensor.device) else None
    work: Any = None if channel is None else start_host_reduction(channel, tensor, op, factor)
    finish = None
    if work is None:
        pg: Any = group if group is not None else torch_dist.group.WORLD
        if factor is not None:
            options = _OPTIONS["sum"]
            finish = Scale(tensor, factor)
        work = pg.allreduce([tensor], options)
    facts.bytes_sent += 2 * tensor.nbytes * (facts.size - 1) // facts.size
    return launch((work,), finish, facts, "all_reduce", what, tensor, async_op)


def reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,
    group: Group | None,
    *,
    average: bool,
    what: What = "",
    async_op: bool = False,
    accumulate: bool = False,
    scale: float | None = None,
    key: int = 0,
) -> Pending:
    """Sum `input` over the ranks; rank r keeps slice r: `output (+)= scale * mean_or_sum(input[r*k:(r+1)*k])`.

    Args:
        output: 1D, k elements, any float dtype; may be this rank's slice of `input` (not with `accumulate`).
        input: 1D, contiguous, N*k elements. Must stay unchanged until `wait`.
        average: divide by the number of ranks.
        accumulate: add to `output` instead of writing it.
        scale: one more factor, e.g. the inverse of a loss scale; applied in fp32.
        key: a number that tells what is moved, equal on all ranks (a bucket's, a parameter's): ranks that hand over
            different things of one size get an error instead of each other's values.

    Extra memory: half a bucket for two ranks, one bucket (N*k elements) for more, kept for the next call.
    """
    facts = facts_of(group)
    check_shard("reduce_scatter", output, input, facts.size)
    if facts.size > 1 and output.numel():
        announce(facts, "reduce_scatter", what, input.nbytes, call_mark(input.nbytes, key))
    works, finish = start_reduce_scatter(output, input, group, facts, average, accumulate, scale, what)
    return launch(works, finish, facts, "reduce_scatter", what, input, async_op) if works else DONE


def start_reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,
    group: Group | None,
    facts: GroupFacts,
    average: bool,
    accumulate: bool = False,
    scale: float | None = None,
    what: What = "",
) -> tuple[tuple[Any, ...], Callable[[], None] | None]:
    """(works, finishing step) of a reduce-scatter whose arguments have been checked; no works: it is done."""
    if facts.size == 1:
        factor = total_factor(average, scale, 1)
        if accumulate or factor is not None or output.data_ptr() != input.data_ptr():
            sum_in_rank_order(output, (input,), scale=factor, accumulate=accumulate)
        return (), None
    if output.numel() == 0:
        return (), None
    pg: Any = group if group is not None else torch_dist.group.WORLD
    facts.bytes_sent += output.numel() * input.element_size() * (facts.size - 1)
    channel = channel_of(facts, input, "reduce_scatter", what, input.nbytes)
    if channel is not None:
        code = reduction_code(input.dtype, output.dtype, 0, accumulate)
        factor = total_factor(average, scale, facts.size)
        if code is not None and (factor is None or input.is_floating_point()):
            return (channel.reduce_scatter(output, input, code, factor),), None
    if facts.sums_locally(input.device):
        return _exchange_and_sum(pg, facts, output, input, total_factor(average, scale, facts.size), accumulate)
    return _native_reduce_scatter(pg, facts, output, input, average, scale, accumulate)


def all_gather(
    output: torch.Tensor,
    input: torch.Tensor,
    group: Group | None,
    *,
    what: What = "",
    async_op: bool = False,
    key: int = 0,
) -> Pending:
    """Concatenate the ranks' `input` into `output`.

    Args:
        output: 1D, contiguous, N*k elements.
        input: 1D, contiguous, k elements, the dtype of `output`; may be this rank's slice of `output` (no copy then).
        key: see `reduce_scatter`.
    """
    facts = facts_of(group)
    check_shard("all_gather", input, output, facts.size)
    if output.dtype is not input.dtype:
        raise ValueError(f"all_gather: output is {output.dtype}, input is {input.dtype}; they must be equal")
    if facts.size > 1 and input.numel():
        announce(facts, "all_gather", what, output.nbytes, call_mark(output.nbytes, key))
    works = start_all_gather(output, input, group, facts, what)
    return launch(works, None, facts, "all_gather", what, output, async_op) if works else DONE


def start_all_gather(
    output: torch.Tensor, input: torch.Tensor, group: Group | None, facts: GroupFacts, what: What = ""
) -> tuple[Any, ...]:
    """The backend's works of an all-gather whose arguments have been checked; empty when nothing has to travel."""
    numel = input.numel()
    if facts.size > 1 and numel:
        channel = channel_of(facts, input, "all_gather", what, output.nbytes)
        if channel is not None:
            facts.bytes_sent += input.nbytes * (facts.size - 1)
            return (channel.all_gather(output, input),)
    own = output[facts.rank * numel : (facts.rank + 1) * numel]
    native = facts.size > 1 and (facts.size > BROADCAST_GATHER_MAX_RANKS or not facts.sums_locally(input.device))
    if not native and own.data_ptr() != input.data_ptr():
        own.copy_(input)
    if facts.size == 1 or numel == 0:
        return ()
    pg: Any = group if group is not None else torch_dist.group.WORLD
    facts.bytes_sent += input.nbytes * (facts.size - 1)
    return (pg._allgather_base(output, input),) if native else gather_pieces(pg, facts, output.split(numel))


def broadcast(
    tensor: torch.Tensor,
    src_rank_in_group: int,
    group: Group | None,
    *,
    what: What = "",
    async_op: bool = False,
    key: int = 0,
) -> Pending:
    """Copy `tensor` of the rank `src_rank_in_group` (counted inside the group) to all ranks, in place."""
    facts = facts_of(group)
    if not 0 <= src_rank_in_group < facts.size:
        raise ValueError(f"broadcast: source rank {src_rank_in_group} is not in a group of {facts.size} ranks")
    if facts.size == 1 or tensor.numel() == 0:
        return DONE
    pg: Any = group if group is not None else torch_dist.group.WORLD
    announce(facts, "broadcast", what, tensor.nbytes, call_mark(tensor.nbytes, key) + src_rank_in_group)
    channel = channel_of(facts, tensor, "broadcast", what, tensor.nbytes)
    if channel is not None:
        work: Any = channel.broadcast(tensor, src_rank_in_group)
    else:
        work = pg.broadcast(tensor, src_rank_in_group)
    facts.bytes_sent += tensor.nbytes * (facts.size - 1) // facts.size
    return launch((work,), None, facts, "broadcast", what, tensor, async_op)


def all_to_all(
    output: torch.Tensor,
    input: torch.Tensor,
    group: Group | None,
    *,
    output_splits: list[int] | None = None,
    input_splits: list[int] | None = None,
    what: What = "",
    async_op: bool = False,
) -> Pending:
    """Send piece j of `input` to rank j; piece i of `output` comes from rank i. Splits count rows of dim 0."""
    facts = facts_of(group)
    if facts.size == 1:
        output.copy_(input)
        return DONE
    pg: Any = group if group is not None else torch_dist.group.WORLD
    announce(facts, "all_to_all", what, input.nbytes, 0)  # sizes may differ between ranks
    work = start_all_to_all(pg, facts, output, input, output_splits, input_splits, what)
    facts.bytes_sent += input.nbytes * (facts.size - 1) // facts.size
    return launch((work,), None, facts, "all_to_all", what, input, async_op)


def barrier(group: Group | None = None, *, what: What = "") -> None:
    """Wait until every rank of the group is here."""
    facts = facts_of(group)
    if facts.size == 1:
        return
    announce(facts, "barrier", what, 0, 0)
    Pending((start_barrier(group, facts, what),), None, facts, "barrier", what, 0, barrier_mode(group, facts)).wait()


def barrier_mode(group: Group | None, facts: GroupFacts) -> WaitMode:
    """How to wait for a barrier, which belongs to no tensor's device."""
    pg: Any = group if group is not None else torch_dist.group.WORLD
    blocks = all(facts.blocks_host(device) for device in pg._device_types)
    return WaitMode.SLICES if blocks else WaitMode.STREAM


def release_buffers(group: Group | None = None) -> int:
    """Free the idle staging buffers of a group; returns the bytes freed."""
    return facts_of(group).release_buffers()


def _exchange_and_sum(
    pg: Any, facts: GroupFacts, output: torch.Tensor, input: torch.Tensor, factor: float | None, accumulate: bool
) -> tuple[tuple[Any, ...], Callable[[], None] | None]:
    """Send every rank its slice, to be summed in `wait`."""
    numel = input.numel() // facts.size
    rank = facts.rank
    if facts.size == 2:
        # Only the other half travels: nothing of our own is copied.
        other = 1 - rank
        staging = facts.take_buffer(numel, input.dtype, input.device)
        theirs = staging[:numel]
        splits = facts.peer_splits(numel)
        work = pg.alltoall_base(theirs, input[other * numel : (other + 1) * numel], splits, splits)
        own = input[rank * numel : (rank + 1) * numel]
        parts = [own, theirs] if rank == 0 else [theirs, own]
    else:
        staging = facts.take_buffer(input.numel(), input.dtype, input.device)
        work = pg.alltoall_base(staging[: input.numel()], input, [], [])
        parts = [staging[r * numel : (r + 1) * numel] for r in range(facts.size)]
    return (work,), LocalSum(output, parts, factor, accumulate, facts, staging)


def _native_reduce_scatter(
    pg: Any,
    facts: GroupFacts,
    output: torch.Tensor,
    input: torch.Tensor,
    average: bool,
    scale: float | None,
    accumulate: bool,
) -> tuple[tuple[Any, ...], Callable[[], None] | None]:
    """One call of the backend, into `output` itself where dtype and factors allow it."""
    options: Any = torch_dist.ReduceScatterOptions()
    factor = scale
    if average and facts.knows_average(input.device):
        options.reduceOp = torch_dist.ReduceOp.AVG
    else:
        options.reduceOp = torch_dist.ReduceOp.SUM
        factor = total_factor(average, scale, facts.size)
    if output.dtype is input.dtype and not accumulate:
        work = pg._reduce_scatter_base(output, input, options)
        return (work,), None if factor is None else Scale(output, factor)
    shard = facts.take_buffer(output.numel(), input.dtype, input.device)
    work = pg._reduce_scatter_base(shard[: output.numel()], input, options)
    return (work,), LandShard(output, shard, factor, accumulate, facts)


def gather_pieces(pg: Any, facts: GroupFacts, pieces: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Fill `pieces` on all ranks where rank r holds piece r, in place: the works, for backends with host tensors."""
    if facts.size == 2:
        mine, theirs = pieces[facts.rank], pieces[1 - facts.rank]
        splits = facts.peer_splits(mine.numel())
        return (pg.alltoall_base(theirs, mine, splits, splits),)
    return tuple(pg.broadcast(piece, rank) for rank, piece in enumerate(pieces))


def _all_reduce_in_rank_order(
    tensor: torch.Tensor, group: Group | None, facts: GroupFacts, op: str, what: What, async_op: bool, key: int
) -> Pending:
    """Reduce-scatter and all-gather of a tensor of any length, in place; the gather starts in `wait`."""
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(f"all_reduce: deterministic needs a flat contiguous tensor, found shape {tuple(tensor.shape)}")
    size, rank, numel = facts.size, facts.rank, tensor.numel()
    chunk = -(-numel // size)
    flat, padded = tensor, None
    if chunk * size != numel:
        # The pad is reduced too and thrown away: at most N-1 elements, at the price of a copy of an odd-sized tensor.
        padded = facts.take_buffer(chunk * size, tensor.dtype, tensor.device)
        flat = padded[: chunk * size]
        flat[:numel].copy_(tensor)
        flat[numel:].zero_()
    own = flat[rank * chunk : (rank + 1) * chunk]
    first = reduce_scatter(own, flat, group, average=op == "avg", what=what, async_op=True, key=key)

    def finish() -> None:
        first.wait()
        all_gather(flat, own, group, what=what, key=key)
        if padded is not None:
            tensor.copy_(flat[:numel])
            facts.give_buffer(padded)

    return launch((), finish, facts, "all_reduce", what, tensor, async_op)


def call_mark(nbytes: int, key: int) -> int:
    """What has to be equal on all ranks, as one number (the multiplier spreads keys over the bits of sizes)."""
    return nbytes ^ (key * 0x9E3779B1 & 0xFFFFFFFF)


def total_factor(average: bool, scale: float | None, size: int) -> float | None:
    """The one factor on a sum over `size` ranks; None for 1."""
    if average and size > 1:
        return (scale if scale is not None else 1.0) / size
    return None if scale == 1.0 else scale


def check_shard(name: str, shard: torch.Tensor, full: torch.Tensor, size: int) -> None:
    """Raise ValueError unless `full` is flat and contiguous and holds `size` times the elements of `shard`."""
    if full.numel() != shard.numel() * size or shard.dim() != 1 or full.dim() != 1:
        raise ValueError(
            f"{name}: the full tensor must be flat with {size} (ranks) x {shard.numel()} (elements of the shard) "
            f"= {shard.numel() * size} elements; found shapes {tuple(full.shape)} and {tuple(shard.shape)}"
        )
    if not (full.is_contiguous() and shard.is_contiguous()):
        raise ValueError(f"{name}: both tensors must be contiguous")
