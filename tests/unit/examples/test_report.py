"""The quickstart's report: picture, tables, fallbacks."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest


def memory() -> list[Any]:
    from checks import StageMemory

    gathered = (0, 0, 0, 20)
    return [StageMemory(i, 160 - 50 * i, 161 - 50 * i, gathered[i], trained=i == 3) for i in range(4)]


def printed(thing: Any) -> str:
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=160).print(thing)
    return out.getvalue()


def test_picture_is_a_png_of_some_size(tmp_path: Path) -> None:
    from report import draw

    pytest.importorskip("matplotlib")
    path = draw([5.5, 4.0, 3.0, 2.5], 2.6, memory(), tmp_path / "new" / "report.png")
    assert path is not None
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def test_no_picture_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from report import draw

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert draw([5.5], 5.0, memory(), tmp_path / "report.png") is None


def test_memory_table_shows_formula_beside_measurement() -> None:
    from checks import StageMemory
    from report import memory_table

    text = printed(memory_table([StageMemory(2, 2**20, 2**20 + 2**19, 0, True)]))
    for shown in ("1.0 MiB", "1.5 MiB", "1.50", "this training run"):
        assert shown in text
    assert "ratio below" not in text
    assert "offloaded" not in text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    (
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (23 << 20, "23.0 MiB"),
        (5 << 29, "2.5 GiB"),
        (3000 << 30, "3,000.0 GiB"),
    ),
)
def test_sizes_have_the_unit_that_shows_them(quickstart: Path, nbytes: int, text: str) -> None:
    from report import sized

    assert sized(nbytes) == text


def test_what_lies_elsewhere_is_shown_and_a_low_ratio_explained() -> None:
    from checks import StageMemory
    from report import memory_table

    rows = [StageMemory(1, 6 << 20, 5 << 20, 0, False), StageMemory(3, 0, 0, 2048, True, 700 << 10)]
    text = printed(memory_table(rows))
    for shown in ("0.83", "ratio below 1: whole gradients", "700.0 KiB", "2.0 KiB", "0 B", "which formula"):
        assert shown in text
    assert "0.8333" not in text
    assert "0.0 MiB" not in text


def test_gathered_weights_are_shown_beside_the_formula_not_in_it() -> None:
    from checks import StageMemory
    from report import memory_table

    text = printed(memory_table([StageMemory(3, 2**20, 2**20, 3 * 2**20, False)]))
    for shown in ("1.00", "3.0 MiB", "a fresh model"):
        assert shown in text


def test_resume_table_compares_every_bit() -> None:
    from checks import ResumeCheck
    from report import resume_table

    same = ResumeCheck([2.5, 2.25], [2.5, 2.25], Path("x"))
    assert same.identical
    assert "identical to the last bit" in printed(resume_table(same))
    assert "0x1.4p+1" in printed(resume_table(same))
    other = ResumeCheck([2.5], [2.5 + 2**-51], Path("x"))
    assert not other.identical
    assert not other.passed
    alone = ResumeCheck([2.5], [2.5], Path("x"), alone=[2.5 + 2**-20], tolerance=1e-4)
    assert alone.passed
    assert "on 1 rank: within 9.5e-07" in printed(resume_table(alone))
    assert not ResumeCheck([2.5], [2.5], Path("x"), alone=[2.6], tolerance=1e-4).passed
    assert "DIFFERENT" in printed(resume_table(other))


def test_smoothing_and_sparkline() -> None:
    from report import smoothed, sparkline

    assert smoothed([1.0, 2.0, 3.0, 4.0], window=2) == [1.0, 1.5, 2.5, 3.5]
    assert sparkline([0.0, 3.5, 7.0]) == "▁▅█"
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([]) == ""
    assert len(sparkline([float(i) for i in range(1000)], width=50)) == 50
