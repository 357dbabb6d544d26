"""Does training with the package give the numbers of plain torch?

Owns: one training case as data (`Case`), running it through `deepspeed.initialize` inside the ranks of a pool, and
comparing losses, norms, weights, masters and optimizer states after every step with `reference.PlainTrainer`.
Invariant: the default tolerance is 0: bits are compared. A case that needs more says why in `Tolerance.reason`.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.harness.models import SPECS, ModelSpec
from tests.harness.offload import apart, offloads
from tests.harness.reference import PlainTrainer, Precision
from tests.harness.zenflow import ZenFlowTrainer

# Two sums of the same squares in another order: fp32 partial sums on one side, fp64 on the other.
NORM_RTOL = 1e-6

# Lines shown for one case that differs.
MAX_LINES = 3


@dataclass(frozen=True)
class Tolerance:
    """Allowed relative difference; anything above 0 needs a reason."""

    rtol: float = 0.0
    atol: float = 0.0
    reason: str = ""

    def __post_init__(self) -> None:
        if (self.rtol or self.atol) and not self.reason:
            raise ValueError("a tolerance above 0 needs a reason")


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer as a config block and as plain torch, and the states to compare.

    `split(names) -> list of names` cuts the parameters into groups; group i uses `lrs[i]`.
    """

    name: str
    block: dict[str, Any]
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
    state_keys: tuple[str, ...]
    lrs: tuple[float, ...] = ()

    def groups(self, params: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
        """Parameter groups: one, or with per-group rates weights and vectors apart."""
        trainable = [param for param in params.values() if param.requires_grad]
        if not self.lrs:
            return [{"params": trainable}]
        parts = ([p for p in trainable if p.ndim > 1], [p for p in trainable if p.ndim <= 1])
        return [{"params": part, "lr": lr} for part, lr in zip(parts, self.lrs, strict=True) if part]


def _adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)


def _sgd(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)


_ADAMW_BLOCK = {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}}
_SGD_BLOCK = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}}

OPTIMIZERS: dict[str, OptimizerSpec] = {
    "adamw": OptimizerSpec("adamw", _ADAMW_BLOCK, _adamw, ("exp_avg", "exp_avg_sq")),
    "sgd": OptimizerSpec("sgd", _SGD_BLOCK, _sgd, ("momentum_buffer",)),
    "group_lr": OptimizerSpec("group_lr", _ADAMW_BLOCK, _adamw, ("exp_avg", "exp_avg_sq"), lrs=(3e-3, 2e-2)),
}

PRECISIONS: dict[str, tuple[dict[str, Any], Precision]] = {
    "fp32": ({}, Precision()),
    "bf16": ({"bf16": {"enabled": True}}, Precision(model=torch.bfloat16)),
    # Starts high enough that the first steps overflow, and doubles after two good ones: skips, halving and growth.
    "fp16": (
        {"fp16": {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 2, "hysteresis": 1}},
        Precision(
            model=torch.float16, loss_scale="dynamic", initial_scale=2.0**18, scale_window=2, hysteresis=1
        ),
    ),
    "autocast": (
        # No module is named safe, so gradients stay in the dtype of the weights, fp32.
        {"torch_autocast": {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}},
        Precision(autocast=torch.bfloat16),
    ),
}


@dataclass(frozen=True)
class Case:
    """One row of the parity table."""

    stage: int
    precision: str = "fp32"
    accumulation: int = 1
    clip: float = 0.0
    optimizer: str = "adamw"
    model: str = "odd"
    steps: int = 5
    rows: int = 2
    zero: dict[str, Any] = field(default_factory=dict)
    top: dict[str, Any] = field(default_factory=dict)
    reference: Precision | None = None
    tolerance: Tolerance = Tolerance()

    @property
    def name(self) -> str:
        """Short text that identifies the row in a failure."""
        extra = "".join(f" {key}={value}" for key, value in {**self.zero, **self.top}.items())
        return (
            f"{self.model} stage {self.stage} {self.precision} accumulation {self.accumulation} clip {self.clip:g} "
            f"{self.optimizer}{extra}"
        )

    def config(self) -> dict[str, Any]:
        """The JSON config of the case."""
        return {
            "train_micro_batch_size_per_gpu": self.rows,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "steps_per_print": 10**9,
            "optimizer": copy.deepcopy(OPTIMIZERS[self.optimizer].block),
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": self.stage, **self.zero},
            **copy.deepcopy(PRECISIONS[self.precision][0]),
            **copy.deepcopy(self.top),
        }


def steps_for(world_size: int, precision: str) -> int:
    """Steps of a row of the large tables: five on two ranks and where a loss scale falls and grows, else three.

    From the third step on, all that a step reads was left by steps that themselves read what a step had left.
    """
    return 5 if world_size == 2 or precision == "fp16" else 3


@dataclass
class StepRecord:
    """What one rank saw of one optimizer step. Tensors are full (gathered), on every rank."""

    losses: list[float]
    norm: float
    skipped: int
    weights: dict[str, Tensor]
    masters: dict[str, Tensor]
    states: dict[str, dict[str, Tensor]]
    digest: str = ""


