"""From a saved tag into a live engine, in two steps: plan everything, then apply it.

The plan finds every element before anything is changed: a tensor of the model or the optimizer is either covered by
the checkpoint, skipped for a stated reason, or an error that names it. Applying only copies.

    module      by name, compile wrappers ignored, strict unless asked otherwise
    masters     by name and fragment, from masters, or from the weights where those were their own masters
    states      by name and fragment, every key the saved optimizer had

Owns: matching and copying of tensors. Does not own: counters and other engine state (``engine_state.py``), files.
Invariant: until :meth:`RestorePlan.apply` the engine is as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepspeed.checkpoint import names
from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.checkpoint.index import MASTER, Extent
from deepspeed.checkpoint.reader import SavedTag
from deepspeed.checkpoint.weights import WeightPlan, fill, made_whole, plan_weights, split
from deepspeed.ops.optimizer_base import StateOptimizer
from deepspeed.runtime.zero import state_dict as zero_state
from deepspeed.runtime.zero.sharded_parameter import parameter_of

if TYPE_CHECKING:
    from deepspeed.runtime.zero.optimizer import ZeroOptimizer
    from deepspeed.runtime.zero.shard_group import BoundFragment, ShardGroup

CustomLoad = Callable[..., Any]


def few(found: Iterable[str], limit: int = 8) -> str:
    """The first names of a list and how many more there are."""
    listed = list(found)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more


# ---- module --------------------------------------------------------------------------------------------------------


@dataclass
class ModulePlan:
    """The saved module state under the live module's own names, and how it is handed over.

    ``weights``: those that lie in shards, which are copied by themselves.
    """

    state: dict[str, Any]
    strict: bool
    custom: CustomLoad | None
    notes: list[str] = field(default_factory=list)
    weights: list[WeightPlan] = field(default_factory=list)

    @torch.no_grad()
    def apply(self, module: nn.Module) -> None:
        if self.custom is not None:
            self.custom(src=self.state, dst=module)
        else:
            module.load_state_dict(self.state, strict=self.strict)
        for weight in self.weights:
            weight.apply()


def plan_module(module: nn.Module, saved: SavedTag, strict: bool, custom: CustomLoad | None) -> ModulePlan:
    """Match names and shapes. Raises CheckpointError listing what does not fit, with nothing changed yet.

    Weights that lie in shards are put together in host memory only for code that takes loading into its own hands: a
    custom function, or a module that renames keys.
    """
    state = saved.module_state()
    by_clean = {names.clean_name(name): value for name, value in state.items()}
    if custom is not None:
        return ModulePlan(made_whole(by_clean), strict, custom)
    live = module.state_dict()
    raw_names = {names.clean_name(name): name for name in live}
    excluded = set(saved.engine_state.get("excluded_frozen", ()))
    loadable = _with_metadata(module, state, {raw_names.get(name, name): value for name, value in by_clean.items()})
    missing = _missing(live, raw_names, by_clean)
    absent = [name for name in missing if name not in excluded]
    unexpected = [name for name in by_clean if name not in raw_names]
    plan = ModulePlan(loadable, strict and not (excluded & set(missing)), None)
    kept = [name for name in missing if name in excluded]
    if kept:
        plan.notes.append(
            f"{len(kept)} frozen parameters were left out of the checkpoint and stay as they are: {few(kept)}"
        )
    if _renames_keys(module):
        plan.state.update(made_whole(plan.state))
        return plan  # the module changes names while loading: only it can tell what fits
    problems = _shape_problems(live, raw_names, by_clean)
    if strict and absent:
        problems.append(f"not in the checkpoint: {few(absent)}")
    if strict and unexpected:
        problems.append(f"in the checkpoint but not in the model: {few(unexpected)}")
    if problems:
        hint = " (load_module_strict=False loads what fits)" if strict and (absent or unexpected) else ""
        raise CheckpointError(f"{saved.path} does not fit the model: {'; '.join(problems)}{hint}")
    plan.weights = plan_weights(module, split(plan.state)[1])
    for name in split(plan.state)[1]:
        del plan.state[name]
    plan.strict = False  # checked above; what is missing now is missing on purpose
    if absent:
        plan.notes.append(
            f"{len(absent)} tensors of the model are not in the checkpoint and stay as they are: {few(absent)}"
        )
    if unexpected:
        plan.notes.append(f"{len(unexpected)} tensors of the checkpoint are not in the model: {few(unexpected)}")
    return plan


def _missing(live: dict[str, Any], raw_names: dict[str, str], saved: dict[str, Any]) -> list[str]:
    """Names without a saved value; a name tied to one that has a value is served by it."""
    served = {_identity(live[raw_names[name]]) for name in saved if name in raw_names}
    return [name for name, raw in raw_names.items() if name not in saved and _identity(live[raw]) not in served]


def _identity(value: Any) -> Any:
    param = parameter_of(value)
    if param is not value:
        return id(param)
    if isinstance(value, torch.Tensor) and value.numel():
        return (value.device, value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)
    return id(value)


def _shape_problems(live: dict[str, Any], raw_names: dict[str, str], saved: dict[str, Any]) -> list[str]:
    problems = []
    for name, value in saved.items():
        target = live.get(raw_names.get(name, ""))
        shape = getattr(value, "shape", None)
        if shape is not None and isinstance(target, torch.Tensor) and tuple(shape) != tuple(target.shape):
            problems.append(f"{name} has shape {tuple(shape)} in the checkpoint, {tuple(target.shape)} in the model")
    return problems


def _renames_keys(module: nn.Module) -> bool:
    """True when a submodule takes loading into its own hands."""
    plain = nn.Module._load_from_state_dict
    for part in module.modules():
        own = type(part)._load_from_state_dict is not plain and not type(part).__module__.startswith("torch.")
        if own or part._load_state_dict_pre_hooks:
            return True
    return False


def _with_metadata(module: nn.Module, saved: Any, loadable: dict[str, Any]) -> dict[str, Any]:
    """Module versions go along, so that modules which convert old states do so."""
    metadata = getattr(saved, "_metadata", None)
    if metadata is None:
        return loadable
    raw = {names.clean_name(f"{name}.").rstrip("."): name for name, _ in module.named_modules(remove_duplicate=False)}
    listed = type(saved)(loadable)
    listed._metadata = {raw[clean]: {"version": 1} for clean in raw}
    listed._metadata.update({raw[name]: dict(entry) for name, entry in metadata.items() if name in raw})
    return listed


# ---- optimizer -----------------------------------------------------------------------------------------------------


@dataclass
class FragmentPlan:
    """What one fragment of this rank gets. ``master`` None: it follows the weights."""

    bound: BoundFragment
    master: list[Extent] | None
    states: dict[str, list[Extent]]
    saved_master_dtype: torch.dtype
    settings: dict[str, Any]


@dataclass
class OptimizerPlan:
    """What this rank's optimizer gets. ``publish``: the weights are cast anew from the masters on all ranks."""

    fragments: list[FragmentPlan] = field(default_factory=list)
    fresh: list[BoundFragment] = field(default_factory=list)
    settings: dict[int, dict[str, Any]] = field(default_factory=dict)
    extra: dict[Any, Any] = field(default_factory=dict)
    with_states: bool = False
    publish: bool = False
    notes: list[str] = field(default_factory=list)

    @torch.no_grad()
    def apply(self, optimizer: ZeroOptimizer) -> None:
        """Copy everything into this rank's fragments. Local; ``publish`` is the caller's to do."""
        optimizer.hold_still()  # or it would be undone later, over what is loaded
        base = optimizer.optimizer
        if self.with_states:
            zero_state.forget_state(optimizer, self.fresh)
            for index, saved in self.settings.items():
                zero_state.restore_hyper_parameters(optimizer, index, saved)
            base.state.update(self.extra)
        for plan in self.fragments:
            leaf = plan.bound.leaf
            if plan.master is not None:
                fill(leaf.detach(), plan.master, plan.bound.fragment.param_start)
            if self.with_states:
                base.state.pop(leaf, None)
                restored = {key: _restored(key, extents, plan) for key, extents in plan.states.items()}
                if restored:
                    base.state[leaf] = restored
                    optimizer.settle_states([plan.bound])


