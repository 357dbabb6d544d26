"""Ranks killed in the middle of saves, again and again: the last good checkpoint always loads, bit by bit.

    python benchmarks/checkpoint_faults.py [--trials 200] [--ranks 2] [--seed 0] [--json FILE]

Each trial starts ranks that load the newest checkpoint, compare it with what was noted when it was saved, and go on
training and saving (every second trial in the background) until SIGKILL ends one of them, or all, at a random moment.
Tags are used again, so that saves replace what is there.

Owns: the trials and the verdict: every load must succeed, be exact, and be no older than the newest save that had
returned. Processes are forked from one that has imported torch, which makes a trial take about a second.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import multiprocessing
import os
import random
import signal
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

import deepspeed
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

TAGS = 3
PATIENCE_S = 120.0


def settings(stage: int, background: bool) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "checkpoint": {"writer": {"decoupled": background}, "keep_last": 2},
        "steps_per_print": 10**9,
    }


def digest(engine: Any) -> str:
    """Hash of every master and moment, whole. Collective."""
    found = hashlib.sha256()
    for param in engine.module.parameters():
        for value in (
            safe_get_full_fp32_param(param),
            *(safe_get_full_optimizer_state(param, key) for key in ("exp_avg", "exp_avg_sq")),
        ):
            found.update(value.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def train_and_save(rank: int, world: int, folder: Path, trial: int, report: Connection) -> None:
    """One rank of one trial: ends by being killed. Reports ``("loaded", step)``, then ``("saved", step)`` and so on."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "DS_START_TABLE": "0"}
    torch.set_num_threads(1)
    deepspeed.init_distributed(
        dist_backend="gloo", init_method=f"file://{folder}/meeting-{trial}", rank=rank, world_size=world, verbose=False
    )
    background = trial % 2 == 1
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 200), nn.Tanh(), nn.Linear(200, 64))
    engine = deepspeed.initialize(model=model, config=settings(1 + trial % 3, background))[0]
    notes, saved = folder / "notes", folder / "saved"
    if (saved / "latest").exists():
        engine.load_checkpoint(str(saved))
        noted = (notes / str(engine.global_steps)).read_text()
        if digest(engine) != noted:
            report.send(("wrong", engine.global_steps))
            return
    report.send(("loaded", engine.global_steps))
    while True:
        step = engine.global_steps + 1
        generator = torch.Generator().manual_seed(step * world + rank)
        x = torch.randn(4, 64, generator=generator, dtype=torch.bfloat16)
        engine.backward(engine(x).float().square().mean())
        engine.step()
        whole = digest(engine)
        if rank == 0:
            aside = notes / f".{step}"
            aside.write_text(whole)
            os.replace(aside, notes / str(step))
        engine.save_checkpoint(str(saved), tag=f"tag{step % TAGS}")
        # In the background the save before this one is over when this one begins.
        report.send(("saved", step - background))


def import_everything() -> None:
    """What a rank would import at its first step, so that every trial's ranks have it from the start."""
    for name in ("deepspeed.runtime.build", "deepspeed.checkpoint.manager", "torch._dynamo"):
        importlib.import_module(name)
    param = nn.Parameter(torch.zeros(1))
    param.grad = torch.zeros(1)
    torch.optim.AdamW([param]).step()


def one_trial(context: Any, folder: Path, trial: int, world: int, draw: random.Random) -> tuple[int, int]:
    """``(step loaded, newest step known to be saved)``. Raises RuntimeError when ranks end otherwise than by us."""
    pipes, ranks = [], []
    for rank in range(world):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=train_and_save, args=(rank, world, folder, trial, there), daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        ranks.append(process)
    try:
        kind, loaded = receive(pipes[0])
        if kind != "loaded":
            raise RuntimeError(f"trial {trial}: the state of step {loaded} is not what was saved")
        receive(pipes[0])
        time.sleep(draw.uniform(0.0, 0.15))
    finally:
        victims = ranks if draw.random() < 0.5 else [draw.choice(ranks)]
        for process in (*victims, *ranks):
            os.kill(process.pid, signal.SIGKILL)
            if process in victims and len(victims) == 1:
                time.sleep(draw.uniform(0.0, 0.05))  # the others meet a dead rank
        for process in ranks:
            process.join()
    newest = 0
    try:
        while pipes[0].poll(0):
            newest = max(newest, pipes[0].recv()[1])
    except (EOFError, ConnectionResetError):
        pass
    for pipe in pipes:
        pipe.close()
    return loaded, newest


def receive(pipe: Connection) -> tuple[str, int]:
    if not pipe.poll(PATIENCE_S):
        raise RuntimeError(f"no word from rank 0 for {PATIENCE_S:g} s")
    try:
        kind, step = pipe.recv()
    except EOFError:
        raise RuntimeError("rank 0 ended by itself: its error is above") from None
    return kind, step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    import_everything()
    context = multiprocessing.get_context("fork")
    draw = random.Random(options.seed)
    begun, newest = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "notes").mkdir()
        for trial in range(options.trials + 1):  # the last one looks at what the one before left
            loaded, saved = one_trial(context, folder, trial, options.ranks, draw)
            if loaded < newest:
                raise RuntimeError(f"trial {trial} loaded step {loaded}, but the save of step {newest} had returned")
            newest = max(newest, loaded, saved)
            (folder / f"meeting-{trial}").unlink(missing_ok=True)
            if trial % 20 == 0:
                print(f"{trial} trials, step {newest}, {time.monotonic() - begun:.0f} s", flush=True)
        left = sorted(entry.name for entry in (folder / "saved").iterdir() if entry.name.startswith("."))
    facts = {"trials": options.trials, "ranks": options.ranks, "seed": options.seed, "steps": newest, "failed": 0}
    print(f"{options.trials} kills, {options.ranks} ranks, {newest} steps: every load exact; left: {left or 'none'}")
    if options.json:
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
