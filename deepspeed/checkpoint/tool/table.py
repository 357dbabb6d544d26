"""Tables of text, for tools whose answer should be there at once.

Owns: alignment, and that text of a checkpoint cannot move the cursor. Does not own: what is shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["print_table", "shown"]


def shown(text: str) -> str:
    """``text`` with escapes in place of characters that are not to be seen."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print ``rows`` under ``header``, columns as wide as their widest cell."""
    cells = [[shown(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
