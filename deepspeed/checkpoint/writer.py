"""What each rank writes: the content of every file of a tag, as objects ready for ``utils/torch_file.py``.

    data-parallel rank 0 of each model-parallel rank    model states (with the optimizer's state at stage 0)
    every rank of the shard axis, stage 3               model states instead; parameters are empty in their state dict
    every rank of the shard axis, stages 1 to 3         its optimizer states; at stage 3 the weights are in them
    every rank                                          its random states

Owns: the keys and their content. Does not own: opening and naming folders, agreement between ranks (``manager.py``).
Invariant: building content reads the engine and changes nothing; tensors are referenced, not copied.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import names, random_state
from deepspeed.checkpoint import rest as resting
from deepspeed.git_version_info import version
from deepspeed.runtime.zero import state_dict as zero_state
from deepspeed.utils.torch_file import Pack, Slice

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.optimizer import ZeroOptimizer

MODEL_AXES = ("pp", "tp")


def model_parallel_rank(engine: DeepSpeedEngine) -> int:
    """Number of this rank's slice of the model: pipeline stage times tensor-parallel size plus tensor-parallel rank."""
    mesh = engine.mesh
    return int(mesh.rank("pp") * mesh.size("tp") + mesh.rank("tp"))


def model_parallel_size(engine: DeepSpeedEngine) -> int:
    return int(engine.mesh.size("pp") * engine.mesh.size("tp"))


def shard_place(engine: DeepSpeedEngine) -> tuple[int, int, bool]:
    """``(rank, ranks, writes)``: this rank's place among those that share the shards, and whether it saves its own.

    Where shards have replicas (``mics_shard_size``), the ranks of the first replica do.
    """
    rank, ranks = int(engine.mesh.rank("zero")), int(engine.mesh.size("zero"))
    if engine.zero_optimization_stage() < 3:
        return rank, ranks, True
    world = engine.sharded_module.world if engine.sharded_module is not None else 1
    return rank % world, world, rank < world


def parallel_dimensions(engine: DeepSpeedEngine) -> dict[str, int]:
    """The historical record of how the model is cut."""
    mesh = engine.mesh
    return {keys.CHECKPOINT_PP_DEGREE: int(mesh.size("pp")), keys.CHECKPOINT_TP_DEGREE: int(mesh.size("tp"))}


def contents(
    engine: DeepSpeedEngine, rank: int, client_state: dict[str, Any], exclude_frozen: bool, writes_model: bool
) -> dict[str, dict[str, Any]]:
    """``file name -> content`` of everything global rank ``rank`` writes."""
    stage = int(engine.zero_optimization_stage())
    optimizer = engine.zero_optimizer
    record = None
    rest = resting.rest_runs(engine, exclude_frozen) if stage >= 3 else []
    if optimizer is not None or stage >= 3:
        record = zero_state.layout_record(optimizer, axes(engine), stage, [run.record() for run in rest])
    mp_rank = model_parallel_rank(engine)
    shard_rank, _, writes_shard = shard_place(engine)
    files: dict[str, dict[str, Any]] = {}
    if stage >= 3 and writes_shard:
        file = names.sharded_model_file(shard_rank, mp_rank)
        files[file] = model_states(engine, record, stage, client_state, exclude_frozen)
        files[file].update(rest_states(rest, exclude_frozen))
    elif stage < 3 and writes_model:
        files[names.model_file(mp_rank)] = model_states(engine, record, stage, client_state, exclude_frozen)
    if optimizer is not None and stage >= 1 and writes_shard:
        file = names.optim_file(shard_rank, mp_rank, bf16=bool(engine.bfloat16_enabled()))
        files[file] = optim_states(engine, optimizer, record, stage)
    files[names.rng_file(rank)] = random_state.capture()
    return files


def axes(engine: DeepSpeedEngine) -> dict[str, int]:
    """Sizes of the mesh axes a saved tensor may be cut along."""
    return {axis: int(engine.mesh.size(axis)) for axis in ("dp", "sp", "tp", "pp")} | {"ep": 1}


# ---- model states --------------------------------------------------------------------------------------------------


