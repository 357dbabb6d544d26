"""Where the elements lie in a tag that DeepSpeed itself wrote, as the layout record its files do not have.

Stages 1 and 2: the parameters of an optimizer group end to end (each followed by its alignment padding), padded at the
end, cut into one partition per rank. Stage 3: every parameter padded to a multiple of the number of ranks and cut; a
rank's pieces end to end, closed into a *sub-group* whenever ``sub_group_size`` is reached. In the words of
``runtime/zero/layout.py``: one segment for a whole group, and one segment per parameter.

Owns: this arithmetic, the check of every shard against it, and filling a :class:`~.index.FragmentIndex` from shards.
Does not own: opening files, stage 0 (``reference/stage0.py``).
Invariant: what is filled in fits the lengths of the tensors and the mappings the file gives; else it is an error.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import index as indexing
from deepspeed.checkpoint.constants import FLAT, PLAIN, SCALAR, base_state_key, dtype_name, masters_key
from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.runtime.zero.layout import ShardLayout
from deepspeed.utils.torch_archive.tensors import is_tensor

if TYPE_CHECKING:
    import torch

Shapes = Sequence["OrderedDict[str, torch.Size]"]

# Which optimizers keep these states, for files that do not say which one wrote them.
_FAMILIES_BY_STATE = {
    frozenset({"exp_avg", "exp_avg_sq"}): ["adam", "lamb"],
    frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}): ["adam"],
    frozenset({"exp_avg"}): ["lion"],
    frozenset({"momentum_buffer"}): ["sgd", "muon"],
    frozenset({"momentum_buffer", "exp_avg", "exp_avg_sq"}): ["muon"],
    frozenset({"sum"}): ["adagrad"],
    frozenset({"square_avg"}): ["rmsprop"],
}
_PER_ELEMENT = frozenset(key for states in _FAMILIES_BY_STATE for key in states)
_FAMILY_OF_TYPE = {
    "adam": "adam", "adamw": "adam", "muadam": "adam", "muadamw": "adam", "lamb": "lamb", "lion": "lion", "sgd": "sgd",
    "musgd": "sgd", "adagrad": "adagrad", "muon": "muon", "rmsprop": "rmsprop",
}  # fmt: skip


def record_of(
    stage: int, groups: list[dict[str, Any]], rest: list[dict[str, Any]], world: int, families: list[str]
) -> dict[str, Any]:
    """A layout record as ``runtime/zero/state_dict.py`` makes it."""
    record: dict[str, Any] = {
        "version": keys.LAYOUT_RECORD_VERSION,
        "axes": {"dp": world, "sp": 1, "tp": 1, "pp": 1, "ep": 1},
        "zero_stage": stage,
        "optimizer": families,
        "groups": groups,
        "cuts": {},
    }
    if stage >= 3:
        record["rest"] = rest
    return record


def families_of(config: Any, states: Iterable[dict[str, Any]]) -> list[str]:
    """Which optimizers could go on from these states: the one of the saved config, where the states are of its kind.

    ``states``: one dict of state values per parameter or flat group. An optimizer given as an object is not in the
    config. Raises nothing; an unknown one is named by its state keys.
    """
    held = frozenset(
        key for state in states for key, value in state.items() if key != "step" and is_tensor(value) and value.dim()
    )
    section = config.get("optimizer") if isinstance(config, dict) else None
    named = str(section.get("type", "")).lower() if isinstance(section, dict) else ""
    family = _FAMILY_OF_TYPE.get(named, named)
    candidates = families_of_states(held)
    if family and (not held or family in candidates or family not in _FAMILY_OF_TYPE.values()):
        return [family]
    return candidates or ["an optimizer with the states " + (", ".join(sorted(held)) or "(none)")]


def families_of_states(held: Iterable[str]) -> list[str]:
    """Which optimizers keep exactly these states; empty where none is known to."""
    return list(_FAMILIES_BY_STATE.get(frozenset(held), ()))


# ---- groups of the record ------------------------------------------------------------------------------------------


def partitioned_groups(
    shapes: Shapes, dtypes: dict[str, str], shard: dict[str, Any], where: str
) -> list[dict[str, Any]]:
    """The record's groups of stages 1 and 2. ``shard``: any rank's optimizer dict; ``where``: its file.

    Raises CheckpointError when the shard's groups are not those of ``shapes``.
    """
    masters, worlds = shard[keys.SINGLE_PARTITION_OF_FP32_GROUPS], shard[keys.PARTITION_COUNT]
    if len(masters) != len(shapes):
        raise CheckpointError(
            f"{where}: {keys.SINGLE_PARTITION_OF_FP32_GROUPS} has {len(masters)} groups, {keys.PARAM_SHAPES} of the "
            f"model-states file has {len(shapes)}"
        )
    inner = shard.get(keys.PARAM_ALIGNMENT_PADDINGS) or [[0] * len(group) for group in shapes]
    groups = []
    for number, (group, master) in enumerate(zip(shapes, masters, strict=True)):
        piece = master.numel() + _tail_padding(shard, number)
        slots, offset = [], 0
        for (name, shape), padding in zip(group.items(), inner[number], strict=True):
            slots.append((name, math.prod(shape), offset))
            offset += math.prod(shape) + int(padding)
        world = int(worlds[number] if isinstance(worlds, (list, tuple)) else worlds)
        if offset > piece * world:
            raise CheckpointError(
                f"{where}: group {number} has partitions of {piece} elements for {world} ranks, its parameters "
                f"{', '.join(list(group)[:3])} ... need {offset}"
            )
        layout = {"version": 1, "world": world, "slots": slots, "segments": [(piece * world, piece)]}
        groups.append(_group(number, layout, group.values(), dtypes, master))
    return groups


def _tail_padding(shard: dict[str, Any], number: int) -> int:
    """Elements that were cut off this rank's masters; files without a stage keep theirs."""
    return int(shard[keys.GROUP_PADDINGS][number]) if keys.ZERO_STAGE in shard else 0


