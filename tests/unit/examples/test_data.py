"""The quickstart's data: the same bytes for every process, step and number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = tmp_path / "text"
    for i in range(40):
        path = source / f"part{i % 3}" / f"file{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# file {i}\n" * 30)
    (source / "part0" / "binary.so").write_bytes(bytes(1000))
    (source / "tests").mkdir()
    (source / "tests" / "numbers.py").write_text("7" * 5000)
    return source


def corpus_of(source: Path, cache: Path) -> Any:
    from data import load_corpus

    return load_corpus(source, cache)


def test_text_files_alone_in_an_order_that_depends_on_their_names(folder: Path) -> None:
    from data import text_files

    names = [path.relative_to(folder).as_posix() for path in text_files(folder)]
    assert sorted(names) == sorted(f"part{i % 3}/file{i}.py" for i in range(40))
    assert names != sorted(names)
    moved = folder.rename(folder.with_name("elsewhere"))
    assert [path.relative_to(moved).as_posix() for path in text_files(moved)] == names


def test_cache_holds_the_files_bytes_and_is_written_once(folder: Path, tmp_path: Path) -> None:
    from data import text_files

    corpus = corpus_of(folder, tmp_path / "cache")
    whole = np.concatenate([corpus.train, corpus.held_out]).tobytes()
    assert whole == b"".join(path.read_bytes() for path in text_files(folder))
    (cache,) = (tmp_path / "cache").iterdir()
    written = cache.stat().st_mtime_ns
    corpus_of(folder, tmp_path / "cache")
    assert [(path, path.stat().st_mtime_ns) for path in (tmp_path / "cache").iterdir()] == [(cache, written)]
    (folder / "part0" / "more.txt").write_text("more")
    corpus_of(folder, tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_held_out_text_is_a_twentieth_and_apart(folder: Path, tmp_path: Path) -> None:
    corpus = corpus_of(folder, tmp_path)
    total = len(corpus.train) + len(corpus.held_out)
    assert len(corpus.held_out) == total // 20
    held = corpus.held_out_batches(2, 3, 16)
    assert [tuple(part.shape) for batch in held for part in batch] == [(3, 16)] * 4
    assert torch.equal(held[0][0][:, 1:], held[0][1][:, :-1])


def test_targets_are_the_next_bytes(folder: Path, tmp_path: Path) -> None:
    tokens, targets = corpus_of(folder, tmp_path).batch(5, 4, 16)
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.shape == targets.shape == (4, 16)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])


def test_a_batch_depends_on_seed_and_step_alone(folder: Path, tmp_path: Path) -> None:
    first, second = corpus_of(folder, tmp_path), corpus_of(folder, tmp_path / "other")
    assert torch.equal(first.batch(7, 4, 16)[0], second.batch(7, 4, 16)[0])
    assert not torch.equal(first.batch(7, 4, 16)[0], first.batch(8, 4, 16)[0])
    assert not torch.equal(first.batch(7, 4, 16)[0], first.batch(7, 4, 16, seed=1)[0])


def test_the_global_batch_is_the_same_for_any_number_of_ranks(folder: Path, tmp_path: Path) -> None:
    corpus = corpus_of(folder, tmp_path)
    whole = corpus.batch(3, 12, 16)[0]
    for shares in (2, 3, 4):
        parts = [corpus.batch(3, 12 // shares, 16, share=i, shares=shares)[0] for i in range(shares)]
        assert torch.equal(torch.cat(parts), whole)
    with pytest.raises(ValueError, match=r"share 2 is outside 0\.\.1"):
        corpus.batch(0, 1, 16, share=2, shares=2)


def test_one_file_will_do_and_missing_or_empty_sources_are_named(tmp_path: Path) -> None:
    single = tmp_path / "poem.txt"
    single.write_text("a line of text\n" * 500)
    assert corpus_of(single, tmp_path / "cache").train[:6].tobytes() == b"a line"
    with pytest.raises(FileNotFoundError, match="nowhere: no such file or folder"):
        corpus_of(tmp_path / "nowhere", tmp_path / "cache")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(FileNotFoundError, match="no text file below it"):
        corpus_of(empty, tmp_path / "cache")
    (empty / "short.txt").write_text("short")
    with pytest.raises(ValueError, match="5 bytes of text, but at least 4096"):
        corpus_of(empty, tmp_path / "cache")


def test_the_standard_library_is_found_and_large_enough() -> None:
    from data import standard_library, text_files

    files = text_files(standard_library())
    assert any(path.name == "argparse.py" for path in files)
    assert not any("site-packages" in path.parts for path in files)
    assert sum(path.stat().st_size for path in files[:400]) > 2**20
