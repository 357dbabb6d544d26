"""Parameters that no optimizer holds, at stage 3: what each rank's model-states file says and keeps of them.

At lower stages the module's state dict holds every weight. At stage 3 the optimizer-states files hold those the
optimizer updates; the *rest* (frozen parameters, or all of them without an optimizer) is in the model-states files:
``frozen_param_shapes`` names them, ``frozen_param_fragments`` are this rank's elements of each, and the layout record
says which elements those are.

Owns: which parameters these are, and the form of their entries. Does not own: reading them back (``reader.py``).
Invariant: nothing is gathered; every rank makes the same records.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepspeed.runtime.zero.layout import ShardLayout
from deepspeed.runtime.zero.state_dict import dtype_name

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine


@dataclass(frozen=True)
class RestRun:
    """Parameters of one dtype, laid out together; ``fragments`` are this rank's elements by name.  # 1D each"""

    layout: ShardLayout
    dtype: torch.dtype
    params: dict[str, nn.Parameter]
    fragments: dict[str, torch.Tensor]

    def record(self) -> dict[str, Any]:
        """Plain data for the layout record. The layout may have room for parameters that are not listed."""
        return {
            "layout": self.layout.as_record(),
            "names": list(self.params),
            "shapes": [tuple(param.shape) for param in self.params.values()],
            "dtype": dtype_name(self.dtype),
        }


def rest_runs(engine: DeepSpeedEngine, exclude_frozen: bool) -> list[RestRun]:
    """The runs of an engine at stage 3; ``exclude_frozen`` leaves out parameters that do not require grad."""
    groups = engine.zero_optimizer.groups if engine.zero_optimizer is not None else []
    held = {id(param) for group in groups for param in group.params}

    def wanted(param: nn.Parameter) -> bool:
        return id(param) not in held and (param.requires_grad or not exclude_frozen)

    made = _sharded_runs(engine) if engine.sharded_module is not None else _whole_runs(engine, held)
    kept = []
    for run in made:
        params = {name: param for name, param in run.params.items() if wanted(param)}
        if params:
            kept.append(RestRun(run.layout, run.dtype, params, {name: run.fragments[name] for name in params}))
    return kept


def _sharded_runs(engine: DeepSpeedEngine) -> Iterator[RestRun]:
    for group in engine.sharded_module.rest:
        fragments = {name: torch.empty(0, dtype=group.dtype) for name in group.names}
        for bound in group.fragments:
            # Blocks do not cut a parameter in the middle of a piece, so a rank has one fragment of it at most.
            fragments[bound.fragment.name] = bound.model.detach().reshape(-1)
        yield RestRun(group.layout, group.dtype, dict(zip(group.names, group.params, strict=True)), fragments)


def _whole_runs(engine: DeepSpeedEngine, held: set[int]) -> Iterator[RestRun]:
    """One rank: nothing is sharded, its fragment of each parameter is all of it."""
    by_dtype: dict[torch.dtype, dict[str, nn.Parameter]] = {}
    for param in engine.module.parameters():
        if id(param) not in held:
            by_dtype.setdefault(param.dtype, {})[engine.param_names[id(param)]] = param
    for dtype, params in by_dtype.items():
        layout = ShardLayout.by_element([(name, param.numel()) for name, param in params.items()], 1)
        yield RestRun(layout, dtype, params, {name: param.detach().reshape(-1) for name, param in params.items()})


def shapes(runs: list[RestRun]) -> OrderedDict[str, torch.Size]:
    """``name -> whole shape`` of all of them."""
    return OrderedDict((name, param.shape) for run in runs for name, param in run.params.items())


def fragments(runs: list[RestRun]) -> OrderedDict[str, torch.Tensor]:
    """``name -> this rank's elements``.  # 1D, may be empty"""
    return OrderedDict((name, value) for run in runs for name, value in run.fragments.items())
