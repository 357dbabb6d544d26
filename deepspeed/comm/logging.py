"""The log of collectives: switched on by the config, fed by every wait, read by `log_summary`.

Owns: the one `comms_logger` of the process and how waits reach it. Does not own: the table
(`deepspeed.utils.comms_logging`). While the log is off, a collective pays one comparison with None.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

from deepspeed.accelerator.real_accelerator import get_accelerator
from deepspeed.comm import pending
from deepspeed.comm.pending import Pending, WaitMode
from deepspeed.utils.comms_logging import SHARDED_OPS, CommsLogger

__all__ = [
    "comms_logger",
    "configure",
    "get_comm_operation_count",
    "get_logged_comm_ops",
    "has_comm_data",
    "log_summary",
    "reset_log",
]

_PACKAGE = __name__.rpartition(".")[0]

comms_logger = CommsLogger()


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Sequence[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Set up the log from a config's `comms_logger` section and/or from arguments; arguments win."""
    if deepspeed_config is not None:
        section = getattr(deepspeed_config, "comms_config", None)
        if section is None:
            section = getattr(deepspeed_config, "comms_logger", None)
        if section is not None:
            comms_logger.configure(section)
    if enabled is not None:
        comms_logger.enabled = enabled
    if prof_all is not None:
        comms_logger.prof_all = prof_all
    if prof_ops is not None:
        comms_logger.prof_ops = list(prof_ops)
    if verbose is not None:
        comms_logger.verbose = verbose
    if debug is not None:
        comms_logger.debug = debug
    pending.observer = _record if comms_logger.enabled else None


def _record(call: Pending) -> None:
    """Called by `Pending.wait` when the result is in place."""
    if not comms_logger.wants(call.name, getattr(call, "log_always", False)):
        return
    if call.mode is WaitMode.STREAM:
        get_accelerator().synchronize()  # the device may still be at it
    elapsed_ms = (time.perf_counter() - call.started) * 1000
    row: str = getattr(call, "log_name", call.name)
    if comms_logger.debug:
        row = f"{row} | [Caller Func: {_caller()}]"
    # The table's convention: the size of an all-gather or reduce-scatter is that of one rank's piece.
    nbytes = call.nbytes // call.facts.size if call.name in SHARDED_OPS else call.nbytes
    comms_logger.append(call.name, row, elapsed_ms, nbytes, call.facts.size)


def _caller() -> str:
    """Name of the function outside this package that started or awaited the collective."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_PACKAGE):
        frame = frame.f_back
    return "?" if frame is None else frame.f_code.co_name


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any]:
    """Print the table of recorded collectives on rank 0 and return it.

    Args:
        show_straggler: compare the ranks and name the late one; every rank must call.
        return_dict: accepted for older callers; the table is always returned.

    Returns:
        {"metadata": ..., "summary": {name: {bytes: {count, total_latency_ms, avg_latency_ms, ...}}}} and, with
        `show_straggler`, "straggler_analysis" of the same shape with the time spent waiting and the late rank.
    """
    observer, pending.observer = pending.observer, None  # the exchange of the times is not part of them
    try:
        result = comms_logger.log_all(print_log=True, show_straggler=show_straggler, return_dict=True)
    finally:
        pending.observer = observer
    assert result is not None
    return result


def has_comm_data() -> bool:
    """Whether any collective has been recorded."""
    return comms_logger.has_data()


def reset_log() -> None:
    """Forget what has been recorded."""
    comms_logger.reset_data()


def get_comm_operation_count() -> int:
    """Number of recorded collectives."""
    return comms_logger.get_total_operations()


def get_logged_comm_ops() -> list[str]:
    """Names of the recorded collectives."""
    return comms_logger.get_operation_names()
