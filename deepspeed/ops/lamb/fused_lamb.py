"""`FusedLamb`: LAMB, layer-wise adaptive rates for large batches.

With m, v the Adam moments and g the gradient of one parameter (You et al., "Large Batch Optimization for Deep Learning:
Training BERT in 76 minutes", ICLR 2020, algorithm 2):

    u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * p
    p -= lr * r * u,   r = clamp(|p| / |u|, min_coeff, max_coeff), and 1 where |p| or |u| is 0

The norms are those of the whole parameter, so the update is not elementwise: it needs parameters uncut.

Parameters on a GPU go to the kernels of `multi_tensor_triton.py` (three launches for all of them), the others to
torch's operations on lists, which say what the numbers are. Norms are summed in another order there, so the two agree
to rounding: 1e-6 of a ratio in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import torch

from deepspeed.ops import multi_tensor
from deepspeed.ops.optimizer_base import StateOptimizer, run_closure

_Pairs = list[tuple[torch.Tensor, torch.Tensor]]

# Parameters are taken together up to this many elements, which bounds the temporary memory (a larger one goes alone).
_BATCH_NUMEL = 1 << 22


class FusedLamb(StateOptimizer):
    """LAMB with a clamped trust ratio. The arithmetic is fp32 (fp64 for fp64 parameters).

    One launch for all norms and one for all updates where parameters are on a GPU.

    State per parameter: `exp_avg`, `exp_avg_sq` (shape of the parameter) and `step` (int).

    Args:
        params: parameters or parameter groups.
        lr, betas, eps, weight_decay: as in AdamW; the decay is part of the direction.
        bias_correction: False leaves out the division of the moments by 1 - beta^step.
        eps_inside_sqrt: sqrt(v + eps) instead of sqrt(v) + eps.
        max_grad_norm: if positive, gradients of a group are scaled down to this global norm first.
        max_coeff, min_coeff: bounds of the trust ratio.
        amsgrad: not supported.
        fp32_optimizer_states: keep the moments of fp16 and bf16 parameters in fp32.

    Raises:
        RuntimeError: `amsgrad=True`; a sparse gradient.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
        *,
        fp32_optimizer_states: bool = False,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedLamb does not support amsgrad=True: LAMB has no such form")
        if not 0 <= min_coeff <= max_coeff:
            raise ValueError(
                f"FusedLamb: min_coeff = {min_coeff}, max_coeff = {max_coeff}; expected 0 <= min_coeff <= max_coeff"
            )
        self.eps_inside_sqrt = eps_inside_sqrt
        self._coeffs: list[torch.Tensor] = []
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(params, defaults, fp32_optimizer_states=fp32_optimizer_states)

    # Whether the kernels for GPUs are used, None before the first use; tables of earlier steps.
    _on_device: bool | None = None
    _cache: multi_tensor.Cache | None = None

    _extra_attributes = (*StateOptimizer._extra_attributes, "eps_inside_sqrt", "_coeffs")

    def get_lamb_coeffs(self) -> list[float]:
        """The trust ratios of the last step, one per updated parameter in the order of the groups."""
        return [float(c) for c in self._coeffs]

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Sequence[Any] | None = None,
        output_params: Sequence[Any] | None = None,
        scale: float = 1.0,
        grad_norms: Sequence[float | torch.Tensor] | None = None,
    ) -> Any:
        """One update; returns the loss of `closure`.

        Args:
            closure: recomputes the loss.
            grads: gradients instead of the parameters' `grad`: a list, or a list of lists, one per group.
            output_params: tensors that get a copy of the new parameters, in the same arrangement.
            scale: gradients are divided by it.
            grad_norms: global norm of the (scaled) gradients of each group, for `max_grad_norm`; computed if None.
        """
        loss = run_closure(closure)
        given_grads = _per_group(grads, len(self.param_groups), "grads")
        given_outputs = _per_group(output_params, len(self.param_groups), "output_params")
        table: multi_tensor.DeviceTable | None = None
        # The ratios of all pairs in order; None: the next one of the table.
        ratios: list[torch.Tensor | None] = []
        for index, group in enumerate(self.param_groups):
            pairs = _pairs(group, given_grads[index])
            divisor = self._divisor(group, pairs, scale, None if grad_norms is None else grad_norms[index])
            taken = [False] * len(pairs)
            if pairs and self._uses_kernels(pairs):
                table = table or multi_tensor.DeviceTable("fused_lamb", self._cache or multi_tensor.Cache())
                taken = self._add(table, group, pairs, divisor)
            found: list[torch.Tensor] = []
            for batch in _batches([pair for pair, there in zip(pairs, taken, strict=True) if not there]):
                found += self._update(group, batch, divisor)
            others = iter(found)
            ratios += [None if there else next(others) for there in taken]
        of_table = iter(() if table is None else table.run())
        self._coeffs = [next(of_table) if ratio is None else ratio for ratio in ratios]
        for group, outputs in zip(self.param_groups, given_outputs, strict=True):
            if outputs is not None:
                for target, param in zip(outputs, group["params"], strict=True):
                    target.copy_(param)
        return loss

    def _uses_kernels(self, pairs: _Pairs) -> bool:
        """Whether there are kernels for the device of these; asked once, when the first tensor off the CPU comes."""
        if self._on_device is None:
            device = next((param.device.type for param, _ in pairs if not param.is_cpu), None)
            if device is None:
                return False
            self._on_device = multi_tensor.usable("fused_lamb", device)
        self._cache = self._cache or multi_tensor.Cache()
        return self._on_device

    def _add(
        self, table: multi_tensor.DeviceTable, group: dict[str, Any], pairs: _Pairs, divisor: float | torch.Tensor
    ) -> list[bool]:
        """Put what the kernels can take into the table; returns which pairs those were."""
        params, grads = (list(column) for column in zip(*pairs, strict=True))
        taken = [True] * len(pairs)
        if not (table.readable(params) and table.readable(grads)):
            taken = list(map(table.readable, pairs))
        states = [self.state[param] for param in params]
        for param, state, there in zip(params, states, taken, strict=True):
            if there and not state:
                self._make_state(param)
        moments = [[state.get(key) for state in states] for key in ("exp_avg", "exp_avg_sq")]
        if not (all(taken) and all(map(table.readable, moments))):
            taken = [
                there and table.readable(pair) for there, pair in zip(taken, zip(*moments, strict=True), strict=True)
            ]
        params, grads, states, *moments = (
            list(compress(column, taken)) for column in (params, grads, states, *moments)
        )
        for state in states:
            state["step"] += 1
        steps = [state["step"] for state in states]
        rules = {step: table.add_rule(self._numbers(group, step, divisor)) for step in set(steps)}
        table.extend(params, grads, moments, None, [rules[step] for step in steps])
        return taken

    def _numbers(self, group: dict[str, Any], step: int, divisor: float | torch.Tensor) -> tuple[Any, ...]:
        """What the kernels need at this step (`_lamb_numbers` in multi_tensor_rules.py)."""
        beta1, beta2 = group["betas"]
        bias1, bias2 = (1 - beta1**step, 1 - beta2**step) if group["bias_correction"] else (1.0, 1.0)
        return (
            *(group["lr"], beta1, beta2, group["eps"], group["weight_decay"], bias1, bias2),
            *(group["min_coeff"], group["max_coeff"], divisor, self.eps_inside_sqrt),
        )

    def _divisor(
        self,
        group: dict[str, Any],
        pairs: _Pairs,
        scale: float,
        norm: float | torch.Tensor | None,
    ) -> float | torch.Tensor:
        """What gradients are divided by: the loss scale, and more where the norm is above `max_grad_norm`."""
        limit = group["max_grad_norm"]
        if limit <= 0 or not pairs:
            return scale
        if norm is None:
            norms = torch._foreach_norm([g.float() if g.dtype.itemsize < 4 else g for _, g in pairs])
            norm = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))
        return scale * (torch.as_tensor(norm) / scale / limit).clamp(min=1.0)

    def _update(
        self,
        group: dict[str, Any],
        pairs: _Pairs,
        divisor: float | torch.Tensor,
    ) -> list[torch.Tensor]:
        """Update by torch; returns the ratios."""
        beta1, beta2 = group["betas"]
        work, grads, exp_avgs, exp_avg_sqs, originals = self._work_copies(pairs)
        if isinstance(divisor, torch.Tensor) or divisor != 1.0:
            grads = [g / divisor for g in grads]
        torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
        torch._foreach_mul_(exp_avg_sqs, beta2)
        torch._foreach_addcmul_(exp_avg_sqs, grads, grads, value=1 - beta2)

        steps = [self.state[p]["step"] for p, _ in pairs]
        corrected = group["bias_correction"]
        denominators = torch._foreach_div(exp_avg_sqs, [1 - beta2**t if corrected else 1.0 for t in steps])
        if self.eps_inside_sqrt:
            torch._foreach_add_(denominators, group["eps"])
            torch._foreach_sqrt_(denominators)
        else:
            torch._foreach_sqrt_(denominators)
            torch._foreach_add_(denominators, group["eps"])
        directions = list(torch._foreach_div(exp_avgs, [1 - beta1**t if corrected else 1.0 for t in steps]))
        torch._foreach_div_(directions, denominators)
        if group["weight_decay"]:
            torch._foreach_add_(directions, work, alpha=group["weight_decay"])

        ratios = _trust_ratios(work, directions, group["min_coeff"], group["max_coeff"])
        torch._foreach_mul_(directions, ratios)
        torch._foreach_mul_(directions, group["lr"])
        torch._foreach_sub_(work, directions)
        for original, copy in originals:
            original.copy_(copy)
        return ratios

    def _work_copies(self, pairs: _Pairs) -> tuple[list[Any], ...]:
        """Tensors to compute with, fp32 unless the parameter is fp64, and the (original, copy) pairs to write back."""
        work: list[torch.Tensor] = []
        grads: list[torch.Tensor] = []
        exp_avgs: list[torch.Tensor] = []
        exp_avg_sqs: list[torch.Tensor] = []
        originals: list[tuple[torch.Tensor, torch.Tensor]] = []
        for param, grad in pairs:
            state = self.state[param]
            if not state:
                self._make_state(param)
            state["step"] += 1
            dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
            grads.append(grad.to(dtype))
            for tensor, column in ((param, work), (state["exp_avg"], exp_avgs), (state["exp_avg_sq"], exp_avg_sqs)):
                copy = tensor.to(dtype)
                column.append(copy)
                if copy is not tensor:
                    originals.append((tensor, copy))
        return work, grads, exp_avgs, exp_avg_sqs, originals

    def _make_state(self, param: torch.Tensor) -> None:
        self.check_param(param)
        state = self.state[param]
        state["step"] = 0
        state["exp_avg"] = self.new_state(param)
        state["exp_avg_sq"] = self.new_state(param)


