"""Runs random training programs through the package and through plain torch and compares bits.

Owns: the two drivers of a recipe, the comparison after every optimizer step, the command line.
Does not own: what a recipe is and how it is drawn and shrunk (`fuzz_recipes.py`).
Invariant: a recipe is its own reproducer. A failure prints it; this module replays it:

    python -m tests.harness.fuzz --recipe 'Recipe(...)'
    python -m tests.harness.fuzz --seeds 100:400
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.harness.fuzz_recipes import Net, Op, Part, Recipe, build, draw, draw_offload, draw_stage_3, shrink
from tests.harness.offload import apart, offload_sections
from tests.harness.parity import (
    OPTIMIZERS,
    OptimizerSpec,
    StepRecord,
    Tolerance,
    compare_losses,
    compare_step,
    record_step,
)
from tests.harness.reference import PlainTrainer, Precision

ROWS = 2

LATE = Tolerance(rtol=1e-5, atol=1e-6, reason="late gradients are summed in another order, see Recipe")

_PRECISION: dict[str, tuple[dict[str, Any], Precision]] = {
    "fp32": ({}, Precision()),
    "bf16": ({"bf16": {"enabled": True}}, Precision(model=torch.bfloat16)),
    "fp16": (
        {"fp16": {"enabled": True, "loss_scale": 128}},
        Precision(model=torch.float16, loss_scale=128.0),
    ),
    "fp16_dynamic": (
        {"fp16": {"enabled": True, "initial_scale_power": 17, "loss_scale_window": 2, "hysteresis": 2}},
        Precision(model=torch.float16, loss_scale="dynamic", initial_scale=2.0**17, scale_window=2, hysteresis=2),
    ),
}


def config_of(recipe: Recipe) -> dict[str, Any]:
    """The JSON config of `recipe`."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": recipe.accumulation,
        "gradient_clipping": recipe.clip,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": recipe.stage, **dict(recipe.zero)},
        **_PRECISION[recipe.precision][0],
    }
    if recipe.offload:
        config["zero_optimization"] |= offload_sections(recipe.offload)
    if recipe.accum:
        config["data_types"] = {"grad_accum_dtype": recipe.accum}
    if not recipe.client_optimizer:
        config["optimizer"] = OPTIMIZERS[recipe.optimizer].block
    return config


def _precision_of(recipe: Recipe) -> Precision:
    precision = _PRECISION[recipe.precision][1]
    return replace(precision, accum=torch.float32) if recipe.accum == "fp32" else precision


