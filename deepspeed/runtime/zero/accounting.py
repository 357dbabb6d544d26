"""Bytes of model state: what a rank holds at this moment, and what the formula of its stage says it should hold.

Kinds: parameter, gathered, secondary (copies of blocks), gradient, master, optimizer, workspace; and, where states are
offloaded, host: masters, states and gradients in host memory, and disk: masters and states in files. The kinds without
``host`` and ``disk`` are the device's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from deepspeed.runtime.zero.optimizer import ZeroOptimizer


def held_bytes(optimizer: ZeroOptimizer) -> dict[str, int]:
    """Bytes this rank holds now, by kind. Storages count once."""
    seen: set[tuple[torch.device, int]] = set()
    totals = {"parameter": 0, "gradient": 0, "master": 0, "optimizer": 0, "gathered": 0, "secondary": 0}
    totals |= _extra_kinds(optimizer)

    def add(kind: str, tensor: torch.Tensor) -> None:
        if tensor.is_sparse:
            for part in (tensor._indices(), tensor._values()):
                add(kind, part)
            return
        storage = tensor.untyped_storage()
        key = (tensor.device, storage.data_ptr())
        if storage.nbytes() and key not in seen:
            seen.add(key)
            totals[kind] += storage.nbytes()

    rest = optimizer.sharding.rest if optimizer.sharding is not None else []
    for group in [*optimizer.groups, *rest]:
        for kind, tensor in group.storages():
            add(kind, tensor)
    if optimizer.sharding is None:
        for _, param in optimizer.frozen:
            add("parameter", param)
    homes = {
        id(bound.leaf): "disk" if group.on_disk else "host"
        for group in optimizer.groups
        if group.offloaded
        for bound in group.fragments
    }
    for leaf, state in list(optimizer.optimizer.state.items()):
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.dim() and homes.get(id(leaf)) != "disk":
                add(homes.get(id(leaf), "optimizer"), value)
    if optimizer.executors.zenflow is not None:
        for kind, tensor in optimizer.executors.zenflow.storages():
            add(kind, tensor)
    if optimizer.executors.disk is not None:
        totals["host"] += optimizer.executors.disk.store.host_nbytes
        totals["disk"] += optimizer.executors.disk.store.nbytes
    totals["workspace"] = optimizer.workspace.nbytes
    return totals


def expected_bytes(optimizer: ZeroOptimizer) -> dict[str, int]:
    """The stage's formula for this model: see docs/zero.md. Kinds as above."""
    width = _state_width(optimizer)
    placement = optimizer.placement
    totals = {"parameter": 0, "gradient": 0, "master": 0, "optimizer": 0}
    totals |= _extra_kinds(optimizer)
    for group in optimizer.groups:
        numel = group.layout.param_numel
        share = group.world
        piled = group.accum_dtype.itemsize if optimizer.options.accumulates else group.dtype.itemsize
        home = "parameter" if group.model_home is None else group.model_home.kind
        totals[home] += numel * group.dtype.itemsize // (share if placement.parameter_sharded else 1)
        states = int(width * numel * group.master_dtype.itemsize) // share
        if group.offloaded:
            totals["disk" if group.on_disk else "host"] += states + numel * group.master_dtype.itemsize // share
            totals["host"] += numel * group.accum_dtype.itemsize // share
            if group.sharded and not placement.reduces_every_backward:
                totals["gradient"] += numel * piled
            continue
        if placement.reduces_every_backward:
            totals["gradient"] += numel * group.accum_dtype.itemsize // share
        else:
            totals["gradient"] += numel * piled
        if not group.aliased:
            totals["master"] += numel * group.master_dtype.itemsize // share
        totals["optimizer"] += states
    zenflow = optimizer.executors.zenflow
    for kind, nbytes in zenflow.expected_bytes().items() if zenflow is not None else ():
        totals[kind] += nbytes
    share = optimizer.shards.world if placement.parameter_sharded else 1
    totals["parameter"] += sum(param.numel() * param.element_size() for _, param in optimizer.frozen) // share
    if optimizer.sharding is not None and optimizer.sharding.secondary_ranks:
        totals["secondary"] = totals["parameter"] * share // optimizer.sharding.secondary_ranks
    return totals


def _extra_kinds(optimizer: ZeroOptimizer) -> dict[str, int]:
    home = optimizer.sharding.host if optimizer.sharding is not None else None
    kinds = {"host": 0} if any(group.offloaded for group in optimizer.groups) else {}
    kinds |= {home.kind: 0} if home is not None else {}
    return kinds | ({"disk": 0} if optimizer.executors.disk is not None else {})


def _state_width(optimizer: ZeroOptimizer) -> float:
    """State elements per parameter element: measured once there is state, else by the optimizer's kind."""
    base = optimizer.optimizer
    held = elements = 0
    for group in optimizer.groups:
        for bound in group.fragments:
            state = base.state.get(bound.leaf)
            if state and bound.leaf.numel() > 1:
                elements += bound.leaf.numel()
                held += sum(v.numel() for v in state.values() if isinstance(v, torch.Tensor) and v.numel() > 1)
    if elements:
        return held / elements
    name = type(base).__name__.lower()
    if "sgd" in name:
        return 1.0 if any(group.get("momentum") for group in base.param_groups) else 0.0
    return 1.0 if any(kind in name for kind in ("lion", "adagrad", "muon")) else 2.0