def model_states(
    engine: DeepSpeedEngine,
    record: dict[str, Any] | None,
    stage: int,
    client_state: dict[str, Any],
    exclude_frozen: bool,
) -> dict[str, Any]:
    """Content of the model-states file. Values of the library win over those of ``client_state``."""
    optimizer = engine.zero_optimizer
    named = list(engine.module.named_parameters(remove_duplicate=False))
    module = module_state(engine, exclude_frozen)
    if stage >= 3:
        empty_parameters(module, named)
    frozen = {names.clean_name(name): param for name, param in named if not param.requires_grad}
    left_out = sorted(frozen) if exclude_frozen else []
    state = {
        keys.MODULE: module,
        keys.BUFFER_NAMES: buffer_names(engine),
        keys.OPTIMIZER: stage_0_optimizer(optimizer) if optimizer is not None and stage == 0 else None,
        keys.PARAM_SHAPES: param_shapes(optimizer) if optimizer is not None and stage >= 1 else None,
        keys.FROZEN_PARAM_SHAPES: None,
        keys.FROZEN_PARAM_FRAGMENTS: None,
        keys.SHARED_PARAMS: shared_params(named) if stage >= 1 else None,
        keys.LR_SCHEDULER: _state_of(engine.lr_scheduler),
        keys.DATA_SAMPLER: None,
        keys.RANDOM_LTD: None,
        keys.SKIPPED_STEPS: int(engine.skipped_steps),
        keys.GLOBAL_STEPS: int(engine.global_steps),
        keys.GLOBAL_SAMPLES: int(engine.global_samples),
        keys.DP_WORLD_SIZE: shard_place(engine)[1],
        keys.MP_WORLD_SIZE: model_parallel_size(engine),
        keys.CHECKPOINT_PARALLEL_DIMS: parallel_dimensions(engine),
        keys.DS_CONFIG: plain_copy(engine.config),
        keys.DS_VERSION: version,
        keys.LAYOUT_RECORD: record,
        keys.ENGINE_STATE: engine_state(engine, left_out),
    }
    if stage == 2 and not exclude_frozen:
        state[keys.FROZEN_PARAM_SHAPES] = OrderedDict((name, param.shape) for name, param in frozen.items())
        state[keys.FROZEN_PARAM_FRAGMENTS] = OrderedDict((name, param.detach()) for name, param in frozen.items())
    return {**state, **{key: value for key, value in client_state.items() if state.get(key) is None}}


def rest_states(rest: list[resting.RestRun], exclude_frozen: bool) -> dict[str, Any]:
    """The keys of the model-states file for parameters that no optimizer holds, at stage 3."""
    if exclude_frozen and not rest:
        return {}
    return {keys.FROZEN_PARAM_SHAPES: resting.shapes(rest), keys.FROZEN_PARAM_FRAGMENTS: resting.fragments(rest)}