def _restored(key: str, extents: list[Extent], plan: FragmentPlan) -> Any:
    leaf, first = plan.bound.leaf, extents[0]
    if first.kind == zero_state.PLAIN:
        return first.whole()
    if first.kind == zero_state.SCALAR:
        return first.whole().detach().to(zero_state.scalar_device(key, leaf, plan.settings), copy=True)
    dtype = zero_state.state_dtype(key, first.value.dtype, plan.saved_master_dtype, leaf)
    if first.kind == zero_state.TENSOR:
        return first.value.detach().to(leaf.device, dtype, copy=True)
    made = torch.empty_like(leaf, dtype=dtype, requires_grad=False)
    fill(made, extents, plan.bound.fragment.param_start)
    return made


def plan_optimizer(
    optimizer: ZeroOptimizer, saved: SavedTag, *, with_states: bool, module_names: set[str]
) -> OptimizerPlan:
    """Find masters (and states) of every fragment of this rank. Raises CheckpointError for what is nowhere."""
    plan = OptimizerPlan(with_states=with_states)
    if with_states:
        _check_family(optimizer, saved)
    for group, bound in fragments_of(optimizer):
        name = bound.fragment.name
        held = saved.parameters.get(name)
        if held is None:
            plan.fresh.append(bound)
            continue
        if held.shape != tuple(bound.param.shape):
            raise CheckpointError(
                f"parameter {name!r} has shape {tuple(bound.param.shape)}; the optimizer state in {saved.folder} was "
                f"saved for {held.shape}. Load weights alone with load_module_only=True"
            )
        in_module = saved.stage < 3 or name in module_names
        plan.fragments.append(_plan_fragment(optimizer, group, bound, saved, with_states, in_module))
    plan.publish = any(
        (held := saved.parameters.get(name)) is not None and held.dtype != zero_state.dtype_name(group.dtype)
        for group in optimizer.groups
        for name in group.names
    )
    _note_differences(plan, optimizer, saved, module_names)
    if with_states:
        plan.settings = _plan_settings(plan, optimizer, saved)
        if saved.stage >= 1:
            plan.extra = dict(saved.base_state(saved.any_shard()).get("extra", {}))
    return plan


