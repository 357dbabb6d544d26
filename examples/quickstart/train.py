"""Train a byte-level language model on real text: the quickstart.

    deepspeed --num_gpus 2 examples/quickstart/train.py --deepspeed \\
        --deepspeed_config examples/quickstart/ds_config.json

Read `build_engine` and `train`: they are all that a training script needs. The rest shows that what they did is right
(`checks.py`) and draws it (`report.py`). Only the public API of DeepSpeed is used.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass, field
from typing import Any

import checks
import report
import torch
from data import Corpus, load_corpus
from model import ByteLlama
from options import at_stage, deepspeed_config, model_config, parse_arguments
from progress import Interrupt, ProgressLine

import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

os.environ.setdefault("DS_START_TABLE", "0")  # report.show_start has the same facts, and bytes as measured
INTERRUPTED = 130  # what a shell expects of a program ended by Ctrl-C
PROMPT = "def "
SAMPLE_BYTES = 200


@dataclass
class History:
    """One entry per finished step; losses in nats, averaged over ranks."""

    losses: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    grad_norms: list[float | None] = field(default_factory=list)
    tokens_per_second: float = 0.0


def build_engine(options: argparse.Namespace, config: dict[str, Any]) -> Any:
    """A fresh model under DeepSpeed. The same seed gives the same weights on every rank and in every run."""
    torch.manual_seed(options.seed)
    model = ByteLlama(model_config(options))
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def train_step(engine: Any, corpus: Corpus, options: argparse.Namespace, step: int) -> torch.Tensor:
    """One optimizer step, which is `gradient_accumulation_steps` micro-steps. Returns this rank's mean loss, fp32.

    The windows of a step do not depend on the number of ranks: fewer ranks take more micro-steps over the same shares.
    """
    micro_steps, ranks = engine.gradient_accumulation_steps(), dist.get_world_size()
    shares = options.replay_shares or ranks
    total = torch.zeros((), device=engine.device)
    for micro in range(micro_steps):
        batch, share = divmod(micro * ranks + dist.get_rank(), shares)
        tokens, targets = corpus.batch(
            step * micro_steps * ranks // shares + batch,
            engine.train_micro_batch_size_per_gpu(),
            options.context,
            share=share,
            shares=shares,
            seed=options.seed,
        )
        loss = engine(tokens.to(engine.device), targets.to(engine.device))
        engine.backward(loss)
        engine.step()
        total += loss.detach().float()
    return total / micro_steps


def train(engine: Any, corpus: Corpus, options: argparse.Namespace, steps: int, interrupt: Interrupt) -> History:
    """Steps 0 to `steps` - 1. Ctrl-C on any rank raises KeyboardInterrupt on all of them, after the same step."""
    history = History()
    line = ProgressLine(steps, engine.train_batch_size() * options.context, enabled=dist.get_rank() == 0)
    engine.train()
    with interrupt.deferred():
        for step in range(steps):
            rate = engine.get_lr()[0]
            loss = train_step(engine, corpus, options, step)
            # One small all-reduce a step: the loss to show, and whether anybody wants to stop.
            shared = torch.stack((loss, torch.tensor(float(interrupt.requested), device=engine.device)))
            dist.all_reduce(shared)
            history.losses.append(shared[0].item() / dist.get_world_size())
            history.rates.append(rate)
            history.grad_norms.append(engine.get_global_grad_norm() if engine.was_step_applied() else None)
            if step == 0 and dist.get_rank() == 0:
                report.show_start(engine, corpus, options, steps)
            line.update(step + 1, loss=history.losses[-1], lr=rate, grad_norm=history.grad_norms[-1])
            if shared[1].item():
                line.close()
                raise KeyboardInterrupt
    history.tokens_per_second = line.tokens_per_second
    return history


def held_out_loss(engine: Any, corpus: Corpus, options: argparse.Namespace) -> float:
    """Mean loss in nats per byte on text the training never saw. `engine`: or the plain module."""
    engine.eval()
    device = next(engine.parameters()).device
    with torch.no_grad():
        losses = [
            engine(tokens.to(device), targets.to(device)).item()
            for tokens, targets in corpus.held_out_batches(4, 8, options.context)
        ]
    return sum(losses) / len(losses)


def sample_text(engine: Any, options: argparse.Namespace) -> str:
    """What the model writes after `PROMPT`, with marks for what a terminal should not get: control bytes, no UTF-8."""
    engine.eval()
    prompt = torch.tensor([list(PROMPT.encode())], device=engine.device)
    written = engine.module.generate(prompt, SAMPLE_BYTES, seed=options.seed)[0].tolist()
    text = bytes(written).decode(errors="replace")
    return "".join(mark if mark.isprintable() or mark in "\n\t" else "\N{MIDDLE DOT}" for mark in text)


def run(options: argparse.Namespace, interrupt: Interrupt) -> None:
    deepspeed.init_distributed()
    accelerator = get_accelerator()
    on_device = accelerator.device_name() != "cpu"
    config, steps = deepspeed_config(options, prefer_bf16=on_device and accelerator.is_bf16_supported())
    corpus = load_corpus(options.data, options.out, min_bytes=64 * options.context)
    if options.replay_shares:
        accumulation = config.get("gradient_accumulation_steps", 1)
        config["gradient_accumulation_steps"] = accumulation * options.replay_shares // dist.get_world_size()
    engine = build_engine(options, at_stage(config))
    if options.replay:
        checks.replay(engine, options, lambda step: train_step(engine, corpus, options, step))
        return

    history = train(engine, corpus, options, steps, interrupt)
    held_out = held_out_loss(engine, corpus, options)
    text = sample_text(engine, options)
    plain = ByteLlama(model_config(options)).to(next(engine.parameters()).dtype).to(engine.device)
    exported = checks.export(engine, options, plain, lambda model: held_out_loss(model, corpus, options))
    del plain
    resumed = checks.check_resume(engine, options, steps, lambda step: train_step(engine, corpus, options, step))
    memory = checks.memory_by_stage(engine, config, corpus, options, lambda changed: build_engine(options, changed))
    engine.destroy()
    if dist.get_rank() == 0:
        report.show_end(history, held_out, text, resumed, exported, memory, options)
    if not resumed.passed:
        raise SystemExit("the resumed run computed other losses than the one that went on")


def use_own_cores() -> None:
    """Share this machine's cores among its ranks: torch would otherwise start one thread per core in each of them."""
    told = (os.environ.get(name) for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    ranks_here = int(next((value for value in told if value), 1))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // ranks_here))


def main() -> int:
    interrupt = Interrupt()
    sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 shows marks instead of ending the run
    try:
        options = parse_arguments()
        use_own_cores()
        run(options, interrupt)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print("\nstopped by Ctrl-C", flush=True)
        return INTERRUPTED
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
