"""The optimizer's state as data and back: masters, base-optimizer state and hyper-parameters, by fragment.

Encoding: for each shard group and each state key one flat tensor, the fragments of this rank laid end to end in shard
order, without padding. A *table* beside it says which fragments hold the key (a parameter that never had a gradient
has no state) and how the value relates to the parameter:

    flat     one element per parameter element      (exp_avg, momentum_buffer ...)
    scalar   one number per fragment                (step ...)
    tensor   a shape of its own, whole parameter    (factored moments ...)
    plain    not a tensor                           (a Python step count ...)

The *layout record* says where in their parameters these fragments lie, for every rank, in plain data.

At stage 3 nobody else holds the weights, so the flat masters are there for every group: the parameters themselves where
those are their own masters. Two keys have other names then (:func:`masters_key`, :func:`base_state_key`).

Owns: the form of the optimizer part of a checkpoint. Does not own: files, keys of the files' other parts, resharding.
Invariant: encoding reads and never changes; what one rank encodes are exactly the fragments it owns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint.constants import FLAT, PLAIN, SCALAR, TENSOR, base_state_key, dtype_name, masters_key

if TYPE_CHECKING:
    from deepspeed.runtime.zero.optimizer import ZeroOptimizer
    from deepspeed.runtime.zero.shard_group import BoundFragment, ShardGroup

# How a list of tensors of one dtype becomes one 1D value: ``torch.cat`` in memory, a pack in a file.
Join = Callable[[Sequence[torch.Tensor]], Any]

# What a dynamic scaler was configured with; a resumed run keeps its own choice.
_SCALER_SETTINGS = frozenset(
    {
        "scale_factor", "scale_window", "min_scale", "delayed_shift", "consecutive_hysteresis",
        "raise_error_at_min_scale", "dtype", "dynamic",
    }
)  # fmt: skip
# Our bases of several algorithms, which share no state; records of older tags list them.
_NO_ALGORITHM = frozenset({"rowoptimizer", "stateoptimizer"})
_MEMBERS = frozenset({"params", "param_names"})
# How the update runs, not what it computes: a resumed run keeps its own choice.
_IMPLEMENTATION_SETTINGS = _MEMBERS | {"foreach", "fused", "capturable", "differentiable"}


def kind_of(value: Any, leaf: torch.Tensor) -> str:
    """Which of the four kinds a state value of ``leaf`` is."""
    if not isinstance(value, torch.Tensor):
        return PLAIN
    if value.dim() == 0:
        return SCALAR
    return FLAT if value.shape == leaf.shape else TENSOR


# ---- encoding ------------------------------------------------------------------------------------------------------


def layout_record(
    optimizer: ZeroOptimizer | None, axes: dict[str, int], stage: int, rest: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """Plain data: where every rank's fragments lie in their parameters, and the dtypes. The same on every rank.

    ``axes`` are the sizes of the mesh axes; ``rest`` are the runs of sharded parameters that no optimizer holds
    (``checkpoint/rest.py``); ``cuts`` is where a rule per parameter goes that is itself only a part of a larger one
    (tensor, pipeline and expert parallel).
    """
    record: dict[str, Any] = {
        "version": keys.LAYOUT_RECORD_VERSION,
        "axes": dict(axes),
        "zero_stage": int(stage),
        "optimizer": optimizer_families(optimizer.optimizer) if optimizer is not None else [],
        "groups": [_group_record(group) for group in optimizer.groups] if optimizer is not None else [],
        "cuts": {},
    }
    if stage >= 3:
        record["rest"] = list(rest)
    return record


def _group_record(group: ShardGroup) -> dict[str, Any]:
    return {
        "group_index": group.group_index,
        "layout": group.layout.as_record(),
        "shapes": [tuple(shape) for shape in group.shapes],
        "dtype": dtype_name(group.dtype),
        "master_dtype": dtype_name(group.master_dtype),
        "aliased": group.aliased,
    }


def optimizer_families(base: torch.optim.Optimizer) -> list[str]:
    """Names of the classes of ``base``, most special first: two that share one can read each other's state."""
    classes = [cls for cls in type(base).__mro__ if issubclass(cls, torch.optim.Optimizer)]
    named = [family(cls.__name__) for cls in classes if cls is not torch.optim.Optimizer]
    return [name for name in named if name not in _NO_ALGORITHM] or [family(type(base).__name__)]


