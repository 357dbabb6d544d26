"""The runs whose checkpoints go from one release to the other, in plain torch: read by both sides.

Owns: the tiny model, the table of cases and their configs. Does not own: saving (``scripts/reference_fixtures.py``) and
comparing (the tests). Invariant: nothing of ``deepspeed`` is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 11
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    # The first steps overflow: skipped steps and a moving scale are part of what is saved.
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 21, "loss_scale_window": 2, "hysteresis": 1}},
    "fp16_static": {"fp16": {"enabled": True, "loss_scale": 128}},
}
ADAM_KEYS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Case:
    """One saved run. ``zero`` adds to its section of the config, ``optimizer`` is a name of ``config``'s table."""

    name: str
    stage: int
    precision: str
    ranks: int
    groups: int = 1
    frozen: bool = False
    tied: bool = False
    optimizer: str = "torch_adamw"
    client: bool = False
    state_keys: tuple[str, ...] = ADAM_KEYS
    zero: dict[str, Any] = field(default_factory=dict)
    top: dict[str, Any] = field(default_factory=dict)
    exclude_frozen: bool = False
    universal: bool = True  # the reference's own converter reads it
    reads_back: bool = True  # the reference's zero_to_fp32 reads it
    converts: bool = True  # a tag of ours can be written in this form
    accessors: bool = True  # the reference's own accessors of masters find the right elements
    steps: int = 3


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "torch_adamw": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
    "adamw": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    "sgd": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
    "adagrad": {"type": "Adagrad", "params": {"lr": 0.1}},
}


class Tiny(nn.Module):
    """Odd sizes, a scalar, buffers of two dtypes; frozen and tied parameters on demand."""

    def __init__(self, frozen: bool, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 5)
        self.still = nn.Linear(5, 5)
        self.mix = nn.Linear(5, 7)
        self.gain = nn.Parameter(torch.tensor([1.5]))
        self.back = nn.Linear(7, 5)
        self.head = nn.Linear(5, VOCABULARY, bias=False)
        if frozen:
            self.still.requires_grad_(False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.full((3,), 0.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += tokens.numel()
        x = torch.tanh(self.still(self.embed(tokens)))
        x = torch.tanh(self.mix(x)) * self.gain
        return self.head(torch.tanh(self.back(x)))


def build(case: Case) -> Tiny:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Tiny(case.frozen, case.tied)


def parameter_groups(case: Case, module: nn.Module) -> Any:
    """What goes to ``initialize`` as ``model_parameters``: trainable ones, in one group or by decay."""
    trainable = [param for param in module.parameters() if param.requires_grad]
    if case.groups == 1:
        return trainable
    return [
        {"params": [param for param in trainable if param.dim() > 1], "weight_decay": 0.1},
        {"params": [param for param in trainable if param.dim() <= 1], "weight_decay": 0.0, "lr": 2e-3},
    ]


def client_optimizer(case: Case, groups: Any) -> Any:
    return torch.optim.AdamW(groups, lr=1e-2) if case.client else None


def config(case: Case, stage: int | None = None, precision: str | None = None, ranks: int | None = None) -> Any:
    """The case's config, or that of another layout."""
    stage = case.stage if stage is None else stage
    made: dict[str, Any] = {
        "train_batch_size": 12,
        "gradient_accumulation_steps": 1,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 20}},
        "zero_optimization": {"stage": stage, **(case.zero if stage == case.stage else {})},
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **PRECISIONS[case.precision if precision is None else precision],
        **case.top,
    }
    if not case.client:
        made["optimizer"] = OPTIMIZERS[case.optimizer]
    return made


def batch(index: int, rank: int, ranks: int) -> torch.Tensor:
    """This rank's rows of global batch ``index``."""
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(0, VOCABULARY, (12, 6), generator=generator)
    share = 12 // ranks
    return tokens[rank * share : (rank + 1) * share]


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def step(engine: Any, index: int, rank: int) -> float:
    """One step of the engine over global batch ``index``; this rank's loss."""
    loss = loss_of(engine, batch(index, rank, torch.distributed.get_world_size()))
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def _table(*listed: Case) -> dict[str, Case]:
    return {case.name: case for case in listed}


CASES = _table(
    Case("stage0_fp32", 0, "fp32", 2, groups=2, frozen=True, tied=True),
    Case("stage0_bf16", 0, "bf16", 1, groups=2, tied=True),
    Case("stage0_fp16", 0, "fp16", 2, frozen=True, steps=5),
    Case("stage1_fp32", 1, "fp32", 3, groups=2, frozen=True, tied=True),
    Case(
        "stage1_bf16",
        1,
        "bf16",
        2,
        groups=2,
        tied=True,
        top={"data_types": {"grad_accum_dtype": "fp32"}},
        reads_back=False,
    ),
    Case("stage1_bf16_grads", 1, "bf16", 4, frozen=True),
    Case("stage1_fp16", 1, "fp16", 2, steps=5),
    Case("stage2_fp32", 2, "fp32", 3, groups=2, zero={"round_robin_gradients": True}, universal=False, accessors=False),
    Case("stage2_bf16", 2, "bf16", 2, groups=2, frozen=True, tied=True),
    Case("stage2_fp16_static", 2, "fp16_static", 1, client=True, tied=True),
    Case("stage2_elastic", 2, "fp32", 2, groups=2, zero={"elastic_checkpoint": True}, universal=False, converts=False),
    Case("stage3_fp32", 3, "fp32", 2, groups=2, frozen=True, tied=True, zero={"sub_group_size": 20}),
    Case("stage3_bf16", 3, "bf16", 3, frozen=True),
    Case("stage3_fp16", 3, "fp16", 2, groups=2, steps=5),
    Case("stage2_sgd", 2, "fp32", 2, optimizer="sgd", state_keys=("momentum_buffer",), universal=False),
)
