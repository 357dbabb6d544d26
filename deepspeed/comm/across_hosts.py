"""`HostsChannel`: the collectives of a group that has several ranks on each of its hosts.

Shared memory inside a host, gloo between the ranks at one place of every host, each with a slice of its own, so that
all ranks send and receive and every byte crosses once. Of H hosts with L ranks each, M bytes in the full tensor:

    reduce-scatter   shared memory adds up, per host, the slices of the ranks at each place; peers exchange and add
    all-gather       peers exchange their pieces; shared memory spreads them over the host
    all-reduce       shared memory adds up a slice for each place; peers exchange and add; shared memory gathers
    broadcast        the source's host cuts a large tensor in L slices, each crosses at its place and is gathered there
    the rest         all-to-alls, where every pair has bytes of its own, and small broadcasts: by gloo alone
    bytes that leave a host: M(H-1)/H (reduce-scatter, all-gather), twice that (all-reduce); plain gloo sends L times as
    many in a reduce-scatter.

Order of sums: the ranks of a host in rank order, then the hosts in the order of their ranks: (r0 + r1) + (r2 + r3).
All of it in fp32 (fp64 for fp64), also on the wire, and rounded once; every rank, bucket and size gets the same bits.

Owns: which hops make a collective. Does not own: the single hops (`shm_channel.py`, gloo), the queue (`relay.py`), and
which groups have such a channel (`same_host.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from deepspeed.comm.rank_sum import sum_in_rank_order
from deepspeed.comm.relay import Hops, Relay, RelayWork
from deepspeed.comm.shm_channel import Channel, reduction_code

__all__ = ["ONE_ON_EACH", "HostLayout", "HostsChannel", "layout_of"]

# Nothing to gain, and nothing to talk about.
ONE_ON_EACH = "its ranks are on several hosts, one on each"

# Up to this many bytes one exchange of the whole is faster than a slice for each rank and a gather.
SMALL_BYTES = 64 << 10
# Of what crosses at a time, for each rank, in an all-reduce.
CHUNK_BYTES = 2 << 20
# Below this, gloo's own broadcast is as fast.
LEAST_BROADCAST_BYTES = 4 << 20
# Up to this many hosts each peer's piece is a broadcast into its place; above, gloo's ring and a copy.
_MOST_BROADCASTS = 8
_SUM, _ACCUMULATE = 0, 1 << 12  # of a reduction's code
_COMBINE: tuple[Callable[..., torch.Tensor], ...] = (
    torch.add, torch.mul, torch.minimum, torch.maximum, torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor,
)  # fmt: skip


class HostLayout(NamedTuple):
    """Where a rank of a group is: its host of `hosts`, its place among the `local` ranks there."""

    hosts: int
    local: int
    host: int
    place: int


def layout_of(identities: Sequence[bytes], rank: int) -> HostLayout | str:
    """The layout of a group whose ranks say this of their hosts, or why they cannot share a channel, in words."""
    counts: dict[bytes, int] = {}
    for identity in identities:
        counts[identity] = counts.get(identity, 0) + 1
    sizes = set(counts.values())
    local = max(sizes)
    if local == 1:
        return ONE_ON_EACH
    if len(sizes) > 1:
        return f"its ranks are on several hosts, {' and '.join(map(str, sorted(sizes)))} on one"
    if any(identity != identities[place // local * local] for place, identity in enumerate(identities)):
        return "its ranks are on several hosts and not in their order"
    return HostLayout(len(counts), local, rank // local, rank % local)


class HostsChannel:
    """See the module. Methods are those of `Channel`, without all-to-alls; tensors are contiguous and on the host."""

    __slots__ = ("__weakref__", "_buffers", "_group", "_peers", "_relay", "layout", "local")

    def __init__(self, layout: HostLayout, local: Channel, peers: Any, group: Any, timeout_s: float) -> None:
        """`local`: of this host's ranks; `peers`: gloo's group of this place, by host; `group`: gloo's, of all."""
        self.layout = layout
        self.local = local
        self._peers = peers
        self._group = weakref.ref(group)
        self._relay = Relay(timeout_s, local.abandon)
        self._buffers: dict[torch.dtype, list[torch.Tensor]] = {}

    # ---- the collectives -------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, code: int, factor: float | None = None) -> RelayWork:
        """See `Channel.all_reduce`."""
        return self._relay.start(self._all_reduce(tensor.view(-1), code, factor), (tensor,))

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, code: int, factor: float | None = None
    ) -> RelayWork:
        """See `Channel.reduce_scatter`."""
        hops = self._reduce_scatter(output.view(-1), input.view(-1), code, factor)
        return self._relay.start(hops, (output,))

    def all_gather(self, output: torch.Tensor, input: torch.Tensor, stride_bytes: int | None = None) -> RelayWork:
        """See `Channel.all_gather`."""
        ranks, numel = self.layout.hosts * self.layout.local, input.numel()
        apart = numel if stride_bytes is None else stride_bytes // input.element_size()
        rows = output.as_strided((ranks, numel), (apart, 1))
        return self._relay.start(self._all_gather(rows, input.view(-1)), (output,))

    def broadcast(self, tensor: torch.Tensor, root: int) -> Any:
        """See `Channel.broadcast`; a small tensor by gloo."""
        if tensor.nbytes < LEAST_BROADCAST_BYTES:
            group: Any = self._group()
            return group.broadcast(_bytes(tensor), root)
        return self._relay.start(self._broadcast(_bytes(tensor), root), (tensor,))

    def barrier(self) -> RelayWork:
        """See `Channel.barrier`."""
        return self._relay.start(self._barrier(), ())

    # ---- their hops ------------------------------------------------------------------------------------------------

    def _all_reduce(self, flat: torch.Tensor, code: int, factor: float | None) -> Hops:
        """In chunks: while one crosses, shared memory adds up the next and gathers the one before."""
        hosts, local, _, place = self.layout
        fold, wide = code >> 8 & 15, _wide(flat.dtype, flat.dtype)
        numel = flat.numel()
        if numel == 0:
            return
        share = 0 if numel * wide.itemsize <= SMALL_BYTES else numel // (local * hosts) * hosts  # of each place
        rest = flat[share * local :]  # what is left over goes with the last chunk, whole
        most = max(CHUNK_BYTES // wide.itemsize // hosts * hosts, hosts)
        sizes = [min(most, share - at) for at in range(0, share, most)] or [0]
        # Between two hosts one exchange of the whole costs no more bytes than a piece each way, twice; with 16-bit
        # tensors it does.
        whole = (hosts == 2 and flat.dtype is wide) or share * wide.itemsize <= SMALL_BYTES
        begin, gathering = 0, tuple[Any, ...]()
        part, works = self._add_inside(flat[: sizes[0] * local], rest if len(sizes) == 1 else rest[:0], fold, wide)
        yield works
        for number, size in enumerate(sizes):
            chunk, tail = flat[begin : begin + size * local], rest if number + 1 == len(sizes) else rest[:0]
            begin += size * local
            mine, crosses = chunk[place * size : (place + 1) * size], part if whole else part[size:]
            crossing, parts = self._start_exchange(crosses)
            pieces = None if whole else self._take(size, wide)
            if pieces is not None:
                crossing += (self._peers.alltoall_base(_bytes(pieces), _bytes(part[:size]), [], []),)
            held, works = part, ()
            if tail is not rest:
                ends = number + 2 == len(sizes)
                near = flat[begin : begin + sizes[number + 1] * local]
                part, works = self._add_inside(near, rest if ends else rest[:0], fold, wide)
            yield (*gathering, *works, *crossing)
            if pieces is not None:
                yield self._sum_and_gather(pieces, mine, fold, factor)
                self._give(pieces)
            else:
                _fold(mine, [one[:size] for one in parts], fold, factor)
            _fold(tail, [one[size if whole else 0 :] for one in parts], fold, factor)
            self._give(held, *parts)
            gathering = (self.local.all_gather(chunk, mine),) if size else ()
        yield gathering

    def _add_inside(
        self, chunk: torch.Tensor, rest: torch.Tensor, fold: int, wide: torch.dtype
    ) -> tuple[torch.Tensor, tuple[Any, ...]]:
        """(what will be this host's sums: of this place's share of the chunk, then of the rest; the works)."""
        share = chunk.numel() // self.layout.local
        part = self._take(share + rest.numel(), wide)
        works = []
        if share:
            works.append(self.local.reduce_scatter(part[:share], chunk, _code(chunk.dtype, wide, fold)))
        if rest.numel():
            left = part[share:].copy_(rest)
            works.append(self.local.all_reduce(left, _code(wide, wide, fold)))
        return part, tuple(works)

    def _sum_and_gather(
        self, received: torch.Tensor, mine: torch.Tensor, fold: int, factor: float | None
    ) -> tuple[Any, ...]:
        """Add up the piece that each peer has of this place's share, and hand it around."""
        pieces = mine.view(self.layout.hosts, -1)
        _fold(pieces[self.layout.host], list(received.view(self.layout.hosts, -1)), fold, factor)
        return self._gather_peers(list(pieces))

    def _reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, code: int, factor: float | None) -> Hops:
        hosts, local, host, _ = self.layout
        fold, wide = code >> 8 & 15, _wide(input.dtype, output.dtype)
        inside, numel = _code(input.dtype, wide, fold), output.numel()
        if numel == 0:
            return
        part = self._take(hosts * numel, wide)
        slices = part.view(hosts, numel)
        nodes = input.view(hosts, local * numel)
        if hosts == 2:  # what crosses is added up first, and crosses beside the rest
            yield (self.local.reduce_scatter(slices[1 - host], nodes[1 - host], inside),)
            theirs = self._take(numel, wide)
            crossing = self._swap(theirs, slices[1 - host])
            yield self.local.reduce_scatter(slices[host], nodes[host], inside), crossing
            parts = [slices[0], theirs] if host == 0 else [theirs, slices[1]]
        else:
            yield tuple(self.local.reduce_scatter(slices[one], nodes[one], inside) for one in range(hosts))
            theirs = self._take(hosts * numel, wide)
            yield (self._peers.alltoall_base(_bytes(theirs), _bytes(part), [], []),)
            parts = list(theirs.view(hosts, numel))
        _fold(output, parts, fold, factor, accumulate=bool(code & _ACCUMULATE))
        self._give(part, theirs)

    def _all_gather(self, rows: torch.Tensor, piece: torch.Tensor) -> Hops:
        hosts, local, host, place = self.layout
        if piece.numel() == 0:
            return
        own = rows[host * local + place]
        if own.data_ptr() != piece.data_ptr():
            own.copy_(piece)
        crossing = self._gather_peers([rows[one * local + place] for one in range(hosts)])
        yield self._spread(rows, host), *crossing
        yield tuple(self._spread(rows, one) for one in range(hosts) if one != host)

    def _spread(self, rows: torch.Tensor, host: int) -> Any:
        """The pieces of that host's ranks, of which each rank here holds that of its place."""
        first, place = host * self.layout.local, self.layout.place
        stride = rows.stride(0) * rows.element_size()
        return self.local.all_gather(rows[first:], rows[first + place], stride)

    def _broadcast(self, flat: torch.Tensor, root: int) -> Hops:
        _, local, host, place = self.layout
        root_host, root_place = divmod(root, local)
        if host == root_host:
            yield (self.local.broadcast(flat, root_place),)
        numel = flat.numel() // local
        mine, rest = flat[place * numel : (place + 1) * numel], flat[numel * local :]
        yield tuple(self._peers.broadcast(one, root_host) for one in (mine, rest) if one.numel())
        if host != root_host:
            yield (self.local.all_gather(flat[: numel * local], mine),)

    def _barrier(self) -> Hops:
        yield (self.local.barrier(),)
        yield (self._peers.barrier(),)

    # ---- between hosts ---------------------------------------------------------------------------------------------

    def _start_exchange(self, part: torch.Tensor) -> tuple[tuple[Any, ...], list[torch.Tensor]]:
        """(works, what will be all peers' `part`, by host); with two hosts one of them is `part` itself."""
        hosts, _, host, _ = self.layout
        if part.numel() == 0:
            return (), [part] * hosts
        if hosts == 2:
            theirs = self._take(part.numel(), part.dtype)
            return (self._swap(theirs, part),), [part, theirs] if host == 0 else [theirs, part]
        all_parts = self._take(hosts * part.numel(), part.dtype)
        work = self._peers._allgather_base(_bytes(all_parts), _bytes(part))
        return (work,), list(all_parts.view(hosts, -1))

    def _swap(self, theirs: torch.Tensor, mine: torch.Tensor) -> Any:
        """Of two hosts: the other's for ours."""
        splits = [mine.nbytes, 0] if self.layout.host == 1 else [0, mine.nbytes]
        return self._peers.alltoall_base(_bytes(theirs), _bytes(mine), splits, splits)

    def _gather_peers(self, pieces: list[torch.Tensor]) -> tuple[Any, ...]:
        """Fill `pieces`, one for each host, of which this rank holds its own."""
        hosts, _, host, _ = self.layout
        if hosts == 2:
            return (self._swap(pieces[1 - host], pieces[host]),)
        if hosts <= _MOST_BROADCASTS:
            return tuple(self._peers.broadcast(_bytes(piece), one) for one, piece in enumerate(pieces))
        every = [_bytes(piece) for piece in pieces]
        return (self._peers.allgather([every], [every[host]]),)

    # ---- memory, end -----------------------------------------------------------------------------------------------

    def _take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat buffer, kept for later calls. The operations take and give in their order, one at a time."""
        kept = self._buffers.get(dtype)
        buffer = kept.pop() if kept else None
        if buffer is None or buffer.numel() < numel:
            with torch.inference_mode(False):
                buffer = torch.empty(numel, dtype=dtype)
        return buffer[:numel]

    def _give(self, *parts: torch.Tensor) -> None:
        for part in {part.untyped_storage().data_ptr(): part for part in parts if part.numel()}.values():
            whole = part.untyped_storage().nbytes() // part.element_size()
            self._buffers.setdefault(part.dtype, []).append(part.as_strided((whole,), (1,), 0))

    def release_buffers(self) -> int:
        """Free the idle buffers; returns their bytes."""
        buffers, self._buffers = self._buffers, {}
        return sum(buffer.nbytes for kept in buffers.values() for buffer in kept)

    def background(self) -> None:
        """Let what has been started go on while the program computes."""
        self._relay.background()

    def close(self) -> None:
        """Leave both levels. Idempotent."""
        self._relay.close("connection closed: this process has left the group")
        self.local.close()
        self._peers, self._buffers = None, {}

    def forget(self) -> None:
        """In a forked child: it has no part in the group."""
        self._relay.forget("connection closed: this process was forked from one that is in the group")
        self.local.forget()


def _code(source: torch.dtype, result: torch.dtype, fold: int) -> int:
    code = reduction_code(source, result, fold, False)
    assert code is not None, (source, result, fold)
    return code


def _wide(source: torch.dtype, result: torch.dtype) -> torch.dtype:
    """What is added up in, and crosses."""
    if not source.is_floating_point:
        return source
    return torch.float64 if torch.float64 in (source, result) else torch.float32


def _fold(
    output: torch.Tensor, parts: list[torch.Tensor], fold: int, factor: float | None, *, accumulate: bool = False
) -> None:
    """The hosts' parts, in their order, into `output`, which may be one of them."""
    if not output.numel():
        return
    if fold == _SUM and output.is_floating_point():
        sum_in_rank_order(output, parts, scale=factor, accumulate=accumulate)
        return
    total = parts[0]
    for part in parts[1:]:
        total = _COMBINE[fold](total, part)
    output.copy_(total)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Its memory; gloo does not know every dtype."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)  # of one element the stride may be any