def given_orders(optimizer: ZeroOptimizer) -> list[list[list[str]]]:
    """Names of each group's parameters in the order they were given to the optimizer: with frozen ones, and without."""
    frozen = {id(param) for _, param in optimizer.frozen}
    whole = [[(id(param), optimizer.names.get(id(param), "")) for param in group] for group in optimizer.client_groups]
    return [[[name for key, name in group if key not in left] for group in whole] for left in (set(), frozen)]


def fragments_of(optimizer: ZeroOptimizer) -> Iterator[tuple[ShardGroup, BoundFragment]]:
    for group in optimizer.groups:
        for bound in group.fragments:
            yield group, bound


def _plan_fragment(
    optimizer: ZeroOptimizer,
    group: ShardGroup,
    bound: BoundFragment,
    saved: SavedTag,
    with_states: bool,
    in_module: bool,
) -> FragmentPlan:
    fragment, index = bound.fragment, saved.index
    held = saved.parameters[fragment.name]
    where = (fragment.param_start, fragment.numel)
    # Weights that were their own masters have been loaded with the module where they are so here, too.
    with_weights = in_module and held.aliased and bound.aliased and held.dtype == zero_state.dtype_name(group.dtype)
    master = None if with_weights else index.cover(fragment.name, MASTER, *where)
    states = {}
    if with_states:
        states = {
            key: _own_form(optimizer.optimizer, key, index.cover(fragment.name, key, *where))
            for key in index.kinds(fragment.name, *where)
            if key != MASTER
        }
    dtype = getattr(torch, held.master_dtype)
    return FragmentPlan(bound, master, states, dtype, optimizer.optimizer.param_groups[group.group_index])


