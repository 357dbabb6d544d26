"""The optimizer's state in a stage 0 tag that DeepSpeed itself wrote.

Three forms: a torch state dict over whole parameters (fp32), the same beside whole masters (``fp32_groups``), and one
over a flat tensor per group beside flat masters (``fp32_groups_flat``). None of them says whose state it is: there are
numbers, in the order in which the parameters were given to the optimizer. Names come from the running optimizer, which
the same script gives the same order, or else from the module when that leaves no choice; shapes must agree.

Owns: naming and indexing these. Does not own: the other stages (``reference/layout.py``).
Invariant: what cannot be named for certain is an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import index as indexing
from deepspeed.checkpoint.constants import FLAT, dtype_name
from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.checkpoint.reference.layout import own_settings
from deepspeed.runtime.zero.layout import ShardLayout
from deepspeed.utils.torch_archive.tensors import is_tensor

if TYPE_CHECKING:
    import torch

_FLAT_MASTERS = "fp32_groups_flat"


class Stage0Optimizer:
    """See the module docstring. ``saved``: the ``optimizer`` entry; ``module``: shapes of the module's parameters in
    their order, aliases left out; ``where``: the file, for errors."""

    def __init__(self, saved: dict[str, Any], module: dict[str, torch.Tensor], where: str) -> None:
        self.saved, self.module, self.where = saved, module, where
        self.plain: dict[str, Any] = saved.get(keys.OPTIMIZER_STATE_DICT, saved)
        self.flat: list[torch.Tensor] = list(saved.get(_FLAT_MASTERS, ()))
        self.masters: list[torch.Tensor] = [tensor for group in saved.get(keys.FP32_GROUPS, ()) for tensor in group]

    @property
    def settings(self) -> list[dict[str, Any]]:
        return [own_settings(group) for group in self.plain[keys.PARAM_GROUPS]]

    def state(self, number: int, group: dict[str, Any]) -> dict[str, Any]:
        """The state under ``number``, with the step where the group counts it."""
        found = dict(self.plain["state"].get(number, {}))
        if found and "step" in group:
            found.setdefault("step", group["step"])
        return found

    # ---- names -----------------------------------------------------------------------------------------------------

    def named_groups(self, orders: Sequence[Sequence[Sequence[str]]]) -> list[list[str]]:
        """The names of every group's parameters. ``orders``: those of the running optimizer, with frozen ones (their
        fp32 optimizers count them) and without (their 16-bit ones do not).

        Raises CheckpointError when neither it nor the module fits.
        """
        groups = self.plain[keys.PARAM_GROUPS]
        if not self.flat and all("param_names" in group for group in groups):
            return [list(group["param_names"]) for group in groups]
        tried: list[str] = []
        for order in orders:
            problem = self._misfit(order)
            if problem is None:
                return [list(group) for group in order]
            if not tried:
                tried.append(f"those of this run's optimizer do not fit ({problem})")
        if len(groups) == 1:
            problem = self._misfit([list(self.module)])
            if problem is None:
                return [list(self.module)]
            tried.append(f"those of the module do not fit ({problem})")
        sizes = [flat.numel() for flat in self.flat] or [len(group["params"]) for group in groups]
        raise CheckpointError(
            f"{self.where}: the optimizer state of stage 0 names no parameters, and the names cannot be told: "
            f"{'; '.join(tried) or 'there is no running optimizer to ask'}. Expected parameter groups of {sizes} "
            f"{'elements' if self.flat else 'parameters'}. Give initialize the parameter groups of the saved run, or "
            "load the weights alone with load_module_only=True"
        )

    def _misfit(self, order: Sequence[Sequence[str]]) -> str | None:
        """Why these names cannot be the ones, or None."""
        groups = self.plain[keys.PARAM_GROUPS]
        if len(order) != len(groups):
            return f"{len(order)} groups, saved were {len(groups)}"
        position = 0
        for number, (listed, group) in enumerate(zip(order, groups, strict=True)):
            unknown = [name for name in listed if name not in self.module]
            if unknown:
                return f"{unknown[0]} is not in the saved module"
            if self.flat:
                numel = sum(self.module[name].numel() for name in listed)
                if numel != self.flat[number].numel():
                    return f"group {number} has {numel} elements, saved were {self.flat[number].numel()}"
                continue
            if len(listed) != len(group["params"]):
                return f"group {number} has {len(listed)} parameters, saved were {len(group['params'])}"
            for offset, (name, saved) in enumerate(zip(listed, group["params"], strict=True)):
                shape, own = self._shape(saved, position + offset), tuple(self.module[name].shape)
                if shape is not None and shape != own:
                    return f"{name} has shape {own}, parameter {offset} of saved group {number} has {shape}"
            position += len(listed)
        return None

    def _shape(self, number: int, position: int) -> tuple[int, ...] | None:
        """Shape of parameter ``number`` as far as its master or its state shows it."""
        if self.masters:
            return tuple(self.masters[position].shape)
        held = self.plain["state"].get(number, {})
        shapes = {tuple(held[key].shape) for key in ("exp_avg", "exp_avg_sq", "momentum_buffer", "sum") if key in held}
        return next(iter(shapes)) if len(shapes) == 1 else None

    # ---- record and index ------------------------------------------------------------------------------------------

    def groups_of_record(self, named: list[list[str]]) -> list[dict[str, Any]]:
        """The record's groups: whole parameters on one rank."""
        aliased = not (self.flat or self.masters)
        made = []
        for number, listed in enumerate(named):
            layout = ShardLayout.by_element([(name, self.module[name].numel()) for name in listed], 1)
            dtype = dtype_name(self.module[listed[0]].dtype) if listed else "float32"
            made.append(
                {
                    "group_index": number,
                    "layout": layout.as_record(),
                    "shapes": [tuple(self.module[name].shape) for name in listed],
                    "dtype": dtype,
                    "master_dtype": dtype if aliased else "float32",
                    "aliased": aliased,
                }
            )
        return made

    def add_to(self, index: indexing.FragmentIndex, named: list[list[str]], file: str) -> None:
        """Add masters and states. Raises CheckpointError for lengths that do not fit."""
        position = 0
        for number, (listed, group) in enumerate(zip(named, self.plain[keys.PARAM_GROUPS], strict=True)):
            offset = 0
            for place, name in enumerate(listed):
                numel = self.module[name].numel()
                if self.flat:
                    state = self.state(group["params"][0], group)
                    found = {indexing.MASTER: self.flat[number], **state}
                else:
                    found = self.state(group["params"][place], group)
                    if self.masters:
                        found = {indexing.MASTER: self.masters[position], **found}
                for key, value in found.items():
                    kind = indexing.kind_of(value, self.flat[number].numel() if self.flat else numel)
                    where = f"optimizer.{number}.{place}.{key}"
                    start = offset if kind == FLAT else 0
                    index.add(name, key, indexing.Extent(file, where, start, 0, numel, kind, value))
                offset += numel if self.flat else 0
                position += 1


def parameters_in(module: dict[str, Any], buffers: Sequence[str]) -> dict[str, torch.Tensor]:
    """The parameters of a saved module state in their order; of names that share their memory, the first."""
    found: dict[str, torch.Tensor] = {}
    seen: set[Any] = set()
    for name, value in module.items():
        if name in buffers or not is_tensor(value):
            continue
        where = (value.data_ptr(), tuple(value.shape), value.dtype)
        if math.prod(value.shape) and where in seen:
            continue
        seen.add(where)
        found[name] = value
    return found
