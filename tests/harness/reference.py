"""Data-parallel mixed-precision training of N ranks, replayed in one process with plain torch.

Owns: what the right numbers are. Written from the definitions (mean over ranks and micro-batches; fp32 masters; one
norm, unscaled, global, before clipping), with every sum taken in a stated order so that bits can be compared:
gradients of one rank add up in the accumulation dtype, ranks add up in fp32 in rank order, the mean is one
multiplication by 1/ranks, and a result is rounded once to the dtype that holds it.
Does not own: anything of the package under test; this file imports torch alone.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

MakeOptimizer = Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer]
LossOfRank = Callable[[nn.Module, int], Tensor]


@dataclass(frozen=True)
class Precision:
    """Dtypes of a run. `accum` None: gradients are held in the parameter's dtype. `comm` None: sent as they are held.

    `loss_scale`: None for no scaling; a number for a static scale; "dynamic" for the scaler described below.
    """

    model: torch.dtype = torch.float32
    accum: torch.dtype | None = None
    comm: torch.dtype | None = None
    autocast: torch.dtype | None = None
    loss_scale: float | str | None = None
    initial_scale: float = 2.0**16
    scale_window: int = 1000
    hysteresis: int = 2
    min_scale: float = 1.0


class Scaler:
    """Loss scale. Dynamic: an overflow halves it (after `hysteresis` - 1 free ones); the clean step that follows a full
    window of `scale_window` clean ones doubles it and refills the hysteresis."""

    def __init__(self, precision: Precision) -> None:
        self.dynamic = precision.loss_scale == "dynamic"
        self.scale = precision.initial_scale if self.dynamic else float(precision.loss_scale or 1.0)
        self._precision = precision
        self._left = precision.hysteresis
        self._step, self._last_overflow = 0, -1

    def update(self, overflow: bool) -> None:
        """Once per boundary."""
        if self.dynamic:
            window = self._precision.scale_window
            if overflow:
                if self._left <= 1:
                    self.scale = max(self.scale / 2, self._precision.min_scale)
                else:
                    self._left -= 1
                self._last_overflow = self._step
            elif (clean := self._step - self._last_overflow - 1) and clean % window == 0:
                self._left = self._precision.hysteresis
                self.scale *= 2
        self._step += 1


class _Autocast:
    """Calls the module under autocast, as an engine does around forward alone."""

    def __init__(self, module: nn.Module, dtype: torch.dtype | None) -> None:
        self._module, self._dtype = module, dtype
        self.parameters = module.parameters

    def __call__(self, *args: object) -> object:
        context = torch.autocast("cpu", self._dtype) if self._dtype else contextlib.nullcontext()
        with context:
            return self._module(*args)


class PlainTrainer:
    """N ranks in one process.

    `stage` decides the order of sums and the roundings, nothing else. In stage 2 the mean over ranks is taken in each
    backward and the means add up; in stages 0 and 1 a rank first adds up its own micro-batches and the mean is taken
    in the backward of the boundary. In stage 0 the mean, rounded to the dtype of the wire, takes the place of what
    each rank holds, and a further backward adds to it.

    `block` (stage 3): blocks of so many neighbours add up by themselves in each backward, and the blocks are added in
    their order, in fp32, when a step is made. Blocks of one rank are stage 0.
    """

    def __init__(
        self,
        module: nn.Module,
        make_optimizer: MakeOptimizer,
        *,
        world_size: int,
        precision: Precision | None = None,
        accumulation: int = 1,
        clip: float = 0.0,
        stage: int = 0,
        block: int | None = None,
    ) -> None:
        self.module, self.world_size, self.accumulation, self.clip = module, world_size, accumulation, clip
        self.precision = precision or Precision()
        self.block = block or world_size
        self.stage = stage if world_size > 1 and self.block > 1 else 0
        for param in module.parameters():
            if param.is_floating_point():
                param.data = param.data.to(self.precision.model)
        self.params = dict(module.named_parameters())
        self.masters = {name: self._make_master(param) for name, param in self.params.items()}
        self.optimizer = make_optimizer(self.masters)
        self.scaler = Scaler(self.precision)
        self.callable = _Autocast(module, self.precision.autocast)
        self.norm = 0.0
        self.skipped_steps = 0
        self.zero_grad()

    @staticmethod
    def _make_master(param: nn.Parameter) -> nn.Parameter:
        if param.dtype == torch.float32:
            return param
        return nn.Parameter(param.detach().float())

    def zero_grad(self) -> None:
        """Forget what has been accumulated since the last boundary."""
        self.local: list[dict[str, Tensor]] = [{} for _ in range(self.world_size)]
        self.reduced: dict[str, Tensor] = {}
        self.parts: dict[int, dict[str, Tensor]] = {}  # sums of blocks that have not been added up yet
        self.touched: set[str] = set()
        self.held_back = False  # gradients have been added since the last reduction

    # -- one micro-batch -------------------------------------------------------------------------------------------

    def backward(self, loss_of_rank: LossOfRank, *, sync: bool = True, boundary: bool = True) -> list[float]:
        """Forward and backward of every rank; returns the losses in rank order, as the model gave them.

        `boundary`: the micro-step ends its window. `sync` False holds the mean over ranks back (no_sync); `step`
        takes it then.
        """
        losses = []
        for rank in range(self.world_size):
            loss = loss_of_rank(self.callable, rank)  # type: ignore[arg-type]
            losses.append(float(loss.detach()))
            self.backward_rank(rank, loss)
        self.held_back = True
        if sync and (boundary or self.stage >= 2):
            self.reduce()
        return losses

    def backward_rank(self, rank: int, loss: Tensor) -> None:
        """Backward of one rank, divided by the number of micro-batches, its gradients added to those it holds."""
        held = self.local[rank]
        for name, param in self.params.items():
            param.grad = held.get(name) if self._accumulates_in_place(param) else None
        if self.accumulation > 1:
            loss = loss / self.accumulation
        if self.precision.loss_scale is not None:
            loss = loss.float() * self.scaler.scale
        loss.backward()
        for name, param in self.params.items():
            if param.grad is None:
                continue
            grad = param.grad.to_dense() if param.grad.is_sparse else param.grad
            if self._accumulates_in_place(param):
                held[name] = grad
            elif name in held:
                held[name] += grad
            else:
                held[name] = grad.to(self._accum_dtype(param))
            param.grad = None

    def _accum_dtype(self, param: Tensor) -> torch.dtype:
        return self.precision.accum or param.dtype

    def _accumulates_in_place(self, param: Tensor) -> bool:
        return self._accum_dtype(param) == param.dtype

    @torch.no_grad()
    def reduce(self) -> None:
        """Mean over ranks of what they hold."""
        self.held_back = False
        if self.stage and self.block < self.world_size:
            self.reduce_blocks()
            return
        for name, param in self.params.items():
            parts = [held.pop(name, None) for held in self.local]
            if all(part is None for part in parts):
                continue
            self.touched.add(name)
            accum = self._accum_dtype(param)
            wire = self.precision.comm or accum
            if self.world_size == 1:
                mean = parts[0].float()  # type: ignore[union-attr]
            else:
                total = torch.zeros_like(param, dtype=torch.float32)
                for part in parts:
                    if part is not None:
                        total += part.to(wire).float()
                mean = total * (1.0 / self.world_size)
            if self.stage == 0:
                self.reduced[name] = mean.to(wire).to(accum) if self.world_size > 1 else mean.to(accum)
                for held in self.local:
                    held[name] = self.reduced[name].clone()
            else:
                self.reduced[name] = (self.reduced[name].float() + mean if name in self.reduced else mean).to(accum)

    def reduce_blocks(self) -> None:
        """Each block's share of the mean over ranks is added to what the block has."""
        for name, param in self.params.items():
            parts = [held.pop(name, None) for held in self.local]
            if all(part is None for part in parts):
                continue
            self.touched.add(name)
            accum = self._accum_dtype(param)
            for first in range(0, self.world_size, self.block):
                total = torch.zeros_like(param, dtype=torch.float32)
                for part in parts[first : first + self.block]:
                    if part is not None:
                        total += part.to(self.precision.comm or accum).float()
                total *= 1.0 / self.world_size
                sums = self.parts.setdefault(first, {})
                sums[name] = (sums[name].float() + total if name in sums else total).to(accum)

    def add_blocks(self) -> None:
        """The mean over ranks from those of the blocks."""
        for name in self.touched if self.parts else ():
            total = sum(self.parts[first][name].float() for first in sorted(self.parts))
            self.reduced[name] = total.to(self._accum_dtype(self.params[name]))  # type: ignore[union-attr]

    # -- the boundary ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, norm_for_clip: float | None = None) -> bool:
        """Reduce, unscale, clip, update; returns whether the update was made (False: gradients overflowed).
        `norm_for_clip`: take this norm for the clipping factor. The caller has compared it with `self.norm`; using it
        makes the rest comparable to the last bit, which the order of a sum of squares otherwise decides.
        """
        if self.held_back:
            self.reduce()
        self.add_blocks()
        gradients = {name: self.reduced[name].float() for name in self.touched}
        squares = sum(float(g.double().square().sum()) for g in gradients.values())
        overflow = not math.isfinite(squares)
        scale = self.scaler.scale
        if overflow and self.precision.loss_scale is not None:
            self.skipped_steps += 1
            self.scaler.update(True)
            self.zero_grad()
            return False
        self.norm = math.sqrt(squares) / scale
        self._update(gradients, scale, self.norm if norm_for_clip is None else norm_for_clip)
        if self.precision.loss_scale is not None:
            self.scaler.update(False)
        self.zero_grad()
        return True

    def _update(self, gradients: dict[str, Tensor], scale: float, norm: float) -> None:
        factor = 1.0 / scale
        if self.clip > 0:
            factor *= min(1.0, self.clip / (norm + 1e-6))
        for name, master in self.masters.items():
            master.grad = gradients[name] * factor if name in self.touched else None
        self.optimizer.step()
        for name, master in self.masters.items():
            master.grad = None
            if master is not self.params[name]:
                self.params[name].copy_(master)

    # -- what to compare -------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, Tensor]:
        """Weights as the model holds them, by name."""
        return {name: param.detach().clone() for name, param in self.params.items()}

    def full_precision_weights(self) -> dict[str, Tensor]:
        """Master weights by name."""
        return {name: master.detach().clone() for name, master in self.masters.items()}

    def states(self, keys: Sequence[str]) -> dict[str, dict[str, Tensor]]:
        """Optimizer states by name and key of the parameters that are not frozen now and have some."""
        found: dict[str, dict[str, Tensor]] = {}
        for name, master in self.masters.items():
            if not self.params[name].requires_grad:
                continue
            state = self.optimizer.state.get(master, {})
            picked = {key: state[key].detach().clone() for key in keys if isinstance(state.get(key), Tensor)}
            if picked:
                found[name] = picked
        return found
