"""Documentation that is wrong fails here: snippets run, links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness.project import ROOT
from tests.harness.snippets import find_snippets, ranks_of, run_page

PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
_LINK = re.compile(r"\[[^\]]*\]\((?!https?://|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)")


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ +(.+?)\s*$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_snippets_run(pool, page: Path) -> None:
    text = page.read_text()
    runnable = [s for s in find_snippets(text) if s.language in ("python", "json")]
    expected = len([s for s in runnable if not s.options.startswith("no-run")])
    assert pool.run(ranks_of(text), run_page, str(page), create_group=False) == [expected] * ranks_of(text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target, anchor in _LINK.findall(page.read_text()):
        path = (page.parent / target).resolve() if target else page
        if not path.exists():
            broken.append(f"{target}: no such file")
        elif anchor and path.suffix == ".md" and anchor not in _anchors(path):
            broken.append(f"{target}#{anchor}: no such heading")
    assert broken == []


def test_a_page_says_how_many_ranks_its_snippets_need() -> None:
    assert ranks_of("# Page\n\n<!-- snippets on 2 ranks -->\n") == 2
    assert ranks_of("# Page\n\nnot this: `<!-- snippets on 2 ranks -->`\n") == 1


def test_snippet_finder() -> None:
    page = "text\n```python\na = 1\n```\n\n- item\n  ```json config\n  {}\n  ```\n```\nplain\n```\n"
    found = find_snippets(page)
    assert [(s.language, s.options, s.text, s.line) for s in found] == [
        ("python", "", "a = 1", 2),
        ("json", "config", "{}", 7),
        ("", "", "plain", 10),
    ]