def _groups(recipe: Recipe, params: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    """Parameters dealt out to the groups in turn, each group with its own rate."""
    dealt = [list(params.values())[i :: recipe.num_groups] for i in range(recipe.num_groups)]
    return [{"params": part, "lr": 0.01 * (i + 1)} for i, part in enumerate(dealt) if part]


class _Run:
    """What both drivers share: the walk over the ops, data, and the count of micro-steps."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.optimizer_spec: OptimizerSpec = OPTIMIZERS[recipe.optimizer]
        self.batch_number = self.micro_steps = 0
        self.held_back = False  # a no_sync backward of this window has been made

    @property
    def boundary(self) -> bool:
        """The micro-step in progress ends its window."""
        return (self.micro_steps + 1) % self.recipe.accumulation == 0

    def wanted(self, op: Op) -> bool:
        """Some calls have a defined result only between two windows; inside one they are left out."""
        between = self.micro_steps % self.recipe.accumulation == 0 and not self.held_back
        return between or op.kind not in ("reload", "freeze", "unfreeze")

    def batch(self, rank: int, number: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1_000_003 * self.recipe.seed + 1009 * number + rank)
        dims = self.recipe.net.dims
        return torch.randn(ROWS, dims[0], generator=generator), torch.randn(ROWS, dims[-1], generator=generator)

    def loss(self, model: Callable[..., Any], dtype: torch.dtype, part: Part, rank: int) -> Tensor:
        """Mean loss of the forwards of `part`; the caller advances `batch_number` by `part.forwards` afterwards."""
        skip = part.skip[rank] if rank < len(part.skip) else ()
        total = None
        for forward in range(part.forwards):
            x, y = self.batch(rank, self.batch_number + forward)
            loss = F.mse_loss(model(x.to(dtype), skip).float(), y)
            total = loss if total is None else total + loss
        assert total is not None
        return total / part.forwards if part.forwards > 1 else total


class EngineRun(_Run):
    """The recipe through `deepspeed.initialize`, on this rank."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.rank = dist.get_rank()
        self.engine = self._engine(recipe.seed)
        self.records: list[StepRecord] = []
        self.losses: list[float] = []

    def _engine(self, seed: int) -> Any:
        import deepspeed

        module = build(self.recipe.net, seed)
        groups = _groups(self.recipe, dict(module.named_parameters()))
        if self.recipe.client_optimizer:
            given: dict[str, Any] = {"optimizer": self.optimizer_spec.make(groups)}
        elif self.recipe.num_groups > 1:
            given = {"model_parameters": groups}
        else:
            given = {}
        with apart(bool(self.recipe.offload)):
            engine, *_ = deepspeed.initialize(model=module, config=config_of(self.recipe), **given)
        if self.recipe.num_groups == 1 and not self.recipe.client_optimizer:
            for group in engine.optimizer.param_groups:
                group["lr"] = 0.01  # the rate `_groups` gives to the plain run
        return engine

    def run(self) -> list[StepRecord]:
        for op in self.recipe.ops:
            if op.kind == "micro":
                boundary = self.boundary
                if self.recipe.manual_boundary:
                    self.engine.set_gradient_accumulation_boundary(boundary)
                self._backwards(op)
                self.engine.step()
                self.micro_steps += 1
                if boundary:
                    self.held_back = False
                    self.records.append(record_step(self.engine, self.losses, self.optimizer_spec.state_keys))
                    self.losses = []
            elif self.wanted(op):
                self._other(op)
        self.engine.destroy()
        return self.records

    def _backwards(self, op: Op) -> None:
        dtype = _precision_of(self.recipe).model
        for part in op.parts:
            loss = self.loss(self.engine, dtype, part, self.rank)
            self.batch_number += part.forwards
            self.losses.append(float(loss.detach()))
            if part.raw:
                self.engine.scale(loss).backward()
            else:
                self.engine.backward(loss)

    def _other(self, op: Op) -> None:
        params = list(self.engine.module.parameters())
        if op.kind == "no_sync":
            self.held_back = True
            with self.engine.no_sync():
                self._backwards(op)
        elif op.kind == "zero_grad":
            self.engine.zero_grad()
        elif op.kind == "evaluate":
            self.engine.eval()
            with torch.no_grad():
                self.losses.append(float(self.loss(self.engine, params[0].dtype, Part(), self.rank)))
            self.engine.train()
        elif op.kind in ("freeze", "unfreeze"):
            params[op.index % len(params)].requires_grad_(op.kind == "unfreeze")
        elif op.kind == "edit":
            from deepspeed.runtime.zero.partition_parameters import GatheredParameters

            param = params[op.index % len(params)]
            with torch.no_grad(), GatheredParameters(param, modifier_rank=0):
                param.mul_(op.factor)
        elif op.kind == "rate":
            for group in self.engine.optimizer.param_groups:
                group["lr"] *= op.factor
        elif op.kind == "reload":
            self._reload()
        else:
            raise ValueError(f"unknown op {op.kind!r}")

    def _reload(self) -> None:
        with tempfile.TemporaryDirectory() as mine:
            shared = [mine]
            dist.broadcast_object_list(shared, src=0)
            frozen = [param.requires_grad for param in self.engine.module.parameters()]
            self.engine.save_checkpoint(shared[0], tag="fuzz")
            skipped = self.engine.skipped_steps
            self.engine.destroy()
            self.engine = self._engine(self.recipe.seed + 1)
            for param, wanted in zip(self.engine.module.parameters(), frozen, strict=True):
                param.requires_grad_(wanted)
            path, _ = self.engine.load_checkpoint(shared[0], tag="fuzz")
            assert path is not None, "load_checkpoint found nothing"
            assert self.engine.skipped_steps == skipped, "skipped_steps is lost by save and load"
            dist.barrier()


class PlainRun(_Run):
    """The recipe through `PlainTrainer`, all ranks in this process."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.trainer = PlainTrainer(
            build(recipe.net, recipe.seed),
            lambda params: self.optimizer_spec.make(_groups(recipe, params)),
            world_size=recipe.world_size,
            precision=_precision_of(recipe),
            accumulation=recipe.accumulation,
            clip=recipe.clip,
            stage=recipe.stage,
        )
        self.losses: list[list[float]] = []

    def steps(self) -> Iterator[list[list[float]]]:
        """Yield the losses at each boundary, before the step is made (the caller makes it)."""
        for op in self.recipe.ops:
            if op.kind == "micro":
                boundary = self.boundary
                self._backwards(op, sync=True)
                self.micro_steps += 1
                if boundary:
                    self.held_back = False
                    yield self.losses
                    self.losses = []
            elif self.wanted(op):
                self._other(op)

    def _backwards(self, op: Op, *, sync: bool) -> None:
        dtype = self.trainer.precision.model
        for part in op.parts:
            # A rank that divides late divides everything late; dividing by a power of two commutes with all else.
            losses = self.trainer.backward(
                lambda model, rank, p=part: self.loss(model, dtype, p, rank), sync=sync, boundary=self.boundary
            )
            self.batch_number += part.forwards
            self.losses.append(losses)

    def _other(self, op: Op) -> None:
        params = list(self.trainer.module.parameters())
        if op.kind == "no_sync":
            self.held_back = True
            self._backwards(op, sync=False)
        elif op.kind == "zero_grad":
            self.trainer.zero_grad()
        elif op.kind == "evaluate":
            with torch.no_grad():
                model, dtype = self.trainer.module, params[0].dtype
                self.losses.append(
                    [float(self.loss(model, dtype, Part(), rank)) for rank in range(self.recipe.world_size)]
                )
        elif op.kind in ("freeze", "unfreeze"):
            params[op.index % len(params)].requires_grad_(op.kind == "unfreeze")
        elif op.kind == "edit":
            self._edit(list(self.trainer.params)[op.index % len(params)], op.factor)
        elif op.kind == "rate":
            for group in self.trainer.optimizer.param_groups:
                group["lr"] *= op.factor

    @torch.no_grad()
    def _edit(self, name: str, factor: float) -> None:
        """A weight the user writes is from then on the truth, masters included."""
        param, master = self.trainer.params[name], self.trainer.masters[name]
        param.mul_(factor)
        if master is not param:
            master.copy_(param)


# -- running and comparing -----------------------------------------------------------------------------------------


def run_recipe(recipe: Recipe) -> list[str]:
    """Body for the pool: differences found by this rank (one rank compares; the others return [])."""
    mine = EngineRun(recipe).run()
    light = [StepRecord(r.losses, r.norm, r.skipped, {}, {}, {}, r.digest) for r in mine]
    gathered: list[Any] = [None] * recipe.world_size
    dist.all_gather_object(gathered, light)
    if dist.get_rank() != recipe.seed % recipe.world_size:
        return []
    plain = PlainRun(recipe)
    tolerance = LATE if recipe.has_late_gradients else Tolerance()
    for number, losses in enumerate(plain.steps()):
        seen, where = [records[number] for records in gathered], f"boundary {number}"
        problems = compare_losses(where, losses, seen, tolerance)
        problems += compare_step(where, plain.trainer, seen, mine[number], plain.optimizer_spec.state_keys, tolerance)
        if problems:
            return problems
    return []


def run_recipes(recipes: tuple[Recipe, ...]) -> list[tuple[int, str]]:
    """Body for the pool: (index, problem) of every recipe of one world size."""
    found = []
    for index, recipe in enumerate(recipes):
        try:
            found += [(index, line) for line in run_recipe(recipe)]
        except Exception as error:
            raise RuntimeError(f"recipe {index}: {recipe!r}: {type(error).__name__}: {error}") from error
    return found


def failure_of(pool: Any, recipe: Recipe, timeout: float = 60.0) -> str:
    """How `recipe` fails: the first lines of difference, an exception, or "" when it passes."""
    try:
        found = pool.run(recipe.world_size, run_recipe, recipe, timeout=timeout)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "\n".join(line for lines in found for line in lines[:5])


def report(recipe: Recipe, failure: str) -> str:
    """Text of a failure with its reproducer."""
    return f"seed {recipe.seed}: {failure}\nreproduce: python -m tests.harness.fuzz --recipe '{recipe!r}'"


def main() -> int:
    """Command line: replay one recipe or try a range of seeds. Returns the number of failures."""
    from tests.harness.pool import WorkerPool

    parser = argparse.ArgumentParser(prog="python -m tests.harness.fuzz")
    parser.add_argument("--recipe", help="a recipe as printed by a failure")
    parser.add_argument("--seeds", default="0:100", help="FROM:TO")
    parser.add_argument("--stage-3", action="store_true", help="draw the recipes of stage 3")
    parser.add_argument("--offload", action="store_true", help="draw the recipes with offload")
    parser.add_argument("--keep", action="store_true", help="do not shrink")
    options = parser.parse_args()
    pool, failures = WorkerPool(4), 0
    if options.recipe:
        recipes = [eval(options.recipe, {"Recipe": Recipe, "Net": Net, "Op": Op, "Part": Part})]
    else:
        first, last = (int(number) for number in options.seeds.split(":"))
        make = draw_offload if options.offload else draw_stage_3 if options.stage_3 else draw
        recipes = [make(seed) for seed in range(first, last)]
    for recipe in recipes:
        failure = failure_of(pool, recipe)
        if not failure:
            continue
        failures += 1
        small = recipe if options.keep else shrink(recipe, lambda candidate: failure_of(pool, candidate, 20.0))
        print(report(small, failure_of(pool, small) or failure), flush=True)
    print(f"{len(recipes)} recipes, {failures} failed")
    pool.close()
    return failures


if __name__ == "__main__":
    raise SystemExit(1 if main() else 0)
