"""``ColumnCut``: the elements of chosen columns in a fragment of a weight, packed and put back.

A weight of shape ``(rows, ...)`` is a matrix of ``rows`` by ``numel / rows``; its columns are what ZenFlow chooses
among. A fragment is a run of the flat weight, so it holds the end of a row, whole rows, and the beginning of one:

    fragment   | . . 2 3 | 0 1 2 3 | 0 1 2 3 | 0 . . . |     4 columns, 0 and 2 are chosen
    packed     | 2 | 0 2 | 0 2 | 0 |

Owns: this arithmetic, and the sums of squares of columns. Does not own: which columns are chosen (``selection.py``).
Invariant: ``scatter`` puts every element where ``gather`` took it from, and touches no other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepspeed.runtime.zero.layout import round_up

# Packed runs are whole cache lines, so that kernels treat each of their elements as a part of a vector: what they do
# with the last elements of a run has other roundings, and an element's bits must not depend on where it is packed.
PACKED_ALIGN = 16
_CHUNK = 1 << 20  # elements whose squares are held in fp64 at a time


class ColumnCut:
    """The chosen columns of elements ``start .. start + numel`` of a weight with ``columns`` columns.

    ``chosen``: numbers of columns, ascending; None: all of them, in which case packing is copying.
    """

    def __init__(self, start: int, numel: int, columns: int, chosen: Sequence[int] | None) -> None:
        self.start, self.fragment_numel, self.columns = start, numel, columns
        self.chosen = None if chosen is None else list(chosen)
        self._indices: dict[torch.device, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self.head, self.rows, self.tail = _shape(start, numel, columns)
        if self.chosen is None:
            self.numel = numel
            return
        first = start % columns
        self._head = [column - first for column in self.chosen if first <= column < first + self.head]
        self._tail = [column for column in self.chosen if column < self.tail]
        self.numel = len(self._head) + self.rows * len(self.chosen) + len(self._tail)

    @property
    def packed_numel(self) -> int:
        """Elements of a packed run with what fills its last cache line. All columns are packed as they lie."""
        return self.numel if self.chosen is None else round_up(self.numel, PACKED_ALIGN)

    def gather(self, fragment: torch.Tensor, packed: torch.Tensor) -> None:
        """Pack the chosen elements of ``fragment`` (its elements, any shape) into ``packed`` (at least ``numel``)."""
        flat = fragment.reshape(-1)
        if self.chosen is None:
            packed.view(-1)[: self.numel].copy_(flat)
            return
        for part, axis, index, into in self._parts(flat, packed):
            if part.dtype == into.dtype and part.device == into.device:
                torch.index_select(part, axis, index, out=into)
            else:
                into.copy_(part.index_select(axis, index))

    def scatter(self, packed: torch.Tensor, fragment: torch.Tensor) -> None:
        """Put packed elements back, cast and moved to where ``fragment`` (contiguous) lies."""
        flat = fragment.view(-1)
        if self.chosen is None:
            flat.copy_(packed.view(-1)[: self.numel])
            return
        near = packed.to(device=flat.device, dtype=flat.dtype)
        for part, axis, index, value in self._parts(flat, near):
            part.index_copy_(axis, index, value)

    def _parts(
        self, flat: torch.Tensor, packed: torch.Tensor
    ) -> list[tuple[torch.Tensor, int, torch.Tensor, torch.Tensor]]:
        """``(elements of the fragment, axis, columns, their packed elements)`` of head, rows and tail."""
        assert self.chosen is not None
        head, body, tail = self._on(flat.device)
        packed = packed.view(-1)
        count, middle = len(self._head), self.rows * len(self.chosen)
        parts = []
        if count:
            parts.append((flat[: self.head], 0, head, packed[:count]))
        if middle:
            matrix = flat.narrow(0, self.head, self.rows * self.columns).view(self.rows, self.columns)
            parts.append((matrix, 1, body, packed.narrow(0, count, middle).view(self.rows, -1)))
        if self._tail:
            end = self.fragment_numel - self.tail
            parts.append((flat[end:], 0, tail, packed.narrow(0, count + middle, len(self._tail))))
        return parts

    def _on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        found = self._indices.get(device)
        if found is None:
            assert self.chosen is not None
            lists = (self._head, self.chosen, self._tail)
            head, body, tail = (torch.tensor(values, dtype=torch.int64, device=device) for values in lists)
            found = self._indices[device] = (head, body, tail)
        return found


def column_count(shape: Sequence[int]) -> int:
    """Columns of a weight of this shape; 1 for what has none to choose among (vectors, numbers, nothing).

    The first axis is that of the rows; all others together are the columns.
    """
    if len(shape) < 2:
        return 1
    count = 1
    for size in shape[1:]:
        count *= size
    return max(count, 1)


def add_squares(total: torch.Tensor, fragment: torch.Tensor, start: int) -> None:
    """Add the squares of ``fragment`` (elements from ``start`` of the weight, any float dtype) to its columns' sums.

    total: 1D fp64, one element per column, on the device of ``fragment``. The square of an fp32 number is exact there.
    """
    flat, columns = fragment.reshape(-1), total.numel()
    head, rows, tail = _shape(start, flat.numel(), columns)
    if head:
        first = start % columns
        total[first : first + head] += flat[:head].double().square()
    step = max(1, _CHUNK // columns)
    matrix = flat.narrow(0, head, rows * columns).view(rows, columns)
    for row in range(0, rows, step):
        total += matrix[row : row + step].double().square_().sum(0)
    if tail:
        total[:tail] += flat[flat.numel() - tail :].double().square()


def _shape(start: int, numel: int, columns: int) -> tuple[int, int, int]:
    """Elements of the row that began before, whole rows, elements of the row that ends later."""
    begun = start % columns
    head = min(numel, columns - begun) if begun else 0
    rows, tail = divmod(numel - head, columns)
    return head, rows, tail