def run_engine(case: Case) -> list[StepRecord]:
    """Train `case` on this rank of the current group."""
    import deepspeed

    spec = SPECS[case.model]
    module = spec.build()
    optimizer = OPTIMIZERS[case.optimizer]
    parameters = optimizer.groups(dict(module.named_parameters())) if optimizer.lrs else None
    with apart(offloads(case.zero)):
        engine, *_ = deepspeed.initialize(model=module, model_parameters=parameters, config=case.config())
    records = []
    for step in range(case.steps):
        losses = []
        for micro in range(case.accumulation):
            index = step * case.accumulation + micro
            loss = spec.loss(engine, spec.batch(index, dist.get_rank(), case.rows), index, dist.get_rank())
            losses.append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
        records.append(record_step(engine, losses, optimizer.state_keys))
    engine.destroy()
    return records


def _state(param: torch.nn.Parameter, key: str) -> torch.Tensor | None:
    """One optimizer state; None also for a key of another optimizer: lists of keys may serve several."""
    from deepspeed.utils import safe_get_full_optimizer_state

    try:
        return safe_get_full_optimizer_state(param, key)
    except ValueError as refused:  # by all ranks alike
        if "has no optimizer state tensor" not in str(refused):
            raise
        return None


def record_step(engine: Any, losses: list[float], state_keys: Sequence[str]) -> StepRecord:
    """What this rank sees after a step. Collective: sharded tensors are gathered."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    masters, states = {}, {}
    params = dict(engine.module.named_parameters())
    with GatheredParameters(list(params.values())):
        weights = {name: param.detach().clone() for name, param in params.items()}
    for name, param in params.items():
        if not param.requires_grad:
            continue
        full = safe_get_full_fp32_param(param)
        masters[name] = full.detach().clone() if full is not None else param.detach().float()
        found = {key: _state(param, key) for key in state_keys}
        kept = {key: value.detach().clone() for key, value in found.items() if value is not None}
        if kept:
            states[name] = kept
    norm = engine.get_global_grad_norm()
    norm = math.nan if norm is None else float(norm)
    return StepRecord(losses, norm, engine.skipped_steps, weights, masters, states, _digest(weights))


def _digest(weights: dict[str, Tensor]) -> str:
    total = hashlib.sha256()
    for name in sorted(weights):
        total.update(weights[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def compare(case: Case, ranks: list[list[StepRecord]], full: list[StepRecord]) -> list[str]:
    """Differences between what the ranks recorded and plain torch, one line each; empty when all is equal.

    `ranks[r]` are the records of rank r, of which losses, norms and digests are read; `full` are those of one rank,
    whatever rank it is, with tensors.
    """
    world_size = len(ranks)
    spec, optimizer = SPECS[case.model], OPTIMIZERS[case.optimizer]
    precision = case.reference or PRECISIONS[case.precision][1]
    flow = case.zero.get("zenflow")
    kind: Callable[..., PlainTrainer] = PlainTrainer if flow is None else functools.partial(ZenFlowTrainer, flow=flow)
    trainer = kind(
        spec.build(),
        lambda params: optimizer.make(optimizer.groups(params)),
        world_size=world_size,
        precision=precision,
        accumulation=case.accumulation,
        clip=case.clip,
        stage=case.stage,
        block=case.zero.get("mics_shard_size"),
    )
    problems: list[str] = []
    for step in range(case.steps):
        seen = [records[step] for records in ranks]
        losses: list[list[float]] = []
        for micro in range(case.accumulation):
            index = step * case.accumulation + micro
            boundary = micro == case.accumulation - 1
            losses.append(trainer.backward(_losses(spec, index, case.rows), boundary=boundary))
        problems = compare_losses(f"step {step}", losses, seen, case.tolerance)
        problems += compare_step(f"step {step}", trainer, seen, full[step], optimizer.state_keys, case.tolerance)
        if problems:
            break  # what follows only repeats the first difference
    if len(problems) > MAX_LINES:
        problems = [*problems[:MAX_LINES], f"and {len(problems) - MAX_LINES} more"]
    return [f"[{case.name}, {world_size} ranks] {problem}" for problem in problems]


def _losses(spec: ModelSpec, index: int, rows: int) -> Callable[[nn.Module, int], Tensor]:
    return lambda module, rank: spec.loss(module, spec.batch(index, rank, rows), index, rank)


def compare_losses(
    where: str, right: list[list[float]], seen: list[StepRecord], tolerance: Tolerance
) -> list[str]:
    """`right[micro][rank]` of plain torch against what each rank saw since the last step."""
    problems = []
    for rank, record in enumerate(seen):
        if len(record.losses) != len(right):
            problems.append(f"{where} rank {rank}: {len(record.losses)} losses, plain torch {len(right)}")
            continue
        for micro, (losses, got) in enumerate(zip(right, record.losses, strict=True)):
            if not _near(got, losses[rank], tolerance):
                problems.append(f"{where} micro {micro} rank {rank}: loss {got!r}, plain torch {losses[rank]!r}")
    return problems


def compare_step(
    where: str,
    trainer: PlainTrainer,
    seen: list[StepRecord],
    full: StepRecord,
    state_keys: Sequence[str],
    tolerance: Tolerance,
) -> list[str]:
    """Make the step of `trainer` and compare all that it changes. `seen`: every rank; `full`: one with tensors."""
    first = seen[0]
    done = trainer.step(norm_for_clip=first.norm if math.isfinite(first.norm) else None)
    problems = []
    norms = [record.norm for record in seen]
    if any(norm != first.norm and math.isfinite(norm) | math.isfinite(first.norm) for norm in norms):
        problems.append(f"{where}: ranks report different norms {norms}")
    if done and not math.isclose(first.norm, trainer.norm, rel_tol=max(NORM_RTOL, tolerance.rtol), abs_tol=1e-12):
        problems.append(f"{where}: norm {first.norm!r}, plain torch {trainer.norm!r}")
    if any(record.skipped != trainer.skipped_steps for record in seen):
        problems.append(f"{where}: skipped {[r.skipped for r in seen]}, plain torch {trainer.skipped_steps}")
    if len({record.digest for record in seen}) > 1:
        problems.append(f"{where}: ranks hold different weights")
    problems += _compare_tensors(f"{where} weight", full.weights, trainer.weights(), tolerance)
    right = {n: t for n, t in trainer.full_precision_weights().items() if trainer.params[n].requires_grad}
    problems += _compare_tensors(f"{where} master", full.masters, right, tolerance)
    return problems + _compare_states(where, full.states, trainer.states(state_keys), tolerance)


States = dict[str, dict[str, Tensor]]


def _compare_states(where: str, seen: States, right: States, tolerance: Tolerance) -> list[str]:
    problems = []
    # A state of zeros that plain torch has not made yet says the same thing as none.
    extra = {name for name in seen.keys() - right.keys() if _any_nonzero(seen[name])}
    missing = {name for name in right.keys() - seen.keys() if _any_nonzero(right[name])}
    if extra or missing:
        problems.append(f"{where}: states beyond plain torch {sorted(extra)}, missing {sorted(missing)}")
    for name in seen.keys() & right.keys():
        problems += _compare_tensors(f"{where} state {name}", seen[name], right[name], tolerance)
    return problems


def _any_nonzero(states: dict[str, Tensor]) -> bool:
    return any(bool(tensor.count_nonzero()) for tensor in states.values())


def _compare_tensors(
    where: str, seen: dict[str, Tensor], right: dict[str, Tensor], tolerance: Tolerance
) -> list[str]:
    problems = []
    if seen.keys() != right.keys():
        problems.append(f"{where}: names {sorted(seen)}, plain torch {sorted(right)}")
    for name in seen.keys() & right.keys():
        line = tensor_difference(seen[name], right[name], tolerance)
        if line:
            problems.append(f"{where} {name}: {line}")
    return problems


def tensor_difference(seen: Tensor, right: Tensor, tolerance: Tolerance) -> str:
    """Text of the largest difference, or "" when within tolerance (0: the same bits, the sign of zero aside)."""
    if seen.shape != right.shape:
        return f"shape {tuple(seen.shape)}, plain torch {tuple(right.shape)}"
    if seen.dtype != right.dtype:
        return f"dtype {seen.dtype}, plain torch {right.dtype}"
    if torch.equal(seen, right):
        return ""
    gap = (seen.double() - right.double()).abs()
    allowed = tolerance.atol + tolerance.rtol * right.double().abs()
    if bool((gap <= allowed).all()):
        return ""
    at = int((gap - allowed).nan_to_num(nan=math.inf).argmax())
    bad = int((~(gap <= allowed)).sum())
    return (
        f"{bad} of {gap.numel()} elements differ; worst at {at}: {seen.flatten()[at].item()!r}, "
        f"plain torch {right.flatten()[at].item()!r}"
    )


def _near(got: float, expected: float, tolerance: Tolerance) -> bool:
    return got == expected or math.isclose(got, expected, rel_tol=tolerance.rtol, abs_tol=tolerance.atol)


def run_cases(cases: Sequence[Case]) -> list[str]:
    """Body for the pool: train all cases on the ranks of this group; each rank checks its share of them."""
    world_size, problems = dist.get_world_size(), []
    for number, case in enumerate(cases):
        try:
            mine = run_engine(case)
        except Exception as error:
            raise RuntimeError(f"[{case.name}, {world_size} ranks] {type(error).__name__}: {error}") from error
        # The numbers and the digest of the weights go to one rank, which checks them and its own full tensors.
        light = [StepRecord(r.losses, r.norm, r.skipped, {}, {}, {}, r.digest) for r in mine]
        gathered: list[Any] = [None] * world_size
        dist.all_gather_object(gathered, light)
        if dist.get_rank() == number % world_size:
            problems += compare(case, gathered, mine)
    return problems


def assert_same_training(pool: Any, world_size: int, cases: Sequence[Case], timeout: float = 300.0) -> None:
    """Train every case on `world_size` ranks and fail with all differences from plain torch."""
    found = pool.run(world_size, run_cases, tuple(cases), timeout=timeout)
    problems = [line for lines in found for line in lines]
    assert not problems, "\n" + "\n".join(problems)
