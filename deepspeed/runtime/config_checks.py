"""Rules between sections: combinations that cannot work.

Owns every rule that needs more than one section. Rules inside one section stand in its class; settings that are
harmless but change nothing are found in `config_effects.py`. Invariant: each line names all keys involved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from deepspeed.runtime.config_problems import Problem, near_miss, nearest, show
from deepspeed.runtime.optimizer_config import (
    BUILT_IN_TITLES,
    DEEPSPEED_OPTIMIZERS,
    SCHEDULER_PARAMS,
    SCHEDULER_REQUIRED,
    TORCH_OPTIMIZERS,
    optimizer_params,
    other_name,
)

if TYPE_CHECKING:
    from deepspeed.runtime.config_schema import ConfigSections
    from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig


def cross_problems(sections: ConfigSections) -> Iterator[Problem]:
    """All contradictions between sections."""
    for rule in (_precision, _gradient_scaling, _zero, _zenflow, _expert_parallel, _optimizer, _scheduler):
        yield from rule(sections)


def _clash(*keys: str, found: str, expected: str, change: str = "") -> Problem:
    return Problem(keys[0], f"found {found}; expected {expected}", change, keys=keys)


def _with_section(section: str, *keys: str, found: str, expected: str) -> Problem:
    """`section` is there, and `keys` are not as it needs them. It says so whatever is wrong inside of the section."""
    return Problem(section, f"found a section {found}; expected {expected}", keys=keys)


def _precision(s: ConfigSections) -> Iterator[Problem]:
    if s.fp16.enabled and s.bf16.enabled:
        yield _clash(
            "fp16.enabled",
            "bf16.enabled",
            found="true with bf16.enabled true",
            expected="one of them",
            change="set fp16.enabled or bf16.enabled to false",
        )
    if s.amp is not None and s.amp.enabled:
        for key, on in (
            ("fp16.enabled", s.fp16.enabled),
            ("bf16.enabled", s.bf16.enabled),
            ("zero_optimization.stage", s.zero_optimization.stage > 0),
        ):
            if on:
                yield _clash("amp.enabled", key, found=f"true with {key} on", expected="one of them")
    if s.bf16.bf16_optimizer_states and not s.bf16.bf16_master_weights_and_grads:
        yield _clash(
            "bf16.bf16_optimizer_states",
            "bf16.bf16_master_weights_and_grads",
            found="true with bf16.bf16_master_weights_and_grads false",
            expected="bf16.bf16_master_weights_and_grads true",
            change="set bf16.bf16_master_weights_and_grads to true",
        )
    implied = "fp16" if s.fp16.enabled else "bf16" if s.bf16.enabled else "fp32"
    wanted = s.data_types.param_dtype
    if wanted is not None and wanted != implied:
        yield _clash(
            "data_types.param_dtype",
            "fp16.enabled",
            "bf16.enabled",
            found=f"{wanted} with fp16.enabled {_word(s.fp16.enabled)} and bf16.enabled {_word(s.bf16.enabled)}",
            expected=f"{implied}, the dtype these give the weights",
            change=f"remove it or enable {wanted}" if wanted != "fp32" else "remove it or turn the 16-bit section off",
        )


def _gradient_scaling(s: ConfigSections) -> Iterator[Problem]:
    if s.gradient_allreduce_op == "sum":
        for found, on, keys in (
            ("stage 3", s.zero_optimization.stage == 3, ["zero_optimization.stage"]),
            ("zero_optimization.zenflow on", s.zero_optimization.zenflow is not None, []),
            ("compile.deepcompile on", s.compile.deepcompile, ["compile.deepcompile"]),
        ):
            if on:
                yield _clash("gradient_allreduce_op", *keys, found=f"sum with {found}", expected="mean")
    if s.gradient_predivide_factor != 1.0 and not s.prescale_gradients:
        return  # reported as without effect
    if not s.managed_gradient_accumulation and s.compile.deepcompile:
        yield _clash(
            "managed_gradient_accumulation",
            "compile.deepcompile",
            found="false with compile.deepcompile true",
            expected="true",
        )


def _zero(s: ConfigSections) -> Iterator[Problem]:
    zero = s.zero_optimization
    stage, here = "zero_optimization.stage", "zero_optimization."
    if not zero.compute_grad_norm:
        key = here + "compute_grad_norm"
        if s.gradient_clipping > 0:
            yield _clash(
                key,
                "gradient_clipping",
                found=f"false with gradient_clipping {s.gradient_clipping:g}" + _is_default(s, "gradient_clipping"),
                expected="gradient_clipping 0: clipping needs the norm",
                change="set gradient_clipping to 0 or compute_grad_norm to true",
            )
        if zero.zenflow is not None:
            yield _clash(key, found=f"false with {here}zenflow", expected="true")
        if zero.offload_optimizer is not None and zero.offload_optimizer.device != "none":
            yield _clash(
                key,
                here + "offload_optimizer.device",
                found=f"false with {here}offload_optimizer.device {zero.offload_optimizer.device}",
                expected="true",
            )
    if zero.zero_quantized_gradients and not zero.reduce_scatter and zero.stage == 3:
        yield _clash(
            here + "zero_quantized_gradients",
            here + "reduce_scatter",
            stage,
            found=f"true with {here}reduce_scatter false",
            expected=f"{here}reduce_scatter true",
        )
    yield from _error_feedback(zero.zeropp_loco_param, here + "zeropp_loco_param")
    if zero.offload_optimizer is not None and zero.offload_optimizer.device == "nvme" and zero.stage in (1, 2):
        yield _clash(
            here + "offload_optimizer.device",
            stage,
            found=f"nvme with {stage} {zero.stage}",
            expected='cpu or none; "nvme" needs stage 3',
        )
    for block in ("offload_optimizer", "offload_param"):
        section = getattr(zero, block)
        if section is not None and section.device == "nvme" and section.nvme_path is None:
            yield Problem(
                f"{here}{block}.nvme_path",
                f"missing with {here}{block}.device nvme; expected a folder",
                f'add "nvme_path": "/local_nvme" to {here}{block}',
                keys=(f"{here}{block}.nvme_path",),
            )
    section = zero.offload_optimizer
    if section is not None and section.device == "nvme" and section.buffer_count == 0:
        yield _clash(
            f"{here}offload_optimizer.buffer_count",
            f"{here}offload_optimizer.device",
            found=f"0 with {here}offload_optimizer.device nvme",
            expected="at least 1: states pass through these buffers",
        )


def _error_feedback(block: dict[str, Any] | None, here: str) -> Iterator[Problem]:
    rules: dict[str, tuple[str, Callable[[Any], bool]]] = {
        "err_beta": ("a number from 0 to below 1", lambda value: isinstance(value, (int, float)) and 0 <= value < 1),
        "reset_T": ("an integer of at least 1", lambda value: isinstance(value, int) and value >= 1),
    }
    for key, value in (block or {}).items():
        if key not in rules:
            known = " and ".join(rules)
            yield Problem(f"{here}.{key}", f"unknown key; the block has {known}", f"remove {key}", keys=(here,))
            continue
        wanted, fits = rules[key]
        if isinstance(value, bool) or not fits(value):
            yield Problem(f"{here}.{key}", f"found {value!r}; expected {wanted}", f"give it {wanted}", keys=(here,))


def _zenflow(s: ConfigSections) -> Iterator[Problem]:
    zero, here = s.zero_optimization, "zero_optimization.zenflow"
    flow = zero.zenflow
    if flow is None:
        return
    offload, device = zero.offload_optimizer, "zero_optimization.offload_optimizer.device"
    if offload is None or offload.device != "cpu":
        has = "without zero_optimization.offload_optimizer"
        if offload is not None:
            default = "" if "device" in offload.model_fields_set else " (the default)"
            has = f"with {device} {offload.device}{default}"
        yield _with_section(here, device, found=has, expected=f"{device} cpu")
    if not zero.overlap_comm:
        key, default, keys = "zero_optimization.overlap_comm", "", ["zero_optimization.overlap_comm"]
        if "overlap_comm" not in zero.model_fields_set:
            default = f" (the default at stage {zero.stage:d})"
            keys.append("zero_optimization.stage")
        yield _with_section(here, *keys, found=f"with {key} false{default}", expected=f"{key} true")
    for key, on in (
        ("offload_optimizer.super_offload", offload is not None and offload.super_offload),
        ("mics_shard_size", zero.mics_shard_size > 0),
    ):
        if on:
            yield _with_section(here, f"zero_optimization.{key}", found=f"with {key}", expected=f"{key} off")
    if s.optimizer is not None and s.optimizer.name not in (None, "adam", "adamw"):
        yield _with_section(
            here,
            "optimizer.type",
            found=f"with optimizer.type {s.optimizer.type}",
            expected="optimizer.type Adam or AdamW, whose update can be divided",
        )
    for key, least, value in (
        ("full_warm_up_rounds", 0, flow.full_warm_up_rounds),
        ("steps_per_epoch", 1, flow.steps_per_epoch),
    ):
        if value is not None and value < least:
            yield Problem(
                f"{here}.{key}", f"found {value}; expected at least {least}", f"use {least}", keys=(f"{here}.{key}",)
            )
    yield from _zenflow_intervals(flow, here)


def _zenflow_intervals(flow: ZenFlowConfig, here: str) -> Iterator[Problem]:
    select, update = flow.select_interval, flow.update_interval
    if (flow.select_strategy == "auto") != isinstance(select, str):
        yield _clash(
            f"{here}.select_interval",
            f"{here}.select_strategy",
            found=f"{select} with {here}.select_strategy {flow.select_strategy}"
            + ("" if "select_strategy" in flow.model_fields_set else " (the default)"),
            expected='"auto" with select_strategy auto, an integer with step or epoch',
            change="set select_strategy to step or epoch"
            if isinstance(select, int)
            else "set select_interval to an integer, or select_strategy to auto",
        )
    if isinstance(select, int) and isinstance(update, int) and flow.select_strategy != "epoch" and update > select:
        yield _clash(
            f"{here}.update_interval",
            f"{here}.select_interval",
            found=f"{update} with {here}.select_interval {select}",
            expected="at most select_interval" + ("" if flow.select_strategy == "step" else ", if it counts steps"),
        )


def _expert_parallel(s: ConfigSections) -> Iterator[Problem]:
    parallel, here = s.expert_parallel, "expert_parallel."
    if parallel is None or not parallel.enabled:
        return
    if s.zero_optimization.stage == 3:
        for key, on in (
            ("zero_quantized_gradients", s.zero_optimization.zero_quantized_gradients),
            ("zero_hpz_partition_size", s.zero_optimization.zero_hpz_partition_size > 1),
        ):
            if on:
                yield _clash(
                    here + "enabled",
                    f"zero_optimization.{key}",
                    found=f"true with zero_optimization.{key} at stage 3",
                    expected=f"zero_optimization.{key} off",
                )
    tensor = s.tensor_parallel
    if tensor is not None and tensor.autotp_size > 1:
        for key, on in (
            ("use_data_before_expert_parallelism", s.use_data_before_expert_parallelism),
            ("compile.deepcompile", s.compile.deepcompile),
            ("expert_parallel.async_split_plan", parallel.async_split_plan),
        ):
            if on:
                yield _clash(
                    here + "enabled",
                    "tensor_parallel.autotp_size",
                    key,
                    found=f"true with tensor_parallel.autotp_size {tensor.autotp_size} and {key}",
                    expected=f"{key} off",
                )


def _optimizer(s: ConfigSections) -> Iterator[Problem]:
    block = s.optimizer
    if block is None or block.type is None:
        return
    kind, params = block.type, block.params or {}
    known = optimizer_params(kind)
    if kind.lower() not in DEEPSPEED_OPTIMIZERS and kind not in TORCH_OPTIMIZERS:
        meant = near_miss(kind, [*BUILT_IN_TITLES, *TORCH_OPTIMIZERS])
        if meant:
            yield Problem(
                "optimizer.type",
                f"found {show(kind)}; nearest known optimizer: {meant}",
                "rename it",
                keys=("optimizer.type",),
            )
    if known is not None:
        yield from _unknown_params("optimizer", kind, params, known)
    norm = params.get("max_grad_norm")
    if isinstance(norm, (int, float)) and norm > 0:
        yield Problem(
            "optimizer.params.max_grad_norm",
            f"found {show(norm)}; expected 0 or nothing: the engine clips gradients",
            f"remove it and set gradient_clipping to {norm}",
            keys=("optimizer.params.max_grad_norm",),
        )
    yield from _rates("optimizer", params, ("lr", "muon_lr", "adam_lr", "weight_decay", "eps"))


def _scheduler(s: ConfigSections) -> Iterator[Problem]:
    block = s.scheduler
    if block is None or block.type is None:
        return
    kind, params = block.type, block.params or {}
    known = SCHEDULER_PARAMS.get(kind)
    if known is None:
        meant = near_miss(kind, SCHEDULER_PARAMS)
        if meant:
            yield Problem(
                "scheduler.type",
                f"found {show(kind)}; nearest known schedule: {meant}",
                "rename it",
                keys=("scheduler.type",),
            )
        return
    yield from _unknown_params("scheduler", kind, params, known)
    for key in SCHEDULER_REQUIRED.get(kind, ()):
        if params.get(key) is None:
            yield Problem(
                f"scheduler.params.{key}",
                f"missing; {kind} needs it",
                "add it",
                keys=(f"scheduler.params.{key}",),
            )
    for key in ("total_num_steps", "warmup_num_steps", "cycle_first_step_size", "lr_range_test_step_size"):
        value = params.get(key)
        least = 1 if key in ("cycle_first_step_size", "lr_range_test_step_size") else 0
        bad = isinstance(value, (bool, str)) or (isinstance(value, (int, float)) and (value < least or value % 1))
        if value is not None and bad:
            yield Problem(
                f"scheduler.params.{key}",
                f"found {show(value)}; expected integer >= {least}",
                keys=("scheduler.params",),
            )
    yield from _rates("scheduler", params, ("warmup_min_lr", "warmup_max_lr", "cycle_min_lr", "cycle_max_lr"))


def _unknown_params(section: str, kind: str, params: dict[str, Any], known: frozenset[str]) -> Iterator[Problem]:
    for key, value in params.items():
        if key not in known:
            meant = other_name(key, known) or nearest(key, known)
            detail = f"unknown parameter of {kind} (found {show(value)}); "
            detail += (
                f"nearest known key: {section}.params.{meant}" if meant else "it takes " + ", ".join(sorted(known))
            )
            yield Problem(
                f"{section}.params.{key}",
                detail,
                "rename it" if meant else "remove it",
                keys=(f"{section}.params.{key}",),
            )


def _rates(section: str, params: dict[str, Any], keys: tuple[str, ...]) -> Iterator[Problem]:
    """Values that must be numbers (or lists of them, one per group)."""
    for key in keys:
        value = params.get(key)
        values = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(item, (str, bool)) for item in values):
            yield Problem(
                f"{section}.params.{key}",
                f"found {show(value)}; expected number",
                "write the number without quotes",
                keys=(f"{section}.params.{key}",),
            )


def _word(flag: bool) -> str:
    return str(flag).lower()


def _is_default(s: ConfigSections, key: str) -> str:
    return "" if key in s.model_fields_set else " (the default)"
