"""ZenFlow in plain torch: dense, one process, from the definition in docs/offload.md.

Owns: the right numbers of a run with `zero_optimization.zenflow`. Each weight is one dense fp32 master with dense
moments, a mask of important columns and two counts of steps; Adam is torch's fused kernel over whole tensors, of which
the elements in question are taken.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.harness.reference import PlainTrainer

LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.95), 1e-8, 0.1  # of the "adamw" row in parity.py


@dataclass
class _Weight:
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    mask: Tensor  # bool; True: important
    important_steps: int = 0
    steps: int = 0
    pending: Tensor | None = None
    lands: bool = False

    @property
    def columns(self) -> int:
        return self.master.numel() // self.master.shape[0] if self.master.dim() > 1 and self.master.numel() else 1


class ZenFlowTrainer(PlainTrainer):
    """`PlainTrainer` whose update is ZenFlow's; `flow` is the config section with all values given."""

    def __init__(self, *args: Any, flow: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.flow = flow
        self.rounds = self.window = 0
        self.held = {
            name: _Weight(master, torch.zeros_like(master), torch.zeros_like(master), torch.ones_like(master).bool())
            for name, master in ((name, param.detach().float().clone()) for name, param in self.params.items())
        }

    @staticmethod
    def _make_master(param: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(param.detach().float().clone())

    def _update(self, gradients: dict[str, Tensor], scale: float, norm: float) -> None:
        factor = 1.0 / scale
        if self.clip > 0:
            factor *= min(1.0, self.clip / (norm + 1e-6))
        grads = {name: gradients[name] * factor for name in self.params if name in self.touched}
        warm_up, interval = self.flow.get("full_warm_up_rounds", 0), self.flow["select_interval"]
        self.rounds += 1
        if self.rounds <= warm_up:
            for name, grad in grads.items():
                weight = self.held[name]
                weight.steps += 1
                self._adam(weight, grad, weight.steps, torch.ones_like(weight.mask))
                self.params[name].copy_(weight.master)
            return
        if (self.rounds - warm_up - 1) % interval == 0:
            self._land()
            self._apply()
            self._land()
            self._choose(grads)
        ends = self._ends(grads)
        if ends:
            self._land()
        for name, grad in grads.items():
            weight = self.held[name]
            weight.important_steps += 1
            self._adam(weight, grad, weight.important_steps, weight.mask)
            weight.pending = grad.clone() if weight.pending is None else weight.pending + grad
        self.window += 1
        if ends:
            self._apply()
            if not self.flow.get("overlap_step"):
                self._land()
        for name in grads:
            mask = self.held[name].mask
            self.params[name][mask] = self.held[name].master[mask].to(self.params[name].dtype)

    def _ends(self, grads: dict[str, Tensor]) -> bool:
        if self.flow["update_interval"] != "auto":
            return self.window + 1 >= self.flow["update_interval"]
        waiting = [weight for weight in self.held.values() if weight.pending is not None]
        pending = sum(float(weight.pending[~weight.mask].double().square().sum()) for weight in waiting)
        important = sum(float(grad[self.held[name].mask].double().square().sum()) for name, grad in grads.items())
        return self.window > 0 and math.sqrt(pending) > self.flow.get("auto_ratio", 0.99) * math.sqrt(important)

    def _apply(self) -> None:
        for weight in self.held.values():
            if weight.pending is not None:
                weight.steps += 1
                self._adam(weight, weight.pending * (1.0 / self.window), weight.steps, ~weight.mask)
                weight.pending, weight.lands = None, True
        self.window = 0

    def _land(self) -> None:
        for name, weight in self.held.items():
            if weight.lands:
                self.params[name][~weight.mask] = weight.master[~weight.mask].to(self.params[name].dtype)
            weight.lands = False

    def _choose(self, grads: dict[str, Tensor]) -> None:
        first = self.rounds - self.flow.get("full_warm_up_rounds", 0) == 1
        for name, weight in self.held.items():
            columns = weight.columns
            count = max(1, min(columns, round(columns * self.flow["topk_ratio"])))
            before, weight.mask = weight.mask, torch.ones_like(weight.mask)
            if first:
                weight.important_steps = weight.steps
            if count < columns and name not in grads and not first:
                weight.mask = before
            elif count < columns:
                grad = grads.get(name, torch.zeros_like(weight.master))
                sums = grad.reshape(-1, columns).double().square().sum(0)
                chosen = torch.argsort(sums, descending=True, stable=True)[:count]
                weight.mask = torch.zeros(columns, dtype=torch.bool).index_fill_(0, chosen, True)
                weight.mask = weight.mask.expand(weight.master.shape[0], columns).reshape(weight.master.shape)
                if not first:
                    self._correct(weight, before & ~weight.mask, weight.important_steps, weight.steps)
                    self._correct(weight, weight.mask & ~before, weight.steps, weight.important_steps)

    @staticmethod
    def _correct(weight: _Weight, mask: Tensor, old: int, new: int) -> None:
        if old and new and old != new:
            for moment, beta in ((weight.exp_avg, BETAS[0]), (weight.exp_avg_sq, BETAS[1])):
                moment[mask] = moment[mask] * ((1 - beta**new) / (1 - beta**old))

    @staticmethod
    def _adam(weight: _Weight, grad: Tensor, step: int, mask: Tensor) -> None:
        master, exp_avg, exp_avg_sq = (t.clone() for t in (weight.master, weight.exp_avg, weight.exp_avg_sq))
        torch._fused_adamw_(
            [master], [grad], [exp_avg], [exp_avg_sq], [], [torch.tensor(float(step))], lr=LR, beta1=BETAS[0],
            beta2=BETAS[1], weight_decay=DECAY, eps=EPS, amsgrad=False, maximize=False,
        )  # fmt: skip
        weight.master = torch.where(mask, master, weight.master)
        weight.exp_avg = torch.where(mask, exp_avg, weight.exp_avg)
        weight.exp_avg_sq = torch.where(mask, exp_avg_sq, weight.exp_avg_sq)

    # -- what to compare -------------------------------------------------------------------------------------------

    def full_precision_weights(self) -> dict[str, Tensor]:
        return {name: weight.master.clone() for name, weight in self.held.items()}

    def states(self, keys: Any) -> dict[str, dict[str, Tensor]]:
        found = {}
        for name, weight in self.held.items():
            if self.params[name].requires_grad and (weight.steps or weight.important_steps):
                found[name] = {"exp_avg": weight.exp_avg.clone(), "exp_avg_sq": weight.exp_avg_sq.clone()}
        return found
