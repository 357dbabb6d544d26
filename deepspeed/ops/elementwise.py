"""Run an elementwise update over many tensors of any layout and mix of dtypes.

Owns: which tensors a kernel may touch directly, and the staging of all others. Does not own: the arithmetic.
Invariant: a kernel sees lists of contiguous tensors of one dtype. Tensors that are not so (a strided parameter, a bf16
parameter with fp32 moments, a gradient of another dtype) are copied to fp32 scratch of bounded size, updated and
copied back, which changes no number of an elementwise kernel except by the one rounding to their own dtype.

Fused kernels of torch for CPUs walk raw memory: handed a transposed parameter and a contiguous gradient they pair wrong
elements without an error. That is why layout is checked here and not left to the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

# Elements of scratch per tensor of a row: 4 MiB of fp32, well inside a core's share of cache and of any memory budget.
SCRATCH_NUMEL = 1 << 20

# A row is one parameter with its gradient and states: [param, grad, *states], all of one shape.
Row = list[torch.Tensor]
# A kernel gets the columns of several rows: [params, grads, *states], and updates params and states in place.
Kernel = Callable[[list[list[torch.Tensor]]], None]


def is_direct(row: Sequence[torch.Tensor], native: Sequence[torch.dtype]) -> bool:
    """Whether a kernel for the dtypes `native` may work on these tensors in place."""
    dtype = row[0].dtype
    return dtype in native and all(t.dtype == dtype and t.is_contiguous() for t in row)


def run_direct(kernel: Kernel, rows: list[Row]) -> None:
    """Call the kernel once for all rows, which passed `is_direct` and share dtype and device."""
    if rows:
        kernel([list(column) for column in zip(*rows, strict=True)])


def run_staged(kernel: Kernel, row: Row, *, chunk_numel: int = SCRATCH_NUMEL) -> None:
    """Update one row through fp32 copies (fp64 if a tensor of the row is fp64), `chunk_numel` elements at a time."""
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in row) else torch.float32
    flats = [_flat_view(t) for t in row]
    # A strided tensor has no flat view; it is copied out and back as a whole, the price of an unusual layout.
    sources = [t.contiguous().view(-1) if flat is None else flat for t, flat in zip(row, flats, strict=True)]
    numel = row[0].numel()
    for start in range(0, numel, chunk_numel):
        pieces = [s[start : start + chunk_numel] for s in sources]
        staged = [p if p.dtype == dtype else p.to(dtype) for p in pieces]
        kernel([[t] for t in staged])
        for i, (piece, work) in enumerate(zip(pieces, staged, strict=True)):
            if i != 1 and work is not piece:
                piece.copy_(work)
    for i, (tensor, flat, source) in enumerate(zip(row, flats, sources, strict=True)):
        if i != 1 and flat is None:
            tensor.copy_(source.view(tensor.shape))


def slices(rows: list[Row], limit_numel: int = SCRATCH_NUMEL) -> list[list[Row]]:
    """Cut rows of contiguous tensors into batches of at most `limit_numel` elements, splitting long rows.

    For kernels that allocate temporaries as large as what they are given.
    """
    batches: list[list[Row]] = []
    batch: list[Row] = []
    room = limit_numel
    for row in rows:
        numel = row[0].numel()
        if numel <= room:
            batch.append(row)
            room -= numel
            continue
        flat = [t.view(-1) for t in row]
        start = 0
        while start < numel:
            if room == 0:
                batches.append(batch)
                batch, room = [], limit_numel
            take = min(room, numel - start)
            batch.append([t[start : start + take] for t in flat])
            start += take
            room -= take
    if batch:
        batches.append(batch)
    return batches


def _flat_view(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor.view(-1) if tensor.is_contiguous() else None
