"""Text as bytes: finds it, caches it in one file, cuts training batches from it.

Owns: which files are read and in which order, the cache file, the train / held-out split, the batch of a given step.
Does not own: the model, devices, ranks (the caller says which share of a batch it wants).
Invariant: `batch(...)` is a pure function of (text, seed, step, share). Nothing is consumed: a resumed run needs only
the number of its next step to see exactly the data it would have seen, and the global batch is the same for any number
of ranks.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

TEXT_SUFFIXES = frozenset({".py", ".txt", ".rst", ".md", ".c", ".cpp", ".h", ".html", ".json", ".toml", ".tex", ".csv"})
# Of the standard library: tests and character tables are long lists of numbers, not text worth learning.
SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}
)
HELD_OUT_FRACTION = 0.05
MAX_BYTES = 16 * 2**20  # more than the quickstart can read; keeps the cache small


@dataclass(frozen=True)
class Corpus:
    """Training and held-out text, memory-mapped, uint8, 1D. `source` says where it came from, for the report."""

    train: np.ndarray
    held_out: np.ndarray
    source: str

    def batch(
        self, step: int, size: int, context: int, *, share: int = 0, shares: int = 1, seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Tokens and next-byte targets of one step, int64 (size, context) each.

        The global batch of a step has size * shares windows at random places; share number `share` of it is returned.
        """
        if not 0 <= share < shares:
            raise ValueError(f"share {share} is outside 0..{shares - 1}")
        generator = np.random.default_rng((seed, step))
        starts = generator.integers(0, len(self.train) - context, size=size * shares)
        return _windows(self.train, starts[share * size : (share + 1) * size], context)

    def held_out_batches(self, count: int, size: int, context: int) -> list[tuple[Tensor, Tensor]]:
        """`count` fixed batches spread evenly over the held-out text, shaped like `batch`."""
        starts = np.linspace(0, len(self.held_out) - context - 1, count * size).astype(np.int64)
        return [_windows(self.held_out, starts[i * size : (i + 1) * size], context) for i in range(count)]


def _windows(text: np.ndarray, starts: np.ndarray, context: int) -> tuple[Tensor, Tensor]:
    rows = torch.from_numpy(np.stack([text[start : start + context + 1] for start in starts]).astype(np.int64))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def standard_library() -> Path:
    """Folder of the running Python's standard library: some thousand files of real source and documentation text."""
    return Path(sysconfig.get_paths()["stdlib"])


def text_files(source: Path) -> list[Path]:
    """Text files of a folder in a fixed, mixed order (by hash of the relative name), or the one file given."""
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise FileNotFoundError(f"--data {source}: no such file or folder")
    found = []
    for folder, subfolders, names in os.walk(source):
        subfolders[:] = sorted(name for name in subfolders if name not in SKIPPED_FOLDERS and not name.startswith("."))
        found += [Path(folder, name) for name in names if Path(name).suffix.lower() in TEXT_SUFFIXES]
    if not found:
        looked_for = ", ".join(sorted(TEXT_SUFFIXES))
        raise FileNotFoundError(f"--data {source}: no text file below it (looked for {looked_for})")
    return sorted(found, key=lambda path: hashlib.sha256(path.relative_to(source).as_posix().encode()).digest())


def load_corpus(source: Path | None, cache_folder: Path, *, min_bytes: int = 4096) -> Corpus:
    """Read `source` (default: the standard library) once, keep its bytes in `cache_folder`, map them into memory.

    Any number of processes may call this at once: each writes a temporary file of its own and renames it, and all of
    them write the same bytes.
    """
    source = (source or standard_library()).resolve()
    files = text_files(source)
    key = hashlib.sha256()
    for path in files:
        facts = path.stat()
        key.update(f"{path}\0{facts.st_size}\0{facts.st_mtime_ns}\n".encode())
    cache = cache_folder / f"corpus-{key.hexdigest()[:16]}.bin"
    if not cache.exists():
        _write_cache(files, cache)
    text = np.memmap(cache, dtype=np.uint8, mode="r") if cache.stat().st_size else np.empty(0, np.uint8)
    held_out = int(len(text) * HELD_OUT_FRACTION)
    if len(text) < min_bytes:
        raise ValueError(f"--data {source}: {len(text)} bytes of text, but at least {min_bytes} are needed")
    return Corpus(text[:-held_out], text[-held_out:], f"{source} ({len(files)} files, {len(text) / 1e6:.1f} MB)")


def _write_cache(files: list[Path], cache: Path) -> None:
    cache.parent.mkdir(parents=True, exist_ok=True)
    temporary = cache.with_name(f"{cache.name}.{os.getpid()}")
    left = MAX_BYTES
    with temporary.open("wb") as out:
        for path in files:
            if left <= 0:
                break
            left -= out.write(path.read_bytes()[:left])
    temporary.replace(cache)