def _group(
    number: int, layout: dict[str, Any], shapes: Iterable[Any], dtypes: dict[str, str], master: torch.Tensor
) -> dict[str, Any]:
    first = next((slot[0] for slot in layout["slots"]), None)
    return {
        "group_index": number,
        "layout": layout,
        "shapes": [tuple(shape) for shape in shapes],
        "dtype": dtypes.get(first, dtype_name(master.dtype)) if first is not None else dtype_name(master.dtype),
        "master_dtype": dtype_name(master.dtype),
        "aliased": False,
    }


def sub_groups(
    shapes: Shapes, dtypes: dict[str, str], shard: dict[str, Any], world: int, where: str
) -> list[dict[str, Any]]:
    """The record's groups of stage 3, one per sub-group. Raises CheckpointError where lengths do not come out even."""
    flats = list(shard[keys.FP32_FLAT_GROUPS])
    groups: list[dict[str, Any]] = []
    for number, group in enumerate(shapes):
        members: list[tuple[str, Any]] = []
        held = 0
        for name, shape in group.items():
            members.append((name, shape))
            held += -(-math.prod(shape) // world)
            flat = flats[len(groups)] if len(groups) < len(flats) else None
            if flat is None or held > flat.numel():
                raise CheckpointError(
                    f"{where}: parameter {name!r} does not end where a sub-group of {keys.FP32_FLAT_GROUPS} does (it "
                    f"needs {held} elements of sub-group {len(groups)}, which has "
                    f"{flat.numel() if flat is not None else 'not been saved'}; {len(flats)} sub-groups)"
                )
            if held == flat.numel() and not _continues(group, name, world, flats, len(groups)):
                groups.append(_sub_group(number, members, dtypes, world, flat))
                members, held = [], 0
        if members:
            raise CheckpointError(
                f"{where}: sub-group {len(groups)} of {keys.FP32_FLAT_GROUPS} has {flats[len(groups)].numel()} "
                f"elements, its parameters {', '.join(name for name, _ in members[:3])} ... have {held}"
            )
    if len(groups) != len(flats):
        raise CheckpointError(
            f"{where}: {keys.FP32_FLAT_GROUPS} has {len(flats)} sub-groups, {keys.PARAM_SHAPES} fills {len(groups)}"
        )
    return groups


def _continues(group: Any, name: str, world: int, flats: list[torch.Tensor], done: int) -> bool:
    """A parameter without elements after a full sub-group belongs to it, unless it is a sub-group of its own."""
    following = list(group.items())[list(group).index(name) + 1 :]
    return bool(
        following and not math.prod(following[0][1]) and (done + 1 >= len(flats) or flats[done + 1].numel() > 0)
    )


def _sub_group(
    number: int, members: list[tuple[str, Any]], dtypes: dict[str, str], world: int, flat: torch.Tensor
) -> dict[str, Any]:
    layout = ShardLayout.by_block([[(name, math.prod(shape))] for name, shape in members], world)
    return _group(number, layout.as_record(), [shape for _, shape in members], dtypes, flat)


def number_groups(groups: list[dict[str, Any]], settings: list[dict[str, Any]]) -> None:
    """Sub-groups take the number of the optimizer's parameter group that lists them."""
    for number, held in enumerate(settings):
        for place in held["params"]:
            if place < len(groups):
                groups[place]["group_index"] = number


def rest_runs(frozen: dict[str, Any], dtypes: dict[str, str], world: int) -> list[dict[str, Any]]:
    """The record's ``rest`` of stage 3: frozen parameters, one run per dtype."""
    runs: dict[str, list[str]] = {}
    for name in frozen:
        runs.setdefault(dtypes.get(name, "float32"), []).append(name)
    return [
        {
            "layout": ShardLayout.by_block([[(name, math.prod(frozen[name]))] for name in listed], world).as_record(),
            "names": listed,
            "shapes": [tuple(frozen[name]) for name in listed],
            "dtype": dtype,
        }
        for dtype, listed in runs.items()
    ]


# ---- filling the index ---------------------------------------------------------------------------------------------


def flat_states(shard: dict[str, Any], stage: int) -> list[dict[str, Any]]:
    """The state of the wrapped optimizer, one dict per flat tensor; empty where it had not made a step."""
    count = len(shard[masters_key(stage)])
    held = shard[base_state_key(stage)]
    if isinstance(held, (list, tuple)):  # ``elastic_checkpoint``: one state per group and no settings
        return [dict(state) for state in held]
    found: list[dict[str, Any]] = []
    for group in held[keys.PARAM_GROUPS]:
        for number in group["params"]:
            state = dict(held["state"].get(number, {}))
            if state and "step" in group:  # counted once per group
                state.setdefault("step", group["step"])
            found.append(state)
    return found + [{} for _ in range(count - len(found))]


def settings_of(shard: dict[str, Any], stage: int, count: int) -> list[dict[str, Any]]:
    """The wrapped optimizer's parameter groups; empty ones where the file holds none."""
    held = shard[base_state_key(stage)]
    if isinstance(held, (list, tuple)):
        return [{} for _ in range(count)]
    return [own_settings(group) for group in held[keys.PARAM_GROUPS]]


def own_settings(group: dict[str, Any]) -> dict[str, Any]:
    """Settings of a parameter group without its members and its step count, which is a state of each parameter here."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names", "step", "name")}


def add_shard(
    index: indexing.FragmentIndex,
    record: dict[str, Any],
    shard: dict[str, Any],
    rank: int,
    file: str,
    where: str,
    *,
    mapped: bool,
) -> None:
    """Add everything shard ``rank`` holds. ``where``: the path of its file, for errors.

    ``mapped``: the file's own mappings are to agree. Raises CheckpointError naming group and key of a tensor that has
    not the length the layout gives it.
    """
    stage = int(record["zero_stage"])
    states, masters = flat_states(shard, stage), shard[masters_key(stage)]
    for number, group in enumerate(record["groups"]):
        layout = ShardLayout.from_record(group["layout"])
        if rank >= layout.world:
            continue
        parts = [(part.name, part.param_start, part.numel, part.shard_start) for part in layout.fragments(rank)]
        if mapped:
            _check_mapping(shard, number, parts, where)
        needed = max((start + numel for _, _, numel, start in parts), default=0)
        for key, value in [(indexing.MASTER, masters[number]), *states[number].items()]:
            counts = key not in _PER_ELEMENT and key != indexing.MASTER
            kind = _kind(value, needed, layout.shard_numel, f"{where}: group {number}, {key!r}", may_count=counts)
            for name, start, numel, offset in parts:
                place = offset if kind == FLAT else 0
                index.add(name, key, indexing.Extent(file, f"group {number}.{key}", place, start, numel, kind, value))


def _kind(value: Any, needed: int, piece: int, where: str, *, may_count: bool) -> str:
    """``may_count``: the state may be one number for all elements. Moments of a wrong length would not be noticed by
    fused updates, which would write past their end."""
    if may_count and not is_tensor(value):
        return PLAIN
    if may_count and value.dim() == 0:
        return SCALAR
    if is_tensor(value) and value.dim() == 1 and needed <= value.numel() <= max(piece, needed):
        return FLAT
    raise CheckpointError(
        f"{where} {_form(value)}; expected one dimension of {needed} elements, or of {piece} with "
        "padding. Load the weights alone with load_module_only=True"
    )


def _form(value: Any) -> str:
    return f"has shape {tuple(value.shape)}" if is_tensor(value) else f"is a {type(value).__name__}"


def _check_mapping(shard: dict[str, Any], number: int, parts: list[tuple[str, int, int, int]], where: str) -> None:
    """The file's own list of what is where says the same."""
    mappings = shard.get(keys.PARAM_SLICE_MAPPINGS)
    if not mappings:
        return
    theirs = {name: (int(place.start), int(place.numel)) for name, place in mappings[number].items()}
    ours = {name: (start, numel) for name, _, numel, start in parts if numel}
    theirs = {name: place for name, place in theirs.items() if place[1]}
    if theirs != ours:
        wrong = next(name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name))
        raise CheckpointError(
            f"{where}: {keys.PARAM_SLICE_MAPPINGS} of group {number} puts parameter {wrong!r} at (start, elements) "
            f"{theirs.get(wrong)}, the order of {keys.PARAM_SHAPES} puts it at {ours.get(wrong)}"
        )


