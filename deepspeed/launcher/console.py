"""The launcher's own lines. They go to stderr alone, so the workers' stdout stays exactly what the workers wrote."""

from __future__ import annotations

import sys

LEVELS = ("debug", "info", "warning", "error", "critical")
PREFIX = "[deepspeed] "


class Console:
    """Prints lines of at least ``level``, each in one write so that lines of workers do not cut into them."""

    def __init__(self, level: str = "info") -> None:
        self._threshold = LEVELS.index(level)

    def debug(self, text: str) -> None:
        self._line("debug", text)

    def info(self, text: str) -> None:
        self._line("info", text)

    def warning(self, text: str) -> None:
        self._line("warning", text)

    def error(self, text: str) -> None:
        self._line("error", text)

    def _line(self, level: str, text: str) -> None:
        if LEVELS.index(level) < self._threshold:
            return
        try:
            sys.stderr.write("".join(f"{PREFIX}{line}\n" for line in text.splitlines()))
            sys.stderr.flush()
        except (OSError, ValueError):
            # Nobody reads any more (closed pipe or stream): supervising goes on without words.
            pass