def related(own: Iterable[str], saved: Iterable[str]) -> bool:
    """Whether an optimizer of the families ``own`` can go on from states of the families ``saved``."""
    return bool(set(own) & (set(map(family, saved)) - _NO_ALGORITHM))


def family(name: str) -> str:
    """The name of the algorithm a class (or the type in a config) implements."""
    plain = name.lower().removeprefix("deepspeed")
    for prefix in ("fused", "cpu", "torch"):
        plain = plain.removeprefix(prefix)
    return {"adamw": "adam", "muonwithauxadam": "muon"}.get(plain, plain)


def masters(optimizer: ZeroOptimizer, join: Join, stage: int) -> list[Any]:
    """One flat master tensor per shard group, this rank's fragments.

    Below stage 3 it is empty where parameters are their own masters: the module holds those.
    """
    return [
        join([] if group.aliased and stage < 3 else [bound.leaf.detach().reshape(-1) for bound in group.fragments])
        for group in optimizer.groups
    ]


def base_state(optimizer: ZeroOptimizer, join: Join) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """``(base_optimizer_state, tables)``: the wrapped optimizer's state in the encoding of the module docstring.

    Raises ValueError naming the parameter and key of a state value that is not plain data, and RuntimeError where a
    failure beside training has spoilt the states.
    """
    optimizer.executors.refuse_spoilt()
    states: dict[int, dict[str, Any]] = {}
    tables = []
    for number, group in enumerate(optimizer.groups):
        states[number], table = _group_state(group, optimizer.optimizer, join)
        tables.append(table)
    leaves = {id(bound.leaf) for group in optimizer.groups for bound in group.fragments}
    extra = {key: value for key, value in optimizer.optimizer.state.items() if id(key) not in leaves}
    lost = [key for key in extra if isinstance(key, torch.Tensor)]
    assert not lost, "the base optimizer holds state of tensors that are no fragments"
    encoded = {"state": states, keys.PARAM_GROUPS: hyper_parameters(optimizer)}
    if extra:
        encoded["extra"] = extra
    return encoded, tables


