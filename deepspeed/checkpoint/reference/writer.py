"""A tag of ours in the layout and order DeepSpeed itself writes, at the same stage and number of ranks.

Parameters of a group stand in the module's order there, end to end and cut once (stages 1 and 2), or each cut by itself
into sub-groups (stage 3); ours follow communication buckets. Masters and states are read through the index and written
as lists of mapped parts, so nothing larger than one piece of a file is in memory.

Owns: the content of their files. Does not own: reading (``reader.py``), the command (``tool/convert.py``).
Invariant: every element of every parameter is copied as it is; what their form cannot hold is an error, or a note.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import names, trusted
from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.checkpoint.index import MASTER, WEIGHT
from deepspeed.checkpoint.reader import SavedTag
from deepspeed.checkpoint.sharded_weight import ShardedWeight
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.zero.layout import round_up
from deepspeed.runtime.zero.state_dict import FLAT, PLAIN, SCALAR
from deepspeed.utils.tensor_fragment import fragment_address
from deepspeed.utils.torch_file import Pack, Slice

ALIGNMENT = 2  # flat groups end at a multiple of this many elements per rank
SUB_GROUP_SIZE = 1_000_000_000
_OWN_KEYS = frozenset({keys.LAYOUT_RECORD, keys.ENGINE_STATE})
_SCALER_ATTRIBUTES = (
    "cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window", "min_scale", "delayed_shift",
    "cur_hysteresis", "consecutive_hysteresis", "raise_error_at_min_scale", "dynamic", "dtype",
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """Elements ``start .. start + numel`` of a parameter at ``offset`` of a flat tensor, then ``padding`` zeros."""

    name: str
    start: int
    numel: int
    offset: int
    padding: int = 0


@dataclass
class ReferenceWriter:
    """See the module docstring. ``notes``: what the other form has no place for, filled while files are made."""

    saved: SavedTag
    notes: list[str] = field(default_factory=list)

    # ---- what there is ---------------------------------------------------------------------------------------------

    @cached_property
    def stage(self) -> int:
        return self.saved.stage

    @cached_property
    def world(self) -> int:
        """Ranks the parameters are cut over; 1 at stage 0."""
        return self.saved.shards or 1

    @cached_property
    def config(self) -> dict[str, Any]:
        return dict(self.saved.model.get(keys.DS_CONFIG) or {})

    @cached_property
    def shapes(self) -> list[OrderedDict[str, torch.Size]]:
        """Shapes of every optimizer group's parameters, in the module's order."""
        saved = self.saved
        listed = [name for name in saved.model[keys.MODULE] if name in saved.parameters]
        lost = [name for name in saved.parameters if name not in listed]
        made: list[OrderedDict[str, torch.Size]] = [OrderedDict() for _ in saved.hyper_parameters]
        for name in [*listed, *lost]:
            made[saved.parameters[name].group_index][name] = torch.Size(saved.parameters[name].shape)
        return made

    @cached_property
    def sub_groups(self) -> list[tuple[int, list[str]]]:
        """``(group, names)`` of stage 3: closed when their pieces reach ``sub_group_size`` elements on a rank."""
        zero = self.config.get("zero_optimization") or {}
        limit = int(zero.get("sub_group_size") or SUB_GROUP_SIZE)
        made: list[tuple[int, list[str]]] = []
        for number, group in enumerate(self.shapes):
            held, members = 0, []
            for name, shape in group.items():
                members.append(name)
                held += -(-math.prod(shape) // self.world)
                if held >= limit:
                    made.append((number, members))
                    held, members = 0, []
            if members:
                made.append((number, members))
        return made

    @cached_property
    def keeps_padding(self) -> bool:
        """The run is one for their bf16 optimizer, whose files are those of stage 1 with fewer keys."""
        types, zero = self.config.get("data_types") or {}, self.config.get("zero_optimization") or {}
        bf16 = bool((self.config.get("bf16") or self.config.get("bfloat16") or {}).get("enabled"))
        wide = str(types.get("grad_accum_dtype")).lower() in ("fp32", "float32", "float")
        return self.stage == 1 and bf16 and wide and not zero.get("offload_optimizer")

    # ---- files -----------------------------------------------------------------------------------------------------

    def files(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """``(file name, content)`` of the whole tag, one at a time."""
        saved = self.saved
        if self.stage < 3:
            yield names.model_file(saved.mp_rank), self.model_states(saved.model, 0)
        else:
            for rank, name in enumerate(saved.model_files()):
                model = saved.model if name == saved.model_file else trusted.load_file(saved.folder / name)
                yield names.sharded_model_file(rank, saved.mp_rank), self.model_states(model, rank)
        if self.stage and saved.holds_optimizer:
            bf16 = names.parse_optim_file(saved.optim_files()[0])
            for rank in range(self.world):
                content = self.partitioned(rank) if self.stage < 3 else self.sharded(rank)
                name = names.optim_file(rank, saved.mp_rank, bf16=bf16 is not None and bf16.bf16)
                version = saved.model[keys.DS_VERSION]
                yield (
                    name,
                    {keys.OPTIMIZER_STATE_DICT: content, keys.DS_CONFIG: self.config, keys.DS_VERSION: version},
                )

    def model_states(self, model: dict[str, Any], rank: int) -> dict[str, Any]:
        """One model-states file, keys in their order."""
        kept = {key: value for key, value in model.items() if key not in _OWN_KEYS}
        for key, value in kept.items():
            self.saved.check_trust(key, value)
        if self.stage == 0:
            kept[keys.OPTIMIZER] = self.whole_optimizer() if self.saved.holds_optimizer else None
            return kept
        kept[keys.PARAM_SHAPES] = self.shapes
        if self.stage == 3:
            kept[keys.PARAM_SHAPES] = [
                OrderedDict((name, self.shapes[number][name]) for name in listed) for number, listed in self.sub_groups
            ]
            kept[keys.FROZEN_PARAM_SHAPES], kept[keys.FROZEN_PARAM_FRAGMENTS] = self._frozen(rank)
        return kept

    def _frozen(self, rank: int) -> tuple[Any, Any]:
        """Shapes and this rank's pieces of parameters no optimizer holds."""
        shapes: OrderedDict[str, torch.Size] = OrderedDict()
        pieces: OrderedDict[str, Slice] = OrderedDict()
        for name, weight in self.saved.module_state().items():
            if isinstance(weight, ShardedWeight) and weight.what == WEIGHT and weight.name == name:
                (part,) = self._pieces([(name, math.prod(weight.shape))], rank)
                pack = Pack(weight.dtype)
                for extent in weight.cover(part.start, part.numel) if part.numel else ():
                    pack.add(extent.elements())
                pack.add(torch.zeros(part.padding, dtype=weight.dtype))
                shapes[name], pieces[name] = torch.Size(weight.shape), pack.whole()
        return shapes, pieces

    # ---- where elements go -----------------------------------------------------------------------------------------

    def _cut(self, number: int, rank: int) -> tuple[list[Part], int, int]:
        """``(parts, elements, padding)`` of a rank's partition of a group, stages 1 and 2."""
        total = sum(math.prod(shape) for shape in self.shapes[number].values())
        piece = round_up(total, ALIGNMENT * self.world) // self.world
        first, parts, position = rank * piece, [], 0
        for name, shape in self.shapes[number].items():
            low, high = max(first, position), min(first + piece, position + math.prod(shape))
            if low < high:
                parts.append(Part(name, low - position, high - low, low - first))
            position += math.prod(shape)
        held = sum(part.numel for part in parts)
        return parts, held, piece - held

    def _pieces(self, members: list[tuple[str, int]], rank: int) -> list[Part]:
        """A rank's pieces of these parameters, stage 3."""
        parts, offset = [], 0
        for name, numel in members:
            piece = -(-numel // self.world)
            start = min(rank * piece, numel)
            held = min(piece, numel - start)
            parts.append(Part(name, start, held, offset, piece - held))
            offset += piece
        return parts

    def _flat(self, what: str, parts: list[Part], padding: int = 0) -> Slice:
        """One flat tensor of masters or of a state; zeros where a parameter has no such state."""
        pack: Pack | None = None
        waiting: list[int] = []

        def zeros(numel: int) -> None:
            if pack is None:
                waiting.append(numel)
            elif numel:
                pack.add(torch.zeros(1, dtype=pack.dtype).expand(numel))

        for part in parts:
            held = what == MASTER or what in self.saved.index.kinds(part.name, part.start, part.numel)
            if held and part.numel:
                for extent in self.saved.index.cover(part.name, what, part.start, part.numel):
                    value = extent.elements()
                    if pack is None:
                        pack = Pack(torch.float32 if value.dtype in (torch.float16, torch.bfloat16) else value.dtype)
                        for numel in waiting:
                            zeros(numel)
                    pack.add(value.to(pack.dtype))
                zeros(part.padding)
            else:
                zeros(part.numel + part.padding)
        zeros(padding)
        if pack is None:
            pack = Pack(torch.float32)
            pack.add(torch.zeros(sum(waiting)))
        return pack.whole()

    def _is_element(self, name: str, key: str, kind: str) -> bool:
        """A state without dimensions of a parameter without any is that of its one element, no count of steps."""
        return kind == SCALAR and key != "step" and self.saved.parameters[name].shape == ()

    def _state(self, parts: list[Part], padding: int, where: str) -> dict[str, Any]:
        """The state of one flat tensor. Raises CheckpointError for state that is not one value per element."""
        found: dict[str, Any] = {}
        single: dict[str, dict[str, Any]] = {}
        bare = []
        for part in parts:
            kinds = [kind for kind in self.saved.index.kinds(part.name, part.start, part.numel) if kind != MASTER]
            if not kinds and part.numel:
                bare.append(part.name)
            if keys.ZENFLOW_KEY in kinds:
                raise CheckpointError(
                    f"{where}: the tag was saved by a run with ZenFlow, whose elements have made different numbers of "
                    "steps. Load it without zero_optimization.zenflow, save it, and convert that"
                )
            for key in kinds:
                extents = self.saved.index.cover(part.name, key, part.start, part.numel)
                if not extents:
                    continue
                if extents[0].kind in (SCALAR, PLAIN) and not self._is_element(part.name, key, extents[0].kind):
                    single.setdefault(key, {})[part.name] = extents[0].whole()
                elif extents[0].kind in (FLAT, SCALAR):
                    found.setdefault(key, None)
                else:
                    raise CheckpointError(
                        f"{where}: state {key!r} of parameter {part.name!r} has a shape of its own; DeepSpeed's files "
                        "hold one value per element, or one per group"
                    )
        for key, values in single.items():
            found[key] = _common(key, values, where)
        for key in [key for key, value in found.items() if value is None]:
            found[key] = self._flat(key, parts, padding)
        if found and bare:
            self.notes.append(f"{where}: {', '.join(bare)} had no optimizer state yet and get zeros")
        order = ("step", "exp_avg", "exp_avg_sq")
        return {key: found[key] for key in sorted(found, key=lambda key: order.index(key) if key in order else 9)}

    # ---- optimizer dicts -------------------------------------------------------------------------------------------

    def _settings(self, members: list[list[int]], states: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
        """Parameter groups over these flat tensors. The step goes where each of their optimizers looks for it."""
        made = []
        for settings, numbers in zip(self.saved.hyper_parameters, members, strict=True):
            group = {key: value for key, value in settings.items() if key not in ("params", "param_names")}
            steps = {
                states[number]["step"] for number in numbers if isinstance(states.get(number, {}).get("step"), int)
            }
            if len(steps) == 1:
                group["step"] = steps.pop()
            made.append({**group, "params": numbers})
        return made

    def partitioned(self, rank: int) -> dict[str, Any]:
        """``optimizer_state_dict`` of stages 1 and 2."""
        masters, paddings, mappings = [], [], []
        states: dict[int, dict[str, Any]] = {}
        for number in range(len(self.shapes)):
            parts, _, padding = self._cut(number, rank)
            last = rank == self.world - 1
            masters.append(self._flat(MASTER, parts, 0 if last and not self.keeps_padding else padding))
            paddings.append(padding if last else 0)
            mappings.append(OrderedDict((part.name, fragment_address(part.numel, part.offset)) for part in parts))
            if state := self._state(parts, padding, f"group {number}"):
                states[number] = state
        base = {
            "state": states,
            keys.PARAM_GROUPS: self._settings([[number] for number in range(len(self.shapes))], states),
        }
        made = {
            keys.CLIP_GRAD: float(self.saved.any_shard().get(keys.CLIP_GRAD, 0.0)),
            keys.BASE_OPTIMIZER_STATE: base,
            keys.SINGLE_PARTITION_OF_FP32_GROUPS: masters,
            keys.GROUP_PADDINGS: paddings,
            keys.PARTITION_COUNT: [self.world] * len(self.shapes),
            keys.DS_VERSION: self.saved.model[keys.DS_VERSION],
            keys.PARAM_SLICE_MAPPINGS: mappings,
        }
        if self.keeps_padding:
            return made
        return {
            **self._head(),
            **made,
            keys.ZERO_STAGE: ZeroStageEnum(self.stage),
            keys.PARAM_ALIGNMENT_PADDINGS: [[0] * len(group) for group in self.shapes],
        }

    def sharded(self, rank: int) -> dict[str, Any]:
        """``optimizer_state_dict`` of stage 3."""
        flats = []
        states: dict[int, dict[str, Any]] = {}
        members: list[list[int]] = [[] for _ in self.shapes]
        for place, (number, listed) in enumerate(self.sub_groups):
            parts = self._pieces([(name, math.prod(self.shapes[number][name])) for name in listed], rank)
            flats.append(self._flat(MASTER, parts))
            members[number].append(place)
            if state := self._state(parts, 0, f"sub-group {place}"):
                states[place] = state
        return {
            keys.ZERO_STAGE: ZeroStageEnum(3),
            **self._head(),
            keys.PARTITION_COUNT: self.world,
            keys.OPTIMIZER_STATE_DICT: {"state": states, keys.PARAM_GROUPS: self._settings(members, states)},
            keys.FP32_FLAT_GROUPS: flats,
        }

    def _head(self) -> dict[str, Any]:
        scaler = self.saved.loss_scaler
        return {
            keys.LOSS_SCALER: _scaler_object(scaler),
            keys.DYNAMIC_LOSS_SCALE: bool(scaler.get("dynamic")),
            keys.OVERFLOW: False,
        }

    def whole_optimizer(self) -> dict[str, Any]:
        """The ``optimizer`` entry of stage 0: a torch state dict in the module's order, and masters beside it."""
        states: dict[int, dict[str, Any]] = {}
        groups, masters, position = [], [], 0
        in_fp32 = all(held.aliased and held.dtype == "float32" for held in self.saved.parameters.values())
        for settings, listed in zip(self.saved.hyper_parameters, self._members(with_frozen=in_fp32), strict=True):
            numbers = list(range(position, position + len(listed)))
            for number, name in zip(numbers, listed, strict=True):
                if name in self.saved.parameters and (state := self._whole_state(name)):
                    states[number] = state
            kept = {key: value for key, value in settings.items() if key not in ("params", "param_names")}
            groups.append({**kept, "params": numbers})
            masters.append([self._whole(name, MASTER) for name in listed if name in self.saved.parameters])
            position += len(listed)
        plain = {"state": states, keys.PARAM_GROUPS: groups}
        if in_fp32:
            return plain
        scaler = self.saved.loss_scaler
        shown = ["cur_scale", "cur_iter"] + ["last_overflow_iter", "scale_factor", "scale_window"] * bool(
            scaler.get("dynamic")
        )
        return {
            keys.DYNAMIC_LOSS_SCALE: bool(scaler.get("dynamic")),
            **{key: scaler.get(key, int(self.saved.model[keys.GLOBAL_STEPS])) for key in shown},
            keys.OPTIMIZER_STATE_DICT: plain,
            keys.FP32_GROUPS: masters,
        }

    def _members(self, *, with_frozen: bool) -> list[list[str]]:
        """Names of every group's parameters at stage 0. Their fp32 optimizer counts frozen ones it was given, too."""
        given = self.saved.engine_state.get("optimizer_order") if with_frozen else None
        if not given:
            return [list(group) for group in self.shapes]
        return [list(group) for group in given]

    def _whole(self, name: str, what: str) -> torch.Tensor:
        shape = self.saved.parameters[name].shape
        (extent,) = self.saved.index.cover(name, what, 0, math.prod(shape))
        return extent.elements().view(shape)

    def _whole_state(self, name: str) -> dict[str, Any]:
        numel = math.prod(self.saved.parameters[name].shape)
        found = {}
        for key in self.saved.index.kinds(name, 0, numel):
            if key != MASTER:
                (extent,) = self.saved.index.cover(name, key, 0, numel)
                found[key] = self._whole(name, key) if extent.kind == FLAT else extent.whole()
        return found


def _common(key: str, values: dict[str, Any], where: str) -> Any:
    """The one value all parameters of a flat tensor have. Raises CheckpointError when they differ."""
    first_name, first = next(iter(values.items()))
    for name, value in values.items():
        if float(value) != float(first):
            raise CheckpointError(
                f"{where}: {key} is {float(first):g} for {first_name} and {float(value):g} for {name}; DeepSpeed's "
                "files hold one for all of them. Parameters that were trained from different steps on need groups of "
                "their own"
            )
    return first.clone() if isinstance(first, torch.Tensor) else first


def _scaler_object(saved: dict[str, Any]) -> Any:
    """A scaler whose pickle names their class and has the attributes of theirs."""
    kind: Any = DynamicLossScaler if saved.get("dynamic") else LossScaler
    made = kind.__new__(kind)
    if not saved.get("dynamic"):
        made.__dict__ = {"cur_scale": float(saved.get("cur_scale", 1.0)), "dynamic": False}
    else:
        made.__dict__ = {key: saved[key] for key in _SCALER_ATTRIBUTES if key in saved}
    return made
