"""Command lines of the form ``program [options] script [everything else]``.

Owns: finding where the program's own options end, so that everything after the script reaches it byte for byte.
argparse alone cannot promise that: its REMAINDER swallows a ``--`` of the user's arguments. Does not own which options
there are (runner.py, launch.py and launcher_helper.py list theirs).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from deepspeed.launcher.console import LEVELS


@dataclass(frozen=True)
class Option:
    """One option: its spellings and what argparse wants to know about it."""

    flags: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def takes_value(self) -> bool:
        return self.settings.get("action") is None


def value(*flags: str, **settings: Any) -> Option:
    """An option with a value; text unless ``type`` says otherwise."""
    settings.setdefault("type", str)
    return Option(flags, settings)


def switch(*flags: str, **settings: Any) -> Option:
    """An option that is on when given."""
    return Option(flags, {"action": "store_true", **settings})


LOG_OPTIONS = (
    value("--log_level", choices=LEVELS, default="info", help="how much the launcher itself says"),
    switch("-q", "--quiet", help="the same as --log_level error"),
)


@dataclass(frozen=True)
class CommandLine:
    """Grammar of one program. ``script`` and ``arguments`` name the attributes of the parsed result."""

    program: str | None
    options: tuple[Option, ...]
    script: str
    arguments: str
    description: str
    epilog: str = ""

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Return the options, the script and, untouched, what follows it. Exits with argparse's text on a mistake."""
        options, rest = self._split(list(argv))
        # "--" in front of the script keeps argparse from reading a script named like an option.
        parser = self._parser()
        parsed, unknown = parser.parse_known_args([*options, *(["--", rest[0]] if rest else [])])
        if unknown:
            parser.error(
                f"unrecognized arguments: {' '.join(unknown)}; the options of the script go behind it: "
                f"{self.program or parser.prog} [options] {self.script.upper()} {unknown[0].partition('=')[0]} ..."
            )
        setattr(parsed, self.arguments, rest[1:])
        if getattr(parsed, "quiet", False):
            parsed.log_level = "error"
        return parsed

    def _parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            prog=self.program,
            description=self.description,
            epilog=self.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for option in self.options:
            parser.add_argument(*option.flags, **option.settings)
        parser.add_argument(self.script, help="script, module (--module) or program (--no_python) to start")
        parser.add_argument(self.arguments, nargs=argparse.REMAINDER, help="passed on to it unchanged")
        return parser

    def _split(self, argv: list[str]) -> tuple[list[str], list[str]]:
        """Cut ``argv`` before the script. A value is joined to its option with ``=``, so it may begin with a dash."""
        options: list[str] = []
        index = 0
        while index < len(argv):
            word = argv[index]
            if word == "--":
                index += 1
                break
            if not word.startswith("-") or word == "-":
                break
            index += 1
            if self._wants_value(word) and index < len(argv):
                if word.startswith("--"):
                    options.append(f"{word}={argv[index]}")
                else:
                    options += [word, argv[index]]
                index += 1
            else:
                options.append(word)
        return options, argv[index:]

    def _wants_value(self, word: str) -> bool:
        """Whether the next word belongs to ``word``. Unique beginnings of long options count, as in argparse."""
        if "=" in word:
            return False
        by_flag = {flag: option for option in self.options for flag in option.flags}
        if word in by_flag:
            return by_flag[word].takes_value
        if not word.startswith("--"):
            return False  # "-Hfile" carries its value, anything else is for argparse to refuse
        matches = {id(option): option for flag, option in by_flag.items() if flag.startswith(word)}
        return len(matches) == 1 and next(iter(matches.values())).takes_value