def _group_state(
    group: ShardGroup, base: torch.optim.Optimizer, join: Join
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    buckets: dict[tuple[str, str, torch.dtype | None], tuple[list[int], list[Any]]] = {}
    for index, bound in enumerate(group.fragments):
        for key, value in base.state.get(bound.leaf, {}).items():
            dtype = value.dtype if isinstance(value, torch.Tensor) else None
            holders, values = buckets.setdefault((key, kind_of(value, bound.leaf), dtype), ([], []))
            if dtype is None and not is_plain(value):
                raise ValueError(
                    f"optimizer state {key!r} of parameter {bound.fragment.name!r} is a {type(value).__name__}; only "
                    "tensors and plain data can be saved"
                )
            holders.append(index)
            values.append(value)
    state: dict[str, Any] = {}
    table: dict[str, dict[str, Any]] = {}
    for (key, kind, _), (holders, values) in buckets.items():
        place = key if key not in state else f"{key}#{len(state)}"
        everyone = len(holders) == len(group.fragments)
        table[place] = {"key": key, "kind": kind, "holders": None if everyone else holders}
        state[place] = join([value.reshape(-1) for value in values]) if kind in (FLAT, SCALAR) else values
    return state, table


def shard_state(optimizer: ZeroOptimizer, stage: int, join: Join) -> dict[str, Any]:
    """What this rank's optimizer-states file holds, without the layout record. Keys: ``checkpoint/constants.py``."""
    encoded, tables = base_state(optimizer, join)
    groups = optimizer.groups
    return {
        keys.LOSS_SCALER: scaler_state(optimizer.loss_scaler),
        keys.DYNAMIC_LOSS_SCALE: bool(getattr(optimizer.loss_scaler, "dynamic", False)),
        keys.OVERFLOW: bool(optimizer.overflow),
        keys.CLIP_GRAD: float(optimizer.clip_grad),
        base_state_key(stage): encoded,
        keys.STATE_TABLES: tables,
        masters_key(stage): masters(optimizer, join, stage),
        keys.ZERO_STAGE: int(stage),
        keys.GROUP_PADDINGS: [0] * len(groups),
        keys.PARAM_ALIGNMENT_PADDINGS: [[0] * len(group.params) for group in groups],
        keys.PARTITION_COUNT: [group.layout.world for group in groups] if stage < 3 else optimizer.shards.world,
        keys.PARAM_SLICE_MAPPINGS: [slice_mappings(group) for group in groups],
    }


def memory_state(optimizer: ZeroOptimizer, stage: int) -> dict[str, Any]:
    """What ``optimizer.state_dict()`` gives: copies, and whose states they are (files have that in the record)."""
    state = shard_state(optimizer, stage, join_in_memory)
    state[keys.OPTIMIZER_FAMILIES] = optimizer_families(optimizer.optimizer)
    return state


def slice_mappings(group: ShardGroup) -> dict[str, list[tuple[int, int]]]:
    """``name -> [(start in this rank's flat tensors, elements)]`` in plain data."""
    found: dict[str, list[tuple[int, int]]] = {}
    offset = 0
    for bound in group.fragments:
        found.setdefault(bound.fragment.name, []).append((offset, bound.fragment.numel))
        offset += bound.fragment.numel
    return found


def scaler_state(scaler: Any) -> dict[str, Any]:
    """A loss scaler as plain data (the constant 1 where there is none)."""
    if scaler is None:
        return {"class": "LossScaler", "cur_scale": 1.0, "dynamic": False}
    return {"class": type(scaler).__name__, **scaler.state_dict()}


def hyper_parameters(optimizer: ZeroOptimizer) -> list[dict[str, Any]]:
    """The base optimizer's parameter groups; ``params`` are the numbers of the shard groups made of them."""
    listed = []
    for index, base_group in enumerate(optimizer.optimizer.param_groups):
        kept = {key: value for key, value in base_group.items() if key not in _MEMBERS and is_plain(value)}
        kept["params"] = [number for number, group in enumerate(optimizer.groups) if group.group_index == index]
        listed.append(kept)
    return listed


def unsaved_settings(optimizer: ZeroOptimizer) -> list[str]:
    """Keys of parameter groups that are not plain data and therefore stay out of checkpoints."""
    return sorted(
        {
            key
            for group in optimizer.optimizer.param_groups
            for key, value in group.items()
            if key not in _MEMBERS and not is_plain(value)
        }
    )


def is_plain(value: Any) -> bool:
    """True for tensors, numbers, text, None, dtypes and lists, tuples and dicts of them."""
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(map(is_plain, value))
    if isinstance(value, dict):
        return type(value) is dict and all(is_plain(key) and is_plain(item) for key, item in value.items())
    return value is None or type(value) in (
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        torch.Tensor,
        torch.dtype,
        torch.Size,
    )


# ---- decoding ------------------------------------------------------------------------------------------------------


def restore_hyper_parameters(optimizer: ZeroOptimizer, index: int, saved: dict[str, Any]) -> None:
    """Parameter group ``index`` of the base optimizer takes the saved values (learning rate, betas ...)."""
    target = optimizer.optimizer.param_groups[index]
    for key, value in saved.items():
        if key not in _IMPLEMENTATION_SETTINGS:
            target[key] = value.clone() if isinstance(value, torch.Tensor) else value


def state_dtype(key: str, saved: torch.dtype, saved_master: torch.dtype, leaf: torch.Tensor) -> torch.dtype:
    """Dtype of a restored state: as saved, unless it followed the master and the master has another dtype now."""
    return leaf.dtype if saved == saved_master and saved_master != leaf.dtype and key != "step" else saved


def scalar_device(key: str, leaf: torch.Tensor, settings: dict[str, Any]) -> torch.device:
    """Torch keeps step counts in host memory unless the update itself runs on the device."""
    on_host = key == "step" and not (settings.get("capturable") or settings.get("fused"))
    return torch.device("cpu") if on_host else leaf.device


def load_shard_state(optimizer: ZeroOptimizer, state: dict[str, Any], states: bool = True) -> None:
    """Take back what :func:`shard_state` gave, on a rank with the same fragments; without ``states`` masters alone.

    Raises ValueError when the fragments differ (another number of ranks, stage or bucket size: those are what
    ``engine.load_checkpoint`` is for), or the states are another optimizer's; nothing is changed then.
    """
    own, theirs = optimizer_families(optimizer.optimizer), state.get(keys.OPTIMIZER_FAMILIES)
    if states and theirs and not related(own, theirs):
        raise ValueError(
            f"this is the state of optimizer {theirs[0]!r}, and {own[0]!r} runs here, which could not go on from it; "
            "load_optimizer_states=False takes the masters alone"
        )
    mappings = [slice_mappings(group) for group in optimizer.groups]
    if state[keys.PARAM_SLICE_MAPPINGS] != mappings:
        raise ValueError(
            "this optimizer state was taken under another layout (ranks, stage, buckets or parameters differ); save it "
            "with engine.save_checkpoint and load it with engine.load_checkpoint"
        )
    stage = int(state[keys.ZERO_STAGE])
    encoded, flat = state[base_state_key(stage)], state[masters_key(stage)]
    optimizer.absorb_edits()  # weights edited before this call are overwritten by it, not the other way round
    for index, saved in enumerate(encoded[keys.PARAM_GROUPS] if states else ()):
        restore_hyper_parameters(optimizer, index, saved)
    for number, group in enumerate(optimizer.groups):
        _load_masters(group, flat[number])
        if states:
            _load_states(optimizer, group, encoded["state"][number], state[keys.STATE_TABLES][number])
    restore_scaler(optimizer.loss_scaler, state[keys.LOSS_SCALER])
    optimizer.publish_masters()
    optimizer.states_loaded(with_states=states)


@torch.no_grad()
def _load_masters(group: ShardGroup, master: torch.Tensor) -> None:
    offset = 0
    for bound in group.fragments:
        if master.numel():
            bound.leaf.detach().view(-1).copy_(master[offset : offset + bound.fragment.numel])
        offset += bound.fragment.numel


@torch.no_grad()
def _load_states(optimizer: ZeroOptimizer, group: ShardGroup, state: dict[str, Any], table: dict[str, Any]) -> None:
    base = optimizer.optimizer
    forget_state(optimizer, group.fragments)
    settings = base.param_groups[group.group_index]
    for place, entry in table.items():
        key, kind, offset = entry["key"], entry["kind"], 0
        holders = range(len(group.fragments)) if entry["holders"] is None else entry["holders"]
        for position, holder in enumerate(holders):
            leaf = group.fragments[holder].leaf
            value = state[place]
            if kind == FLAT:
                restored = value[offset : offset + leaf.numel()].view(leaf.shape).to(leaf.device, copy=True)
                offset += leaf.numel()
            elif kind == SCALAR:
                restored = value[position].to(scalar_device(key, leaf, settings), copy=True)
            else:
                restored = value[position].clone() if kind == TENSOR else value[position]
            base.state[leaf][key] = restored
    optimizer.settle_states(group.fragments)


def join_in_memory(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One 1D copy of the parts."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else torch.empty(0)


def forget_state(optimizer: ZeroOptimizer, fragments: Iterable[BoundFragment]) -> None:
    """These fragments start with fresh base-optimizer state."""
    for bound in fragments:
        optimizer.optimizer.state.pop(bound.leaf, None)


def restore_scaler(scaler: Any, saved: dict[str, Any]) -> str | None:
    """Give ``scaler`` the saved state. Returns why it was not done, or None.

    A constant scale is a setting of the run and not restored; a dynamic one goes on where it was.
    """
    if scaler is None or not getattr(scaler, "dynamic", False):
        return None
    if not saved.get("dynamic"):
        return "the checkpoint holds no dynamic loss scale; it starts at its configured value"
    own = scaler.state_dict()
    scaler.load_state_dict({key: value for key, value in saved.items() if key in own and key not in _SCALER_SETTINGS})
    return None
