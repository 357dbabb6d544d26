"""What reading a config has to say besides its values.

Owns `Report`: problems (errors), and lists of one-line notes that the engine prints on rank 0. Invariant: nothing
the user set is dropped or changed without an entry here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from deepspeed.runtime.config_problems import Problem


@dataclass
class Report:
    """Notes gathered while a config is read; paths in `tainted` and `spelling` are canonical (field names)."""

    problems: list[Problem] = field(default_factory=list)
    auto_keys: list[str] = field(default_factory=list)
    """Keys that were "auto" and fell back to their default."""
    deprecations: list[str] = field(default_factory=list)
    """One line per deprecated key, naming its replacement."""
    unknown_keys: list[str] = field(default_factory=list)
    """Keys nothing reads; kept, not used."""
    comments: list[str] = field(default_factory=list)
    """Keys that are remarks of the author, such as "_comment"; nobody is meant to read them."""
    adjustments: list[str] = field(default_factory=list)
    """Harmless conversions: a floored size, a null block."""
    unfilled: list[str] = field(default_factory=list)
    """Keys still "auto" that have no sensible default."""
    tainted: set[str] = field(default_factory=set)
    """Canonical paths whose value is wrong; checks that involve them are not reported again."""
    spelling: dict[str, str] = field(default_factory=dict)
    """Canonical path -> path as the user wrote it, where the two differ."""

    def written(self, path: str) -> str:
        """`path` as the user wrote it: the nearest respelled key above it decides the front part."""
        front, rest = path, ""
        while front:
            if front in self.spelling:
                return self.spelling[front] + rest
            front, dot, last = front.rpartition(".")
            rest = dot + last + rest
        return path

    def add(self, problem: Problem) -> None:
        """Record a problem unless it rests on a value that is already reported."""
        if not any(self.is_tainted(key) for key in problem.keys):
            self.problems.append(problem)

    def taint(self, path: str) -> None:
        """Mark the value at `path` (and all below it) as wrong."""
        self.tainted.add(path)

    def is_tainted(self, path: str) -> bool:
        """Whether `path`, something above it or something below it is wrong."""
        return any(path == bad or path.startswith(bad + ".") or bad.startswith(path + ".") for bad in self.tainted)
