"""The package's logger and the helpers that pick which ranks speak.

Owns: the logger named ``DeepSpeed``, its format and its level. Does not own: any process group; the rank is read from
``torch.distributed`` when somebody else has set it up, so this module never imports torch (the launcher uses it).

Invariants: importing prints nothing; the default level is WARNING (``DS_LOG_LEVEL`` or the config key ``log_level``
change it); output a user asked for by a call or a config key (`print_dist`) does not pass the level filter.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, TextIO

__all__ = [
    "LoggerFactory",
    "get_current_level",
    "get_dist_msg",
    "get_log_level_from_string",
    "log_dist",
    "log_dist_once",
    "log_levels",
    "logger",
    "print_configuration",
    "print_dist",
    "print_json_dist",
    "set_log_level_from_string",
    "should_log_le",
    "warning_once",
]

log_levels: dict[str, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}

_FORMAT = "[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s"
_LOG_METHODS = ("debug", "info", "warning", "error", "exception", "critical", "log")


class _CurrentStdoutHandler(logging.StreamHandler[TextIO]):
    """Writes to whatever ``sys.stdout`` is at the time of the message, so redirection and capture work."""

    def __init__(self, level: int) -> None:
        logging.Handler.__init__(self, level)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stdout


def _skip_while_compiling(target: logging.Logger, keep: set[str]) -> None:
    """Make the methods of ``target`` (except those in ``keep``) do nothing under ``torch.compile`` tracing.

    A logger call breaks the traced graph; ``torch.compiler.is_compiling()`` is folded to a constant by the tracer.
    """

    def guarded(method: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> None:
            import torch

            if not torch.compiler.is_compiling():
                method(*args, **{**kwargs, "stacklevel": kwargs.get("stacklevel", 1) + 1})

        return call

    for name in _LOG_METHODS:
        if name not in keep:
            setattr(target, name, guarded(getattr(target, name)))


class LoggerFactory:
    """Makes loggers with the package's format."""

    @staticmethod
    def create_logger(name: str | None = None, level: int = logging.WARNING) -> logging.Logger:
        """Return the logger ``name`` set to ``level``, writing to standard output and not to the root logger.

        With ``DISABLE_LOGS_WHILE_COMPILING=1`` in the environment its methods do nothing while ``torch.compile``
        traces, except those named in ``LOGGER_METHODS_TO_EXCLUDE_FROM_DISABLE`` (comma separated).
        """
        if not name:
            raise ValueError("create_logger: `name` is missing; give the logger a non-empty name")
        made = logging.getLogger(name)
        made.setLevel(level)
        made.propagate = False
        if not any(isinstance(handler, _CurrentStdoutHandler) for handler in made.handlers):
            handler = _CurrentStdoutHandler(logging.NOTSET)
            handler.setFormatter(logging.Formatter(_FORMAT))
            made.addHandler(handler)
        if os.environ.get("DISABLE_LOGS_WHILE_COMPILING", "0") == "1":
            keep = os.environ.get("LOGGER_METHODS_TO_EXCLUDE_FROM_DISABLE", "")
            _skip_while_compiling(made, {method.strip() for method in keep.split(",")})
        return made


def get_log_level_from_string(log_level_str: str) -> int:
    """Return the number of a level name (any case); ValueError lists the valid names."""
    level = log_levels.get(log_level_str.lower()) if isinstance(log_level_str, str) else None
    if level is None:
        raise ValueError(f"log level {log_level_str!r} is unknown; use one of {', '.join(log_levels)}")
    return level


def _level_from_environment() -> int:
    text = os.environ.get("DS_LOG_LEVEL")
    if not text:
        return logging.WARNING
    try:
        return get_log_level_from_string(text)
    except ValueError as problem:
        raise ValueError(f"environment variable DS_LOG_LEVEL: {problem}") from None


logger: logging.Logger = LoggerFactory.create_logger("DeepSpeed", _level_from_environment())


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of ``custom_logger`` (default: the package's logger) by name."""
    (custom_logger or logger).setLevel(get_log_level_from_string(log_level_str))


def get_current_level() -> int:
    """Return the effective level number of the package's logger."""
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Tell whether the logger's level is at or below (as talkative as) the level named ``max_log_level_str``."""
    if not isinstance(max_log_level_str, str):
        raise ValueError(f"should_log_le: expected a level name, found {max_log_level_str!r}")
    return get_current_level() <= get_log_level_from_string(max_log_level_str)


def _initialized_distributed() -> ModuleType | None:
    """``torch.distributed`` when it is loaded and its default group exists, else None; never imports it."""
    module = sys.modules.get("torch.distributed")
    if module is not None and module.is_available() and module.is_initialized():
        return module
    return None


def _speaking_rank(ranks: Sequence[int] | None) -> int | None:
    """Rank of this process if it is one of ``ranks``, else None. ``-1`` means "no group yet", which always speaks."""
    distributed = _initialized_distributed()
    if distributed is None:
        return -1
    rank: int = distributed.get_rank()
    # Only a leading -1 means all ranks; no ranks at all means nobody once a group exists.
    return rank if ranks and (ranks[0] == -1 or rank in ranks) else None


def get_dist_msg(message: str, ranks: Sequence[int] | None = None) -> str | None:
    """Return ``message`` marked with this rank if this rank speaks (see `log_dist`), else None."""
    rank = _speaking_rank(ranks)
    return None if rank is None else f"[Rank {rank}] {message}"


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log ``message`` on the listed ranks.

    ``[-1]`` means all ranks. ``None`` or ``[]`` means: only while no process group exists. The level filter of the
    logger applies.
    """
    if logger.isEnabledFor(level):
        marked = get_dist_msg(message, ranks)
        if marked is not None:
            logger.log(level, marked, stacklevel=2)


@functools.cache
def _log_dist_once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """`log_dist`, at most once in this process for the same message, ranks and level."""
    _log_dist_once(message, None if ranks is None else tuple(ranks), level)


@functools.cache
def warning_once(*args: Any, **kwargs: Any) -> None:
    """``logger.warning``, at most once in this process for the same arguments (which must be hashable)."""
    logger.warning(*args, **{"stacklevel": 2, **kwargs})


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """Print ``message`` on the listed ranks (see `log_dist`), whatever the log level: for output that was asked for."""
    marked = get_dist_msg(message, ranks)
    if marked is not None:
        print(marked, flush=True)


def print_json_dist(message: Mapping[str, Any], ranks: Sequence[int] | None = None, path: str | None = None) -> None:
    """Write ``message`` with this rank's number under ``"rank"`` as JSON on the listed ranks.

    To the file ``path`` (replaced) if given, else to standard output as one line.
    """
    rank = _speaking_rank(ranks)
    if rank is None:
        return
    text = json.dumps({**message, "rank": rank})
    if path is None:
        print(text, flush=True)
    else:
        with open(path, "w", encoding="utf-8") as out:
            out.write(text)


def print_configuration(args: object, name: str) -> None:
    """Log each attribute of ``args``, sorted, one a line, under the heading ``name`` (level INFO)."""
    logger.info("%s:", name)
    for key in sorted(vars(args)):
        logger.info("  %s %s %s", key, "." * max(1, 29 - len(key)), getattr(args, key))
