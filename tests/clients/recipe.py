"""Tiny models, data and the plain PyTorch loop that every client is compared with.

Owns: models from config classes, token data, recording what a client really fed to the model, and `plain_run`, the
same recipe without any library. Does not own: how a client is driven (the test modules).
Invariant: clients are imported inside functions, so that this module also imports where they are not installed.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

VOCAB, LENGTH = 128, 16


def llama(seed: int = 1, **changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "use_cache": False,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**settings, **changes}))


def gpt2(seed: int = 1, **changes: Any) -> Any:
    """Tied input and output embeddings, and a dropout that is off."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return GPT2LMHeadModel(GPT2Config(**{**settings, **changes}))


def trainer_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss as the Trainer forms it: where it does not know that a model shifts its labels, the first one counts."""
    unshifted = getattr(model, "loss_type", None) is None
    return model(**batch).loss * ((LENGTH - 1) / LENGTH if unshifted else 1.0)


class Tokens(torch.utils.data.Dataset):
    """`count` rows of LENGTH token ids; learnable: each row counts upwards from a random start."""

    def __init__(self, count: int = 64, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        start = torch.randint(3, VOCAB, (count, 1), generator=generator)
        self.rows = (start + torch.arange(LENGTH)) % (VOCAB - 3) + 3

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def zero_config(stage: int, **changes: Any) -> dict[str, Any]:
    """The config file most users of the Trainer start from: everything the client can fill in is "auto"."""
    config: dict[str, Any] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto",
                "warmup_type": "linear",
            },
        },
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1e9,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }  # fmt: skip
    zero = changes.pop("zero_optimization", {})
    config["zero_optimization"].update(zero)
    config.update(changes)
    return {key: value for key, value in config.items() if value is not None}


def rank() -> int:
    return int(os.environ["RANK"])


def full_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all weights in fp32, whole on every rank at any stage."""
    import deepspeed

    params = list(model.parameters())
    with deepspeed.zero.GatheredParameters(params):
        return {name: param.detach().clone().float() for name, param in model.named_parameters()}


def record(model: nn.Module) -> list[dict[str, torch.Tensor]]:
    """Every batch this rank's model is called with while it trains, in order."""
    seen: list[dict[str, torch.Tensor]] = []

    def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if module.training and torch.is_grad_enabled():
            kept = {key: value.clone() for key, value in kwargs.items() if isinstance(value, torch.Tensor)}
            seen.append({key: kept[key] for key in ("input_ids", "labels", "attention_mask") if key in kept})

    model.register_forward_pre_hook(note, with_kwargs=True)
    return seen


def windows(seen: Sequence[Any], accumulation: int) -> list[list[Any]]:
    """Batches of all ranks, grouped by optimizer step. Collective."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, list(seen))
    steps = len(seen) // accumulation
    return [
        [batch for own in everyone for batch in own[step * accumulation : (step + 1) * accumulation]]
        for step in range(steps)
    ]


@dataclass
class Plain:
    """What the loop without a library gives."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def one_group(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """What an optimizer of the config gets: everything that trains, decayed alike."""
    return [{"params": [param for param in model.parameters() if param.requires_grad], "weight_decay": decay}]


def matrices_decayed(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """The groups of an optimizer the Trainer makes itself."""
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    plain = {id(param) for name, param in named if param.dim() < 2}  # biases and the weights of norms
    return [
        {"params": [param for _, param in named if id(param) not in plain], "weight_decay": decay},
        {"params": [param for _, param in named if id(param) in plain], "weight_decay": 0.0},
    ]


def plain_run(
    model: Any,
    data: Sequence[Sequence[dict[str, torch.Tensor]]],
    rate: Callable[[int], float],
    *,
    clip: float = 1.0,
    decay: float = 0.0,
    groups: Callable[[nn.Module, float], list[dict[str, Any]]] = one_group,
    dtype: torch.dtype = torch.float32,
    loss_of: Callable[[Any, dict[str, torch.Tensor]], torch.Tensor] | None = None,
) -> Plain:
    """One process, one batch after another, fp32 masters; the mean of the losses of a window is minimised.

    ``rate(n)`` is the learning rate of update n (from 0). All batches must weigh the same, so that the mean of means
    is the mean. ``dtype``: what forward and backward run in.
    """
    masters = model.train()
    trained = [param for group in groups(masters, decay) for param in group["params"]]
    optimizer = torch.optim.AdamW(groups(masters, decay), lr=1.0)
    worker = masters if dtype == torch.float32 else copy.deepcopy(masters).to(dtype)
    pairs = [(a, b) for a, b in zip(masters.parameters(), worker.parameters(), strict=True) if a.requires_grad]
    out = Plain()
    for number, window in enumerate(data):
        for group in optimizer.param_groups:
            group["lr"] = rate(number)
        sums: list[torch.Tensor | None] = [None] * len(pairs)
        losses = []
        for batch in window:
            loss = loss_of(worker, batch) if loss_of is not None else worker(**batch).loss
            losses.append(float(loss.detach()))
            (loss / len(window)).backward()
            if dtype != torch.float32:
                for index, (_, param) in enumerate(pairs):
                    if param.grad is not None:
                        grad, param.grad = param.grad.float(), None
                        sums[index] = grad if sums[index] is None else sums[index] + grad
        if dtype != torch.float32:
            for (master, _), total in zip(pairs, sums, strict=True):
                master.grad = total
        norm = nn.utils.clip_grad_norm_(trained, clip if clip else float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        if dtype != torch.float32:
            with torch.no_grad():
                for master, param in pairs:
                    param.copy_(master)
        out.losses.append(sum(losses) / len(losses))
        out.norms.append(float(norm))
        out.rates.append(rate(number))
    out.weights = {name: param.detach().clone().float() for name, param in worker.named_parameters()}
    return out


def warmup_decay(peak: float, warmup: int, total: int) -> Callable[[int], float]:
    """The rate WarmupDecayLR (linear) gives update n: position n - 1, and the start before the first ``step()``."""

    def rate(number: int) -> float:
        position = max(0, number - 1)
        if position < warmup:
            return peak * position / warmup
        return peak * max(0.0, (total - position) / max(1.0, total - warmup))

    return rate


def assert_close(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], worst: float, relative: float = 0.0
) -> None:
    """Same names, and no element further apart than ``worst`` + ``relative`` of itself."""
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    for name, value in found.items():
        wanted = expected[name].float()
        apart = (value.float() - wanted).abs()
        over = (apart - worst - relative * wanted.abs()).max().item()
        assert over <= 0, f"{name}: up to {apart.max().item():.3g} apart, allowed {worst:g} + {relative:g} of the value"


def assert_numbers(found: Sequence[float], expected: Sequence[float], relative: float, what: str) -> None:
    assert len(found) == len(expected), f"{what}: {len(found)} values, expected {len(expected)}: {found}"
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert abs(a - b) <= relative * max(abs(b), 1e-6), f"{what} of step {number + 1}: {a!r}, plain loop {b!r}"
