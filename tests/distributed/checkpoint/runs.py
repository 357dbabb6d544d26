"""Engines, steps and snapshots for the checkpoint tests.

Owns: a model with everything that gets lost in checkpoints (tied, frozen, unused, zero-size and 0-dim parameters, odd
sizes, buffers of several dtypes, dropout), the whole state of an engine as comparable data, what is logged and raised.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed.checkpoint.errors import CheckpointError
from tests.harness.offload import apart, offloads
from tests.harness.parity import record_step

VOCABULARY = 23
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    # High enough that the first steps overflow: skipped steps, a moving scale and hysteresis are part of the state.
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 2, "hysteresis": 2}},
}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}


class Everything(nn.Module):
    """See the module docstring."""

    def __init__(self, dim: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.frozen = nn.Linear(dim, dim)
        self.frozen.requires_grad_(False)
        self.mix = nn.Linear(dim, 13)
        self.idle = nn.Linear(3, 3)
        self.nothing = nn.Parameter(torch.zeros(0, 5))
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.back = nn.Linear(13, dim)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.full((3,), 0.5))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            self.seen += tokens.numel()
        x = torch.tanh(self.frozen(self.embed(tokens)))
        x = self.drop(torch.tanh(self.mix(x))) * self.gain
        return self.head(torch.tanh(self.back(x)))


class MostlyFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(*[nn.Linear(100, 100) for _ in range(10)])
        self.base.requires_grad_(False)
        self.head = nn.Linear(100, VOCABULARY)
        self.embed = nn.Embedding(VOCABULARY, 100)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.base(self.embed(tokens)))


def build(seed: int = 0, model: type[nn.Module] = Everything) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model()


def config(stage: int, precision: str = "fp32", **top: Any) -> dict[str, Any]:
    """A config with a schedule; keys of ``top`` replace whole sections, ``zero`` adds to its section."""
    zero = top.pop("zero", {})
    if stage == 3:
        zero = {"stage3_gather_16bit_weights_on_model_save": True, **zero}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": ADAMW,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 20}},
        "zero_optimization": {"stage": stage, **zero},
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        **PRECISIONS[precision],
        **top,
    }


def start(settings: dict[str, Any], seed: int = 0, module: nn.Module | None = None, **kwargs: Any) -> Any:
    import deepspeed

    with apart(offloads(settings.get("zero_optimization", {}))):
        engine, *_ = deepspeed.initialize(model=build(seed) if module is None else module, config=settings, **kwargs)
    return engine


def batch(index: int, rank: int, rows: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * index + rank)
    return torch.randint(0, VOCABULARY, (rows, 6), generator=generator)


def step(engine: Any, index: int, rank: int, tokens: Tensor | None = None) -> float:
    """One micro-batch: forward, backward, step; the loss."""
    tokens = batch(index, rank) if tokens is None else tokens
    logits = engine(tokens[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def snapshot(engine: Any, keys: tuple[str, ...] = ("exp_avg", "exp_avg_sq")) -> dict[str, Any]:
    """Everything that must survive, bit by bit. Collective. Takes no random numbers."""
    record = record_step(engine, [], keys)
    optimizer = engine.optimizer
    state: dict[str, Any] = {
        "weights": whole(engine.module),
        "masters": digests(record.masters),
        "states": {name: digests(found) for name, found in record.states.items()},
        "groups": [plain(group) for group in optimizer.param_groups],
        "counters": (engine.global_steps, engine.global_samples, engine.skipped_steps, engine.accumulation.micro_steps),
        "schedule": plain(engine.lr_scheduler.state_dict()) if engine.lr_scheduler is not None else None,
        "random": digests({"torch": torch.get_rng_state()}),
    }
    state["own"] = [own_state(optimizer, bound) for group in optimizer.groups for bound in group.fragments]
    if optimizer.loss_scaler is not None:
        state["scaler"] = {key: str(value) for key, value in optimizer.loss_scaler.state_dict().items()}
    return state


def whole(module: nn.Module) -> dict[str, str]:
    """Digests of a module's state, whole also where it is sharded. Collective."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    with GatheredParameters(list(module.parameters())):
        return digests(module.state_dict())


def own_state(optimizer: Any, bound: Any) -> dict[str, Any]:
    """The base optimizer's state of one fragment: every key, tensors as digests."""
    held = optimizer.optimizer.state.get(bound.leaf, {})
    return {"name": bound.fragment.name, **digests(dict(held.items()))}


def plain(group: dict[str, Any]) -> dict[str, str]:
    return {key: repr(value) for key, value in group.items() if key != "params"}


def digests(tensors: dict[str, Any]) -> dict[str, str]:
    """Shape, dtype and a hash of the bits of each tensor; repr of other values."""
    found = {}
    for name, value in tensors.items():
        if isinstance(value, Tensor):
            bits = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
            found[name] = f"{tuple(value.shape)} {value.dtype} {hashlib.sha256(bits).hexdigest()[:16]}"
        else:
            found[name] = repr(value)
    return found


def differences(left: Any, right: Any, where: str = "") -> list[str]:
    """Paths at which two snapshots differ."""
    if isinstance(left, dict) and isinstance(right, dict):
        return [
            line for key in {**left, **right} for line in differences(left.get(key), right.get(key), f"{where}/{key}")
        ]
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)) and len(left) == len(right):
        return [
            line
            for i, (a, b) in enumerate(zip(left, right, strict=True))
            for line in differences(a, b, f"{where}[{i}]")
        ]
    return [] if left == right else [f"{where}: {left} != {right}"]


def same(left: Any, right: Any) -> None:
    found = differences(left, right)
    assert not found, "\n".join(found[:12])


# ---- what is said and raised -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def lines() -> Iterator[list[str]]:
    """What the package logs in the block."""
    from deepspeed.utils.logging import logger

    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Keep()
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def train(engine: Any, first: int, last: int) -> None:
    for index in range(first, last):
        step(engine, index, dist.get_rank())


def raises(action: Any, *parts: str) -> str:
    """``action`` raises CheckpointError; its text holds ``parts``."""
    with pytest.raises(CheckpointError) as caught:
        action()
    text = str(caught.value)
    missing = [part for part in parts if part not in text]
    assert not missing, f"{missing} not in: {text}"
    return text


def size_of(folder: Path) -> int:
    return sum(entry.stat().st_size for entry in folder.iterdir())
