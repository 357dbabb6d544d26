"""``python -m benchmarks [NAME ...]``: run the named benchmarks, or all of them, one after the other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SHARED = {"__main__", "__init__", "peers", "slow_link", "two_hosts"}


def names() -> list[str]:
    return sorted(
        path.stem for path in FOLDER.glob("*.py") if path.stem not in SHARED and not path.stem.endswith("_worker")
    )


def main() -> int:
    chosen = sys.argv[1:] or names()
    unknown = [name for name in chosen if name not in names()]
    if unknown:
        print(f"unknown benchmark: {', '.join(unknown)}; there are: {', '.join(names())}", file=sys.stderr)
        return 2
    failed = []
    for name in chosen:
        print(f"== {name}", flush=True)
        if subprocess.run([sys.executable, str(FOLDER / f"{name}.py")]).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
