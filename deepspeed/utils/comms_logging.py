"""`CommsLogger`: count, size and time of each kind of collective, as a table.

Owns: the records and what is computed from them. Does not own: who records (`deepspeed.comm.logging`) and any group
except for the one exchange that finds late ranks.
Units: bytes, milliseconds, gigabits per second.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as torch_dist

from deepspeed.utils.logging import logger

__all__ = ["SHARDED_OPS", "CommsLogger", "calc_bw_log", "convert_size", "get_caller_func", "print_rank_0"]

# Calls of one kind whose times are compared between ranks; older ones only count in the sums.
_COMPARED_CALLS = 1000

_EXCHANGE_OPS = ("all_to_all", "all_to_all_single")
# Operations whose message is one rank's piece of the whole tensor.
SHARDED_OPS = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_coalesced",
    "all_gather_object",
    "reduce_scatter",
    "reduce_scatter_tensor",
)


def get_caller_func(frame: int = 3) -> str:
    """Name of the function `frame` calls up the stack."""
    return sys._getframe(frame).f_code.co_name


def print_rank_0(message: str) -> None:
    """Print on rank 0, or always when torch.distributed is not running."""
    if not torch_dist.is_initialized() or torch_dist.get_rank() == 0:
        print(message)


def convert_size(size_bytes: float) -> str:
    """Bytes as text: `0B`, `1.46 KB`, `953.67 MB` (steps of 1024)."""
    if size_bytes == 0:
        return "0B"
    units = ("B", "KB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB")
    step = min(int(math.log(size_bytes, 1024)), len(units) - 1) if size_bytes >= 1 else 0
    return f"{round(size_bytes / 1024**step, 2)} {units[step]}"


def calc_bw_log(comm_op: str, size: float, duration: float, world_size: int | None = None) -> tuple[float, float]:
    """(algorithm bandwidth, bus bandwidth) in Gb/s of a collective of `size` bytes that took `duration` ms.

    The formulas are those of the nccl-tests' performance notes: an all-reduce moves twice its size, an all-gather and
    a reduce-scatter N times the size of a shard, and the bus sees (N-1)/N of it.
    """
    if world_size is None:
        world_size = torch_dist.get_world_size() if torch_dist.is_initialized() else 1
    if duration <= 0:
        return 0.0, 0.0
    share = (world_size - 1) / world_size
    moved: float = size
    if comm_op in SHARDED_OPS:
        moved = size * world_size
    elif comm_op in ("all_reduce", "all_reduce_coalesced", "inference_all_reduce"):
        moved = size * 2
    elif comm_op not in _EXCHANGE_OPS:
        share = 1.0
    algorithm = moved * 8 / (duration / 1000) / 1e9
    return algorithm, algorithm * share


class CommsLogger:
    """Records of collectives: `comms_dict[name][bytes] = [count, [ms], [Gb/s], [bus Gb/s]]`."""

    def __init__(self) -> None:
        self.comms_dict: dict[str, dict[int, list[Any]]] = {}
        self.enabled = False
        self.prof_all = True
        self.prof_ops: list[str] = []
        self.verbose = False
        self.debug = False

    def configure(self, comms_config: Any) -> None:
        """Take the settings of a `DeepSpeedCommsConfig`, or of its `comms_logger` section alone."""
        section = getattr(comms_config, "comms_logger", comms_config)
        self.enabled = bool(getattr(comms_config, "comms_logger_enabled", True)) and bool(section.enabled)
        self.prof_all = section.prof_all
        self.prof_ops = list(section.prof_ops)
        self.verbose = section.verbose
        self.debug = section.debug

    def start_profiling_comms(self) -> None:
        """Record every operation from now on."""
        self.prof_all = True

    def stop_profiling_comms(self) -> None:
        """Record only the operations of `prof_ops` from now on."""
        self.prof_all = False

    def start_profiling_op(self, op_name_list: Sequence[str]) -> None:
        """Record these operations too."""
        self.prof_ops = sorted({*self.prof_ops, *op_name_list})

    def stop_profiling_op(self, op_name_list: Sequence[str]) -> None:
        """Do not record these operations any more (without effect while everything is recorded)."""
        self.prof_ops = [op for op in self.prof_ops if op not in op_name_list]

    def wants(self, name: str, prof: bool = False) -> bool:
        """Whether an operation of this name is to be recorded; `prof` asks for it whatever the settings."""
        return self.enabled and (prof or self.prof_all or name in self.prof_ops)

    def append(
        self, raw_name: str, record_name: str, latency: float, msg_size: int, world_size: int | None = None
    ) -> None:
        """Add one call: `raw_name` chooses the bandwidth formula, `record_name` is the row; latency in ms."""
        algorithm, bus = calc_bw_log(raw_name, msg_size, latency, world_size)
        record = self.comms_dict.setdefault(record_name, {}).setdefault(msg_size, [0, [], [], []])
        record[0] += 1
        for values, value in zip(record[1:], (latency, algorithm, bus), strict=True):
            values.append(value)
        if self.verbose:
            rank = torch_dist.get_rank() if torch_dist.is_initialized() else 0
            logger.warning(
                f"comm op: {record_name} | time (ms): {latency:.2f} | msg size: {convert_size(msg_size)} | "
                f"algbw (Gbps): {algorithm:.2f} | busbw (Gbps): {bus:.2f} | rank: {rank}"
            )

    def has_data(self) -> bool:
        """Whether anything has been recorded."""
        return bool(self.comms_dict)

    def reset_data(self) -> None:
        """Forget all records."""
        self.comms_dict.clear()

    def get_raw_data(self) -> dict[str, dict[int, list[Any]]]:
        """A copy of the records."""
        return {
            name: {size: [record[0], *map(list, record[1:])] for size, record in sizes.items()}
            for name, sizes in self.comms_dict.items()
        }

    def get_operation_names(self) -> list[str]:
        """Names of the recorded rows."""
        return list(self.comms_dict)

    def get_total_operations(self) -> int:
        """Number of recorded calls."""
        return sum(record[0] for sizes in self.comms_dict.values() for record in sizes.values())

    def get_operation_summary(self, operation_name: str) -> dict[int, dict[str, Any]]:
        """Bytes -> count, sums and means of one row; empty for an unknown name."""
        return {size: _summary(size, record) for size, record in self.comms_dict.get(operation_name, {}).items()}

    def log_all(
        self, print_log: bool = True, show_straggler: bool = False, return_dict: bool = False
    ) -> dict[str, Any] | None:
        """Print the table on rank 0 and/or return it.

        With `show_straggler` every rank of the default group must call: the ranks exchange their times. The time a
        call took here beyond the shortest of all ranks was spent waiting for the last rank to arrive, so the rank with
        the shortest times is the late one.
        """
        result = self._as_dict()
        if show_straggler:
            result["straggler_analysis"] = self._compare_ranks()
        if print_log and result["metadata"]["rank"] == 0:
            print("\n".join(_table_lines(result)))
        return result if return_dict else None

    def _as_dict(self) -> dict[str, Any]:
        running = torch_dist.is_initialized()
        return {
            "metadata": {
                "rank": torch_dist.get_rank() if running else 0,
                "world_size": torch_dist.get_world_size() if running else 1,
                "timestamp": time.strftime("%Y-%m-%dT%H:%M:%S"),
            },
            "summary": {name: self.get_operation_summary(name) for name in self.comms_dict},
        }

    def _compare_ranks(self) -> dict[str, dict[int, dict[str, Any]]]:
        mine = {
            (name, size): record[1][-_COMPARED_CALLS:]
            for name, sizes in self.comms_dict.items()
            for size, record in sizes.items()
        }
        size = torch_dist.get_world_size() if torch_dist.is_initialized() else 1
        everyone: list[Any] = [mine]
        if size > 1:
            everyone = [None] * size
            # Objects, not tensors: they travel on any backend, and ranks may have recorded different calls.
            torch_dist.all_gather_object(everyone, mine)
        analysis: dict[str, dict[int, dict[str, Any]]] = {}
        for (name, nbytes), times in mine.items():
            theirs = {rank: records[name, nbytes] for rank, records in enumerate(everyone) if (name, nbytes) in records}
            calls = min(len(values) for values in theirs.values())
            shortest = [min(values[-calls:][i] for values in theirs.values()) for i in range(calls)]
            waited = sum(times[-calls:]) - sum(shortest)
            late = min(theirs, key=lambda rank: (sum(theirs[rank][-calls:]), rank))
            mean_wait = (sum(sum(values[-calls:]) for values in theirs.values()) / len(theirs) - sum(shortest)) / calls
            total = sum(times[-calls:])
            analysis.setdefault(name, {})[nbytes] = {
                "count": calls,
                "total_comm_lat_ms": total - waited,
                "total_straggler_ms": waited,
                "avg_comm_lat_ms": (total - waited) / calls,
                "avg_straggler_ms": waited / calls,
                "late_rank": late,
                "mean_wait_of_all_ranks_ms": mean_wait,
                "msg_size_bytes": nbytes,
                "msg_size_str": convert_size(nbytes),
            }
        return analysis


def _summary(size: int, record: list[Any]) -> dict[str, Any]:
    count, times, algorithm, bus = record
    return {
        "count": count,
        "total_latency_ms": sum(times),
        "avg_latency_ms": sum(times) / count,
        "tput_avg_gbps": sum(algorithm) / count,
        "busbw_avg_gbps": sum(bus) / count,
        "msg_size_bytes": size,
        "msg_size_str": convert_size(size),
    }


def _table_lines(result: dict[str, Any]) -> list[str]:
    heads: tuple[str, ...]
    keys: tuple[str, ...]
    heads = ("Message Size", "Count", "Total Latency(ms)", "Avg Latency(ms)", "tput_avg (Gbps)", "busbw_avg (Gbps)")
    keys = ("total_latency_ms", "avg_latency_ms", "tput_avg_gbps", "busbw_avg_gbps")
    lines = _block(heads, keys, result["summary"])
    if "straggler_analysis" in result:
        title = "Breakdown with straggler effect (time spent waiting for the last rank)"
        heads = (
            "Message Size",
            "Count",
            "Total comm lat(ms)",
            "Total straggler(ms)",
            "Avg comm lat(ms)",
            "Avg straggler(ms)",
            "Late rank",
        )
        keys = ("total_comm_lat_ms", "total_straggler_ms", "avg_comm_lat_ms", "avg_straggler_ms", "late_rank")
        lines += [title, "-" * len(title), *_block(heads, keys, result["straggler_analysis"])]
    return lines


def _block(heads: Sequence[str], keys: Sequence[str], rows: dict[str, dict[int, dict[str, Any]]]) -> list[str]:
    lines = ["".join(f"{head:<20}" for head in ("Comm. Op", *heads)).rstrip()]
    for name, sizes in rows.items():
        lines.append(name)
        for size in sorted(sizes):
            cells = [sizes[size]["msg_size_str"], str(sizes[size]["count"])]
            for key in keys:
                value = sizes[size][key]
                cells.append(f"{value:.2f}" if isinstance(value, float) else str(value))
            lines.append(" " * 20 + "".join(f"{cell:<20}" for cell in cells).rstrip())
    return lines