def add_frozen(
    index: indexing.FragmentIndex,
    record: dict[str, Any],
    held: dict[str, torch.Tensor],
    rank: int,
    file: str,
    where: str,
) -> None:
    """Add one rank's pieces of frozen parameters (stage 3). Raises CheckpointError for a piece that is too short."""
    for run in record["rest"]:
        for part in ShardLayout.from_record(run["layout"]).fragments(rank):
            key, value = f"{keys.FROZEN_PARAM_FRAGMENTS}.{part.name}", held.get(part.name)
            if value is None or value.numel() < part.numel:
                found = "nothing" if value is None else f"{value.numel()} elements"
                raise CheckpointError(f"{where}: {key} has {found}, expected {part.numel} elements")
            extent = indexing.Extent(file, key, 0, part.param_start, part.numel, FLAT, value)
            index.add(part.name, indexing.WEIGHT, extent)


def scaler_of(held: Any) -> dict[str, Any]:
    """A pickled loss scaler, or the scaler's entries of a stage 0 optimizer dict, as plain data."""
    if held is None:
        return {}
    if isinstance(held, dict):
        shown = ("cur_scale", "cur_iter", "last_overflow_iter")
        dynamic = bool(held.get(keys.DYNAMIC_LOSS_SCALE))
        return {"dynamic": dynamic, **{key: held[key] for key in shown if key in held}}
    return {"dynamic": False, **vars(held)}
