"""Moving an engine's states to host memory and back between phases of training (``engine.offload_states``).

For RLHF and the like, where two models take turns on one device. This is not ZeRO-Offload: nothing is computed while
states are away, and all of them come back before the next step.

Owns: which tensors a kind of state is made of, and the move. Invariants: tensor objects stay the same, only their data
moves, so every view and name stays valid; while states are away they can be read (checkpoints, ``safe_get_*``) but no
backward or step runs.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from deepspeed.accelerator.real_accelerator import get_accelerator
from deepspeed.runtime.swap_tensor.host_store import HOST, HostMemory
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.utils.argument_checks import flag
from deepspeed.utils.logging import logger

if TYPE_CHECKING:
    from deepspeed.runtime.zero.optimizer import ZeroOptimizer
    from deepspeed.runtime.zero.shard_group import ShardGroup

__all__ = [
    "get_state_devices",
    "offload_adam_states",
    "offload_optimizer_states",
    "offload_zero_states",
    "reload_adam_states",
    "reload_optimizer_states",
    "reload_zero_states",
]


class StatesAway:
    """What :func:`offload_zero_states` has moved, and where it came from."""

    def __init__(self) -> None:
        self.kinds: set[OffloadStateTypeEnum] = set()
        self.host: HostMemory | None = None
        self.devices: dict[OffloadStateTypeEnum, torch.device] = {}

    def refuse(self, call: str) -> None:
        """Raise RuntimeError if anything is away."""
        if self.kinds:
            kinds = ", ".join(sorted(kind.value for kind in self.kinds))
            raise RuntimeError(f"{call}: {kinds} are in host memory since offload_states(); call reload_states() first")


def offload_zero_states(
    optimizer: ZeroOptimizer,
    include: Container[OffloadStateTypeEnum] | None = None,
    device: OffloadDeviceEnum = OffloadDeviceEnum.cpu,
    pin_memory: bool = True,
    non_blocking: bool = False,
) -> None:
    """Move the kinds of state in ``include`` (default: all) to host memory. Local.

    Args:
        pin_memory: page-locked memory, faster both ways.
        non_blocking: return while copies are on their way (device memory is free once they are done). Synchronize
            the device before states are read.

    Raises:
        ValueError: device nvme, an unknown device, an unknown kind of state.
        TypeError: ``include`` is one kind and not a list of them.
    """
    wanted = _kinds(include)
    device = _target(device)
    if device is OffloadDeviceEnum.none:
        logger.warning('offload_states: device "none" moves nothing')
        return
    if device is not OffloadDeviceEnum.cpu:
        raise ValueError(f"offload_states: device {device.value!r}; states can be moved to 'cpu' alone")
    away = optimizer.away
    away.host = away.host or HostMemory(pin=pin_memory)
    for kind in wanted:
        if kind in away.kinds:
            continue
        away.kinds.add(kind)
        if kind is OffloadStateTypeEnum.contiguous_grad_buffer:
            _drop_buckets(optimizer)
            continue
        if kind is OffloadStateTypeEnum.lp_params and optimizer.sharding is not None:
            optimizer.absorb_edits()
            optimizer.sharding.gatherer.release_all()
        tensors = list(_tensors(optimizer, kind))
        away.devices[kind] = next((tensor.device for tensor in tensors), HOST)
        _move(tensors, HOST, away.host, non_blocking=non_blocking)
        if kind is OffloadStateTypeEnum.lp_params:
            _mark_blocks(optimizer, offloaded=True)
    if not non_blocking:
        get_accelerator().synchronize()


def _kinds(include: Container[OffloadStateTypeEnum] | None) -> list[OffloadStateTypeEnum]:
    """What ``include`` names, in the order of the enumeration."""
    known = [kind.value for kind in OffloadStateTypeEnum]
    if include is None:
        return list(OffloadStateTypeEnum)
    if isinstance(include, str):  # a member is a text too, whose parts would be looked for
        raise TypeError(f"offload_states: include={str.__str__(include)!r}; expected a list of kinds: {known}")
    unknown = [item for item in include if item not in known] if isinstance(include, Iterable) else []
    if unknown:
        raise ValueError(f"offload_states: include has {', '.join(map(repr, unknown))}; known kinds are {known}")
    return [kind for kind in OffloadStateTypeEnum if kind in include]


def _target(device: Any) -> OffloadDeviceEnum:
    try:
        return OffloadDeviceEnum(device)
    except ValueError:
        raise ValueError(f"offload_states: device {device!r}; states can be moved to 'cpu' alone") from None


def reload_zero_states(optimizer: ZeroOptimizer, non_blocking: bool = False) -> None:
    """Move everything back that :func:`offload_zero_states` has moved. Local. Raises TypeError for a list of kinds."""
    flag(non_blocking, "reload_states(non_blocking), which moves all kinds of state back")
    away = optimizer.away
    for kind in list(away.kinds):
        if kind in away.devices:
            _move(list(_tensors(optimizer, kind)), away.devices.pop(kind), None, non_blocking=non_blocking)
        if kind is OffloadStateTypeEnum.lp_params:
            _mark_blocks(optimizer, offloaded=False)
        away.kinds.discard(kind)
    if not non_blocking or away.host is not None:
        get_accelerator().synchronize()  # before the host memory goes
    if away.host is not None:
        away.host.release()
        away.host = None


def get_state_devices(model: Any, state: OffloadStateTypeEnum) -> set[torch.device]:
    """The devices that a kind of state of an engine (or optimizer) is on; empty where it has none."""
    optimizer = getattr(model, "zero_optimizer", None) or getattr(model, "optimizer", model)
    if state is OffloadStateTypeEnum.contiguous_grad_buffer:
        held = optimizer.workspace._storage
        return {held.device} if held is not None else set()
    return {tensor.device for tensor in _tensors(optimizer, OffloadStateTypeEnum(state))}


# ---- any torch optimizer -------------------------------------------------------------------------------------------


def offload_optimizer_states(
    optimizer: torch.optim.Optimizer, device: Any, pin_memory: bool = False, non_blocking: bool = False
) -> None:
    """Move the state tensors of a torch optimizer to ``device``; parameters stay."""
    target = torch.device(device)
    host = HostMemory(pin=pin_memory) if target.type == "cpu" else None
    _move(list(_state_tensors(optimizer)), target, host, non_blocking=non_blocking)
    if host is not None:
        optimizer._ds_state_host = host  # type: ignore[attr-defined]  # locked as long as the states are there
        if not non_blocking:
            get_accelerator().synchronize()


def reload_optimizer_states(optimizer: torch.optim.Optimizer, device: Any, non_blocking: bool = False) -> None:
    """Move them back to ``device``."""
    _move(list(_state_tensors(optimizer)), torch.device(device), None, non_blocking=non_blocking)
    host = optimizer.__dict__.pop("_ds_state_host", None)
    if host is not None:
        get_accelerator().synchronize()
        host.release()


offload_adam_states = offload_optimizer_states
reload_adam_states = reload_optimizer_states


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor) and value.dim())


# ---- what a kind is made of ----------------------------------------------------------------------------------------


def _tensors(optimizer: ZeroOptimizer, kind: OffloadStateTypeEnum) -> Iterator[torch.Tensor]:
    groups = [group for group in optimizer.groups if not group.offloaded]
    leaves = {id(bound.leaf) for group in groups for bound in group.fragments}
    if kind is OffloadStateTypeEnum.optim_states:
        for leaf, state in optimizer.optimizer.state.items():
            if id(leaf) in leaves:
                yield from (value for value in state.values() if isinstance(value, torch.Tensor) and value.dim())
    for group in groups:
        if kind is OffloadStateTypeEnum.hp_params and group.master is not None:
            yield group.master
            yield from (bound.leaf for bound in group.fragments)
        if kind is OffloadStateTypeEnum.lp_grads:
            held = [*group.grads, *group.accum, *(param.grad for param in group.params)]
            yield from (tensor for tensor in held if tensor is not None and not tensor.is_sparse)
    if kind is OffloadStateTypeEnum.lp_params:
        rest = optimizer.sharding.rest if optimizer.sharding is not None else []
        for group in [*optimizer.groups, *rest]:
            if group.model_home is None:
                yield from _weights(group)


def _weights(group: ShardGroup) -> Iterator[torch.Tensor]:
    for bound in group.fragments:
        yield bound.model
        if group.aliased:
            yield bound.leaf
    if group.shard is None:
        yield from group.params
        yield from (home for home in group.homes if home is not None)
        if group.flat is not None:
            yield group.flat
        return
    yield group.shard
    for block in group.blocks:
        yield block.shard
        for place in block.places:
            yield place.param.ds_tensor  # type: ignore[attr-defined]


def _mark_blocks(optimizer: ZeroOptimizer, *, offloaded: bool) -> None:
    """Blocks whose shards are away are gathered as those of ``offload_param`` are."""
    rest = optimizer.sharding.rest if optimizer.sharding is not None else []
    for group in [*optimizer.groups, *rest]:
        for block in group.blocks if group.model_home is None else ():
            block.offloaded = offloaded


def _drop_buckets(optimizer: ZeroOptimizer) -> None:
    """The bucket's memory is scratch between steps: it is made again when the next gradient comes."""
    optimizer.reducer.wait()
    optimizer.workspace.drop()
    for bucket in getattr(optimizer.reducer, "buckets", ()):
        bucket.forget_views()


@torch.no_grad()
def _move(
    tensors: Iterable[torch.Tensor], device: torch.device, host: HostMemory | None, *, non_blocking: bool
) -> None:
    """Give ``tensors`` copies of their data on ``device``; those that shared a storage share one again."""
    sharing: dict[int, tuple[torch.UntypedStorage, list[torch.Tensor]]] = {}
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        storage = tensor.untyped_storage()
        if storage.nbytes():
            sharing.setdefault(storage._cdata, (storage, []))[1].append(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        for storage, views in sharing.values():
            source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            if host is not None:
                whole = host.zeros(storage.nbytes(), torch.uint8, storage.device)
            else:
                whole = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
            whole.copy_(source, non_blocking=non_blocking or host is not None)
            for view in views:
                elements = whole.view(view.dtype)
                view.data = elements.as_strided(view.shape, view.stride(), view.storage_offset())
