"""The ``ds_*`` attributes and methods that clients find on parameters at stage 3.

They stand on each parameter itself, in both of its states, and on one rank too, where nothing is sharded. Everything
here can be pickled and copied with the parameter: what points into an engine then comes back as None.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from enum import Enum
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from deepspeed.runtime.zero.param_block import ParamBlock

_param_ids = itertools.count()


class ZeroParamStatus(Enum):
    """Where the data of a sharded parameter is."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ZeroParamType(Enum):
    """What becomes of a parameter: whole on every rank, sharded, or sharded outside the device."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class BlockReference(weakref.ref["ParamBlock"]):
    """The way from a parameter to its block. A pickled or copied parameter has none."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type, (None,)


class Method:
    """``function(param, ...)`` as a method of one parameter, without keeping that alive."""

    __slots__ = ("_function", "_param")

    def __init__(self, param: nn.Parameter, function: Callable[..., Any]) -> None:
        self._param = weakref.ref(param)
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        param = self._param()
        if param is None:
            raise ReferenceError(f"{self._function.__name__}: the parameter no longer exists")
        return self._function(param, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return type, (None,)


class Gathered:
    """Handle of a gather that clients wait for; it has arrived already."""

    def wait(self, **_: Any) -> None:
        """Nothing to wait for."""


def attach(param: Any, *, world: int, persistent: bool = False) -> None:
    """Put the historical attributes on ``param``, all but those that follow the state of a block."""
    param.ds_id = next(_param_ids) if not hasattr(param, "ds_id") else param.ds_id
    param.ds_shape, param.ds_numel = param.shape, param.numel()
    param.ds_persist = persistent
    param.ds_param_type = ZeroParamType.PARTITIONED if world > 1 else ZeroParamType.NORMAL
    param.ds_active_sub_modules = set()
    param._ds_world = world
    for name, function in _METHODS.items():
        setattr(param, name, Method(param, function))


def attach_whole(params: Iterable[nn.Parameter]) -> None:
    """The attributes of parameters that are not sharded, as on one rank: everything is here."""
    param: Any
    for param in params:
        attach(param, world=1)
        param.ds_status = ZeroParamStatus.AVAILABLE
        param.ds_tensor = param.data


def detach(param: nn.Parameter) -> None:
    """Take everything historical off ``param`` again."""
    for name in (*_NAMES, *_METHODS):
        param.__dict__.pop(name, None)


# ---- methods ---------------------------------------------------------------------------------------------------------


def _block(param: Any) -> ParamBlock | None:
    reference = param.__dict__.get("_ds_block")
    return reference() if reference is not None else None


def _listed(param: nn.Parameter, param_list: Any) -> list[nn.Parameter]:
    if param_list is None:
        return [param]
    return [param_list] if isinstance(param_list, nn.Parameter) else list(param_list)


def _all_gather(param: nn.Parameter, param_list: Any = None, async_op: bool = False, hierarchy: int = 0) -> Gathered:
    """Make parameters whole until :func:`_partition`. Collective."""
    wanted: dict[int, ParamBlock] = {}
    for each in _listed(param, param_list):
        block = _block(each)
        if block is not None:
            block.hold(each._ds_position)  # type: ignore[attr-defined]
            wanted[id(block)] = block
    for block in wanted.values():
        block.owner.fetch_all([block])
    return Gathered()


def _all_gather_coalesced(param: nn.Parameter, params: Iterable[nn.Parameter], *_: Any, **__: Any) -> Gathered:
    return _all_gather(param, list(params))


def _partition(
    param: nn.Parameter, param_list: Any = None, backward: bool = False, hierarchy: int = 0,
    has_been_updated: bool = False, free_data: bool = True,
) -> None:  # fmt: skip
    """Let go of what :func:`_all_gather` brought. ``has_been_updated``: each rank's shard takes its edited elements."""
    blocks: dict[int, ParamBlock] = {}
    for each in _listed(param, param_list):
        block = _block(each)
        if block is None:
            continue
        if has_been_updated and block.bound:
            position = each._ds_position  # type: ignore[attr-defined]
            block.take_back(position)
            block.written({position})
        block.unhold(each._ds_position)  # type: ignore[attr-defined]
        blocks[id(block)] = block
    for block in blocks.values():
        block.owner.release([block], drop_edits=not has_been_updated)


def _partition_numel(param: Any) -> int:
    """Elements of the parameter that one rank stores: an equal share, rounded up."""
    numel: int = param.ds_numel
    return -(-numel // param._ds_world)


def _padding_size(param: Any) -> int:
    return _partition_numel(param) * int(param._ds_world) - int(param.ds_numel)


def _summary(param: Any, slice_shape: Any = None, use_debug_name: bool = False) -> dict[str, Any]:
    """What is known about the parameter, as plain data."""
    block = _block(param)
    return {
        "id": block.name_of(param) if use_debug_name and block is not None else param.ds_id,
        "status": param.ds_status.name,
        "numel": param.numel(),
        "ds_numel": param.ds_numel,
        "shape": tuple(param.shape),
        "ds_shape": tuple(param.ds_shape),
        "requires_grad": param.requires_grad,
        "grad_shape": tuple(param.grad.shape) if param.grad is not None else None,
        "persist": param.ds_persist,
        "active_sub_modules": param.ds_active_sub_modules,
        "ds_tensor.shape": tuple(param.ds_tensor.shape),
    }


_METHODS: dict[str, Callable[..., Any]] = {
    "all_gather": _all_gather,
    "all_gather_coalesced": _all_gather_coalesced,
    "partition": _partition,
    "partition_numel": _partition_numel,
    "padding_size": _padding_size,
    "ds_summary": _summary,
}
_NAMES = (
    "ds_id", "ds_shape", "ds_numel", "ds_persist", "ds_param_type", "ds_active_sub_modules",
    "_ds_world", "ds_status", "ds_tensor", "_ds_block", "_ds_position", "_ds_keeper",
)  # fmt: skip