def _trust_ratios(
    params: list[torch.Tensor], directions: list[torch.Tensor], low: float, high: float
) -> list[torch.Tensor]:
    """|p| / |u| within [low, high] per parameter, 1 where either norm is 0; 0-dim tensors, no host synchronisation."""
    ratios = []
    for p_norm, u_norm in zip(torch._foreach_norm(params), torch._foreach_norm(directions), strict=True):
        usable = (p_norm > 0) & (u_norm > 0)
        ratio = (p_norm / torch.where(usable, u_norm, torch.ones_like(u_norm))).clamp(low, high)
        ratios.append(torch.where(usable, ratio, torch.ones_like(ratio)))
    return ratios


def _pairs(group: dict[str, Any], given: Sequence[Any] | None) -> _Pairs:
    sources = [p.grad for p in group["params"]] if given is None else given
    pairs = [(p, g) for p, g in zip(group["params"], sources, strict=True) if g is not None]
    for param, grad in pairs:
        if grad.is_sparse:
            raise RuntimeError(
                f"FusedLamb got a sparse gradient for a parameter of shape {tuple(param.shape)}; use a dense gradient"
            )
    return pairs


def _batches(pairs: _Pairs) -> list[_Pairs]:
    """Pairs of one device and dtype, together up to `_BATCH_NUMEL` elements."""
    batches: list[_Pairs] = []
    kind: tuple[torch.device, torch.dtype] | None = None
    room = -math.inf
    for param, grad in pairs:
        if (param.device, param.dtype) != kind or param.numel() > room:
            batches.append([])
            kind, room = (param.device, param.dtype), _BATCH_NUMEL
        batches[-1].append((param, grad))
        room -= param.numel()
    return batches


def _per_group(values: Sequence[Any] | None, num_groups: int, what: str) -> list[Sequence[Any] | None]:
    if values is None:
        return [None] * num_groups
    if num_groups == 1 and not (len(values) == 1 and isinstance(values[0], (list, tuple))):
        return [values]
    if len(values) != num_groups or not all(isinstance(v, (list, tuple)) for v in values):
        raise ValueError(f"FusedLamb.step: {what} must hold one list per parameter group ({num_groups})")
    return list(values)
