"""Runs the code blocks of Markdown pages.

Owns: finding blocks and executing them inside a pool worker.
Conventions: a fence `python` is executed, in page order, in one namespace per page, in an empty folder, as rank 0 of
1, or on each of N ranks where the page says `<!-- snippets on N ranks -->`. A fence `python no-run: REASON` is only
compiled. A fence `json` must parse; with `json config` it must also be accepted by `DeepSpeedConfig`.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```\s*$", re.MULTILINE | re.DOTALL)
_RANKS = re.compile(r"^<!-- snippets on (\d+) ranks -->$", re.MULTILINE)


@dataclass(frozen=True)
class Snippet:
    """One fenced block: its language, the words after it, its text and the line of its fence."""

    language: str
    options: str
    text: str
    line: int


def find_snippets(markdown: str) -> list[Snippet]:
    """Fenced blocks of a page in order."""
    found = []
    for match in _FENCE.finditer(markdown):
        language, _, options = match["info"].strip().partition(" ")
        indent = len(match["indent"])
        text = "\n".join(line[indent:] for line in match["body"].splitlines())
        found.append(Snippet(language, options.strip(), text, markdown.count("\n", 0, match.start()) + 1))
    return found


def ranks_of(markdown: str) -> int:
    """How many ranks a page's blocks run on."""
    said = _RANKS.search(markdown)
    return int(said[1]) if said else 1


def run_page(path: str) -> int:
    """Check every block of the page at `path`; returns how many were executed. Body for a pool run."""
    executed, namespace, home = 0, {"__name__": "__snippet__"}, os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for snippet in find_snippets(Path(path).read_text()):
                executed += _check(snippet, path, namespace)
        finally:
            os.chdir(home)
    return executed


def _check(snippet: Snippet, path: str, namespace: dict[str, object]) -> int:
    if snippet.language == "json":
        parsed = json.loads(snippet.text)
        if snippet.options == "config":
            from deepspeed.runtime.config import DeepSpeedConfig

            DeepSpeedConfig(parsed)
        return 1
    if snippet.language != "python":
        return 0
    # Blank lines in front make line numbers in a traceback those of the page.
    code = compile("\n" * snippet.line + snippet.text, path, "exec")
    if snippet.options.startswith("no-run"):
        if not snippet.options.removeprefix("no-run").lstrip(": "):
            raise ValueError(f"{path}:{snippet.line}: a block that is not run must say why (python no-run: REASON)")
        return 0
    exec(code, namespace)
    return 1
