"""Print the largest files and functions of the package: `python scripts/sizes.py [COUNT]`.

A report for readers, not a gate. A file of about 400 lines and a function of about 60 are where reading gets hard.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def functions(path: Path) -> list[tuple[int, str]]:
    """(lines, place) of every function and method in `path`."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            found.append((length, f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"))
    return found


def main() -> None:
    """Write the report to standard output."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    paths = sorted((ROOT / "deepspeed").rglob("*.py"))
    files = [(len(path.read_text().splitlines()), str(path.relative_to(ROOT))) for path in paths]
    print(f"{len(files)} files, {sum(lines for lines, _ in files)} lines")
    for title, rows in (("files", files), ("functions", [row for path in paths for row in functions(path)])):
        print(f"\nlongest {title}")
        for lines, place in sorted(rows, reverse=True)[:count]:
            print(f"{lines:6} {place}")


if __name__ == "__main__":
    main()
