"""The start-up table: what this run is, in one place, once, on rank 0.

``describe(engine)`` gives the facts as plain data (``engine.summary()``), ``table`` their text form.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from deepspeed import comm as dist
from deepspeed.utils.logging import logger

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

_KINDS = ("parameter", "gradient", "master", "optimizer")


def describe(engine: DeepSpeedEngine) -> dict[str, Any]:
    """Facts of the run. Bytes are per rank: ``expected`` by the stage's formula, ``measured`` the most seen so far."""
    precision, optimizer = engine.precision, engine.zero_optimizer
    params = list(engine.module.parameters())
    facts: dict[str, Any] = {
        "batch": {
            "train_batch_size": engine.train_batch_size(),
            "micro_batch_per_gpu": engine.train_micro_batch_size_per_gpu(),
            "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
            "data_parallel_size": engine.mesh.size("dp"),
        },
        "stage": engine.zero_optimization_stage(),
        "parallel": {axis: engine.mesh.size(axis) for axis in ("dp", "tp", "pp", "sp")},
        "parameters": {
            "total": sum(param.numel() for param in params),
            "trainable": sum(param.numel() for param in params if param.requires_grad),
        },
        "dtypes": {"weights": _names({param.dtype for param in params} or {precision.model})},
        "kept_fp32": list(engine.cast_report.get("kept", [])),
        "buffers_cast": list(engine.cast_report.get("buffers_cast", [])),
        "autocast": str(precision.autocast) if precision.autocast else None,
    }
    if optimizer is None:
        return facts
    groups = optimizer.groups
    aliased = all(group.aliased for group in groups)
    facts["optimizer"] = type(optimizer.optimizer).__name__
    facts["dtypes"] |= {
        "master": _names({group.master_dtype for group in groups}) + (" (the weights themselves)" if aliased else ""),
        "gradients": _names({group.accum_dtype for group in groups}),
        "reduction": _names({group.comm_dtype for group in groups}),
    }
    facts["model_state_bytes"] = {
        "expected": optimizer.expected_state_bytes(),
        "measured": dict(optimizer.peak_bytes) or None,
    }
    facts["gradient_clipping"] = optimizer.clip_grad
    facts["loss_scale"] = optimizer.loss_scale if optimizer.needs_scaler() else None
    return facts


def table(facts: dict[str, Any]) -> str:
    """``facts`` as aligned lines."""
    batch = facts["batch"]
    rows = [
        (
            "batch",
            f"{batch['train_batch_size']} = {batch['micro_batch_per_gpu']} micro x "
            f"{batch['gradient_accumulation_steps']} accumulation x {batch['data_parallel_size']} data-parallel",
        ),
        ("ZeRO stage", str(facts["stage"])),
        ("parallel", ", ".join(f"{axis} {size}" for axis, size in facts["parallel"].items())),
        ("parameters", f"{facts['parameters']['total']:,} ({facts['parameters']['trainable']:,} trainable)"),
        ("dtypes", ", ".join(f"{kind} {dtype}" for kind, dtype in facts["dtypes"].items())),
    ]
    if facts["autocast"]:
        rows.append(("autocast", facts["autocast"]))
    if facts["kept_fp32"]:
        rows.append(("kept fp32", _shorten(facts["kept_fp32"])))
    if facts["buffers_cast"]:
        rows.append(("buffers cast", _shorten(facts["buffers_cast"])))
    if "optimizer" in facts:
        rows.append(("optimizer", f"{facts['optimizer']}, clipping {facts['gradient_clipping'] or 'off'}"))
        if facts["loss_scale"]:
            rows.append(("loss scale", f"{facts['loss_scale']:g}"))
        for which in ("expected", "measured"):
            sizes = facts["model_state_bytes"][which]
            if sizes:
                parts = ", ".join(f"{kind} {size_text(sizes[kind])}" for kind in _KINDS)
                total = size_text(sum(sizes[kind] for kind in _KINDS))
                away = "".join(f"; {kind} {size_text(sizes[kind])}" for kind in ("host", "disk") if kind in sizes)
                rows.append((f"bytes/rank {which}", f"{total} = {parts}{away}"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows)


def size_text(nbytes: int) -> str:
    """``nbytes`` in MB of 10^6 bytes; in KB where that would be below 1."""
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 1e6 or not nbytes else f"{nbytes / 1e3:.1f} KB"


def announce(engine: DeepSpeedEngine) -> None:
    """Print the table on rank 0, unless ``DS_START_TABLE=0`` or the log level is above warning."""
    wanted = os.environ.get("DS_START_TABLE", "1") != "0" and logger.getEffectiveLevel() <= logging.WARNING
    if wanted and dist.get_rank() == 0:
        print("deepspeed run\n" + table(describe(engine)), flush=True)


def _names(dtypes: set[Any]) -> str:
    return "+".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def _shorten(names: list[str], limit: int = 4) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