def empty_parameters(module: dict[str, Any], named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
    """Parameters of a module's state become empty tensors of their dtype: their elements are in the shards."""
    for name, param in named:
        clean = names.clean_name(name)
        if clean in module:
            module[clean] = torch.empty(0, dtype=param.dtype)


def module_state(engine: DeepSpeedEngine, exclude_frozen: bool) -> OrderedDict[str, Any]:
    """The module's state dict under names without compile wrappers. Tied tensors stay one tensor in the file."""
    known = {name: name for name in engine.param_names.values()}  # one string object per name: the file holds it once
    raw = engine.module_state_dict(exclude_frozen_parameters=exclude_frozen)
    state: OrderedDict[str, Any] = OrderedDict()
    for name, value in raw.items():
        clean = names.clean_name(name)
        state[known.get(clean, clean)] = value.detach() if isinstance(value, torch.Tensor) else value
    metadata = getattr(raw, "_metadata", None)
    if metadata is not None:
        kept = {names.clean_name(f"{key}.").rstrip("."): value for key, value in metadata.items()}
        # Version 1 is what a module without a version loads as.
        state._metadata = OrderedDict(  # type: ignore[attr-defined]
            (key, value) for key, value in kept.items() if value.get("version", 1) != 1
        )
    return state


def buffer_names(engine: DeepSpeedEngine) -> list[str]:
    """Names of the buffers the state dict holds."""
    held = {
        f"{prefix}.{key}" if prefix else key
        for prefix, module in engine.module.named_modules(remove_duplicate=False)
        for key in module._buffers
        if key not in module._non_persistent_buffers_set and module._buffers[key] is not None
    }
    return sorted(names.clean_name(name) for name in held)


def param_shapes(optimizer: ZeroOptimizer) -> list[OrderedDict[str, torch.Size]]:
    """Shapes per shard group, in the order of its flat tensors."""
    return [
        OrderedDict(zip(group.names, (torch.Size(shape) for shape in group.shapes), strict=True))
        for group in optimizer.groups
    ]


def shared_params(named: Sequence[tuple[str, torch.nn.Parameter]]) -> dict[str, str]:
    """``alias -> first name`` of parameters reachable under several names."""
    first: dict[int, str] = {}
    aliases = {}
    for name, param in named:
        clean = names.clean_name(name)
        kept = first.setdefault(id(param), clean)
        if kept != clean:
            aliases[clean] = kept
    return aliases


def engine_state(engine: DeepSpeedEngine, left_out: Sequence[str]) -> dict[str, Any]:
    """What an exact resume needs beside the historical keys."""
    accumulation = engine.accumulation
    micro_steps = accumulation.micro_steps
    if accumulation.managed:
        micro_steps -= accumulation.in_window  # gradients of an unfinished window are not saved
    return {
        "version": keys.ENGINE_STATE_VERSION,
        "micro_steps": int(micro_steps),
        "gradient_accumulation_steps": int(accumulation.steps),
        "train_batch_size": int(engine.train_batch_size()),
        "data_loader": _state_of(engine.training_dataloader),
        "callbacks": engine.callbacks.state_dict(),
        "excluded_frozen": list(left_out),
        "optimizer_order": optimizer_order(engine.zero_optimizer),
        "loss_scaler": zero_state.scaler_state(getattr(engine.zero_optimizer, "loss_scaler", None)),
    }


def optimizer_order(optimizer: ZeroOptimizer | None) -> list[list[str]] | None:
    """Names of the parameters the optimizer was given, where frozen ones are among them: nothing else says so."""
    if optimizer is None or not optimizer.frozen:
        return None
    return [[optimizer.names.get(id(param), "") for param in group] for group in optimizer.client_groups]


def _state_of(thing: Any) -> Any:
    """``thing.state_dict()`` where there is one, else None."""
    return thing.state_dict() if hasattr(thing, "state_dict") else None


# ---- optimizer states ----------------------------------------------------------------------------------------------


def join_in_file(tensors: Sequence[torch.Tensor]) -> Slice:
    """One 1D tensor in the file, read from where the parts lie when it is written."""
    pack = Pack(tensors[0].dtype if tensors else torch.float32)
    for tensor in tensors:
        pack.add(tensor)
    return pack.whole()


def optim_states(
    engine: DeepSpeedEngine, optimizer: ZeroOptimizer, record: dict[str, Any] | None, stage: int
) -> dict[str, Any]:
    """Content of one optimizer-states file."""
    shard = zero_state.shard_state(optimizer, stage, join_in_file)
    shard[keys.DS_VERSION] = version
    shard[keys.LAYOUT_RECORD] = record
    shard[keys.SHARD_RANK] = shard_place(engine)[0]
    return {
        keys.OPTIMIZER_STATE_DICT: shard,
        keys.DS_CONFIG: plain_copy(engine.config),
        keys.DS_VERSION: version,
    }


def stage_0_optimizer(optimizer: ZeroOptimizer) -> dict[str, Any]:
    """The optimizer's state at stage 0: a torch state dict over whole parameters, plus masters where there are some.

    Each group lists its ``param_names``, as torch's own state dicts of named parameters do.
    """
    packs: dict[tuple[str, torch.dtype], Pack] = {}

    def packed(key: str, tensor: torch.Tensor) -> Slice:
        return packs.setdefault((key, tensor.dtype), Pack(tensor.dtype)).add(tensor)

    hyper = zero_state.hyper_parameters(optimizer)
    by_leaf = {id(bound.leaf): bound for group in optimizer.groups for bound in group.fragments}
    state: dict[int, dict[str, Any]] = {}
    groups, masters = [], []
    position = 0
    for settings, base_group in zip(hyper, optimizer.optimizer.param_groups, strict=True):
        members = [by_leaf[id(leaf)] for leaf in base_group["params"]]
        for offset, bound in enumerate(members):
            held = optimizer.optimizer.state.get(bound.leaf)
            if held:
                state[position + offset] = {
                    key: packed(key, value) if isinstance(value, torch.Tensor) else value for key, value in held.items()
                }
        order = list(range(position, position + len(members)))
        groups.append({**settings, "params": order, "param_names": [bound.fragment.name for bound in members]})
        # A parameter that is its own master shares its storage with the weights in the file.
        masters.append([bound.model.detach() if bound.aliased else packed("master", bound.leaf) for bound in members])
        position += len(members)
    plain = {"state": state, keys.PARAM_GROUPS: groups}
    if all(group.aliased for group in optimizer.groups):
        return plain
    scaler = zero_state.scaler_state(optimizer.loss_scaler)
    shown = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
    return {
        keys.OPTIMIZER_STATE_DICT: plain,
        keys.FP32_GROUPS: masters,
        keys.CLIP_GRAD: float(optimizer.clip_grad),
        keys.DYNAMIC_LOSS_SCALE: bool(scaler.get("dynamic")),
        **{key: scaler[key] for key in shown if key in scaler},
    }


def plain_copy(value: Any) -> Any:
    """``value`` with everything that is not plain data replaced by its text (a config may hold any objects)."""
    if isinstance(value, dict):
        return {str(key): plain_copy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_copy(item) for item in value]
    return value if zero_state.is_plain(value) else str(value)
