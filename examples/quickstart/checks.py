"""What the quickstart proves after training: an exact resume, an export that plain PyTorch reads, and memory as the
formula of the stage has it.

Owns: the resume checks (this run against new processes that load its checkpoint, also on another number of ranks), the
export, and the bytes per rank of every stage.
Does not own: the training step itself; it is handed in.
Invariant: every rank calls these functions together; they contain collectives.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from data import Corpus
from options import STAGES, at_stage

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint import safetensors

# The loss after a load shows the weights; the one after that also the optimizer's moments, the schedule and the scale.
REPLAYED_STEPS = 2
STATE_KINDS = ("parameter", "gradient", "master", "optimizer")


@dataclass(frozen=True)
class ResumeCheck:
    """Losses of the steps after the checkpoint: of the run that went on, and of the new processes that loaded it.

    `alone`: those of one process that loaded it for all ranks; None where the run had one rank itself. Its gradients
    are summed in another order, so these are close, within `tolerance`.
    """

    continued: list[float]
    resumed: list[float]
    checkpoint: Path
    alone: list[float] | None = None
    tolerance: float = 0.0

    @property
    def identical(self) -> bool:
        return [loss.hex() for loss in self.continued] == [loss.hex() for loss in self.resumed]

    @property
    def difference(self) -> float:
        """Largest difference of the losses on one rank."""
        pairs = zip(self.continued, self.alone or self.continued, strict=True)
        return max(abs(one - other) for one, other in pairs)

    @property
    def passed(self) -> bool:
        return self.identical and self.difference <= self.tolerance


@dataclass(frozen=True)
class Export:
    """A safetensors file of the weights; the held-out loss of the plain module that loaded it (nan: other ranks)."""

    path: Path
    held_out: float


@dataclass(frozen=True)
class StageMemory:
    """Bytes of parameters, gradients, master copies and optimizer states on one rank.

    `gathered` comes on top: whole parameters that stage 3 holds beside its shards, at the end of a backward or a step.
    `trained` tells the stage of the training run; the others were measured on a fresh model during one step.
    `offloaded`: in host memory and files instead.
    """

    stage: int
    expected: int
    measured: int
    gathered: int
    trained: bool
    offloaded: int = 0


def check_resume(
    engine: Any, options: argparse.Namespace, step: int, train_step: Callable[[int], torch.Tensor]
) -> ResumeCheck:
    """Save, go on for two steps, and let new processes in a new process group load and do the same two steps."""
    folder = options.out / "checkpoint"
    engine.save_checkpoint(str(folder), tag=f"step{step}", client_state={"step": step})
    engine.train()
    continued = [_mean_over_ranks(train_step(step + i)) for i in range(REPLAYED_STEPS)]
    resumed = _replayed(options, folder)
    ranks = dist.get_world_size()
    alone = None if ranks == 1 else _replayed(options, folder, "--replay_shares", str(ranks))
    # fp32 losses near 2 differ by some 1e-7; a bf16 weight rounds at 4e-3 of its value.
    tolerance = 1e-4 if next(engine.module.parameters()).dtype == torch.float32 else 2e-2
    return ResumeCheck(continued, resumed, folder / f"step{step}", alone, tolerance)


def _replayed(options: argparse.Namespace, folder: Path, *shares: str) -> list[float]:
    """Losses of new processes that load the checkpoint; with `shares`: of one that does the work of all ranks."""
    dist.barrier()
    if not shares or dist.get_rank() == 0:
        _run_new_process(["--replay", str(folder), *shares], alone=bool(shares))
    dist.barrier()
    return [float.fromhex(loss) for loss in json.loads(_replay_file(options).read_text())["losses"]]


def replay(engine: Any, options: argparse.Namespace, train_step: Callable[[int], torch.Tensor]) -> None:
    """The new processes' side of `check_resume`: load, train on, leave the losses in a file."""
    path, state = engine.load_checkpoint(str(options.replay))
    if path is None or state is None:
        raise FileNotFoundError(f"--replay {options.replay}: no checkpoint there")
    engine.train()
    losses = [_mean_over_ranks(train_step(state["step"] + i)).hex() for i in range(REPLAYED_STEPS)]
    if dist.get_rank() == 0:
        _replay_file(options).write_text(json.dumps({"checkpoint": path, "losses": losses}))


def _replay_file(options: argparse.Namespace) -> Path:
    return options.out / "replay.json"


def _mean_over_ranks(loss: torch.Tensor) -> float:
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _run_new_process(arguments: list[str], *, alone: bool = False) -> None:
    """Start this script once more on each rank, as a new process group on a port of its own, and wait for it.

    `alone`: only this rank calls, and the new group has one rank.
    """
    port = torch.tensor(_free_port() if dist.get_rank() == 0 else 0, device=get_accelerator().current_device_name())
    if not alone:
        dist.broadcast(port, 0)
    environment = {**os.environ, "MASTER_PORT": str(port.item()), "DS_LOG_LEVEL": "error"}
    if alone:
        environment |= dict.fromkeys(("WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE"), "1")
    # Under torchrun the agent keeps the rendezvous; the new group must make its own.
    environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    command = [sys.executable, *sys.argv, *arguments]
    ended = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if ended.returncode:
        raise RuntimeError(
            f"rank {dist.get_rank()}: the new process for the resume check ended with code {ended.returncode}\n"
            f"{' '.join(command)}\n{ended.stdout}"
        )


def export(engine: Any, options: argparse.Namespace, plain: torch.nn.Module, loss: Callable[[Any], float]) -> Export:
    """Write the weights as safetensors; on rank 0, load them strictly into `plain` and compute its `loss`."""
    path = options.out / "model.safetensors"
    if not engine.save_16bit_model(str(path.parent), path.name):
        raise RuntimeError("the export needs zero_optimization.stage3_gather_16bit_weights_on_model_save: true")
    found = math.nan
    if dist.get_rank() == 0:
        safetensors.load(plain, path)
        found = loss(plain)
    dist.barrier()
    return Export(path, found)


def memory_by_stage(
    engine: Any,
    config: dict[str, Any],
    corpus: Corpus,
    options: argparse.Namespace,
    build_engine: Callable[[dict[str, Any]], Any],
) -> list[StageMemory]:
    """Model-state bytes of this rank at every stage: of the trained engine, and of fresh ones at the other stages."""
    trained = engine.zero_optimization_stage()
    found = []
    for stage in STAGES:
        if stage == trained:
            found.append(_memory(engine, stage, trained=True))
            continue
        other = build_engine(at_stage(config, stage))
        for micro in range(other.gradient_accumulation_steps()):
            tokens, targets = corpus.batch(micro, 1, min(16, options.context))  # a short step makes every state exist
            other.backward(other(tokens.to(other.device), targets.to(other.device)))
            other.step()
        found.append(_memory(other, stage, trained=False))
        other.destroy()
    return found


def _memory(engine: Any, stage: int, *, trained: bool) -> StageMemory:
    nbytes = engine.summary()["model_state_bytes"]
    expected, measured = (sum(nbytes[which][kind] for kind in STATE_KINDS) for which in ("expected", "measured"))
    away = sum(nbytes["measured"].get(place, 0) for place in ("host", "disk"))
    return StageMemory(stage, expected, measured, nbytes["measured"].get("gathered", 0), trained, away)