def _own_form(base: torch.optim.Optimizer, key: str, extents: list[Extent]) -> list[Extent]:
    """Step counts as ``base`` keeps them: a number in our own optimizers, a 0-dim tensor in torch's."""
    first = extents[0]
    if key != "step" or first.kind not in (zero_state.SCALAR, zero_state.PLAIN):
        return extents
    if isinstance(base, StateOptimizer) and first.kind == zero_state.SCALAR:
        return [replace(first, kind=zero_state.PLAIN, value=int(first.whole()))]
    tensors = type(base).__module__.startswith("torch.optim") and not isinstance(base, torch.optim.SparseAdam)
    if tensors and first.kind == zero_state.PLAIN:
        value = torch.tensor([float(first.value)])
        return [replace(first, kind=zero_state.SCALAR, value=value, offset=0)]
    return extents


def _check_family(optimizer: ZeroOptimizer, saved: SavedTag) -> None:
    assert saved.record is not None
    own, theirs = zero_state.optimizer_families(optimizer.optimizer), saved.record["optimizer"]
    if theirs and not zero_state.related(own, theirs):  # tags of other releases may not say
        raise CheckpointError(
            f"{saved.folder} holds the state of optimizer {theirs[0]!r}, this engine runs {own[0]!r}: its state would "
            "be lost. Load with load_optimizer_states=False to start the optimizer afresh"
        )


def _note_differences(plan: OptimizerPlan, optimizer: ZeroOptimizer, saved: SavedTag, module_names: set[str]) -> None:
    current = {name for group in optimizer.groups for name in group.names}
    new = [name for group in optimizer.groups for name in group.names if name not in saved.parameters]
    if new and plan.with_states:
        plan.notes.append(
            f"{len(new)} parameters have no optimizer state in the checkpoint and start afresh: {few(new)}"
        )
    dropped = [name for name in saved.parameters if name not in current]
    frozen = [name for name in dropped if name in module_names]
    gone = [name for name in dropped if name not in module_names]
    if frozen and plan.with_states:
        plan.notes.append(
            f"optimizer state of {len(frozen)} parameters is skipped, they are not trained here: {few(frozen)}"
        )
    if gone and plan.with_states:
        plan.notes.append(f"optimizer state of {len(gone)} parameters is skipped, the model has none such: {few(gone)}")


def _plan_settings(plan: OptimizerPlan, optimizer: ZeroOptimizer, saved: SavedTag) -> dict[int, dict[str, Any]]:
    """Which saved parameter group's settings each live group takes: its own number, else most of its members'."""
    theirs, own = saved.hyper_parameters, optimizer.optimizer.param_groups
    if len(theirs) == len(own):
        return dict(enumerate(theirs))
    chosen: dict[int, dict[str, Any]] = {}
    for index in range(len(own)):
        votes: dict[int, int] = {}
        for group in optimizer.groups:
            for name in group.names if group.group_index == index else ():
                if name in saved.parameters:
                    number = saved.parameters[name].group_index
                    votes[number] = votes.get(number, 0) + 1
        if votes:
            chosen[index] = theirs[max(votes, key=lambda number: votes[number])]
    plan.notes.append(
        f"the checkpoint has {len(theirs)} parameter groups, this optimizer {len(own)}: each takes the settings of the "
        "saved group most of its parameters were in"
    )
    return chosen
