"""The two files of a universal folder that are not of one parameter: common optimizer state, and model states.

Owns: their content, in the historical form and with the record. Does not own: the files of parameters
(``universal/plan.py``), reading them back (``universal/reader.py``).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import names, trusted
from deepspeed.checkpoint.reader import SavedTag
from deepspeed.checkpoint.universal.record import FLAT, UniversalRecord
from deepspeed.git_version_info import version
from deepspeed.utils.torch_archive.tensors import DTYPES, PlainTensor, Size, scalar, zeros

_MEMBERS = ("param_names",)


def common_state(saved: SavedTag, record: UniversalRecord, steps: float | None) -> dict[str, Any]:
    """``zero/optimizer_state.pt``: hyper-parameters, loss scale and the record."""
    scaler = scaler_object(scaler_attributes(saved.loss_scaler))
    groups = [{key: value for key, value in group.items() if key not in _MEMBERS} for group in saved.hyper_parameters]
    world = max(saved.shards, 1)
    held = [0 for entry in record.parameters.values() if entry.group is not None]
    state: dict[str, Any] = {
        keys.LOSS_SCALER: scaler,
        keys.DYNAMIC_LOSS_SCALE: bool(vars(scaler)["dynamic"]),
        keys.OVERFLOW: False,
        keys.DS_VERSION: version,
        keys.PARAM_GROUPS: groups,
        keys.UNIVERSAL_RECORD: record.as_data(),
    }
    if record.form == FLAT:
        first = {} if steps is None else {0: {"step": scalar(steps)}}
        state[keys.ZERO_STAGE] = 3
        state[keys.PARTITION_COUNT] = world
        state[keys.OPTIMIZER_STATE_DICT] = {"state": first, keys.PARAM_GROUPS: groups}
        state[keys.FP32_FLAT_GROUPS] = []
    else:
        state[keys.ZERO_STAGE] = min(max(record.zero_stage, 1), 2)
        state[keys.PARTITION_COUNT] = [world] * len(groups)
        state[keys.GROUP_PADDINGS] = [0] * len(groups)
        state[keys.PARAM_ALIGNMENT_PADDINGS] = [held] + [[] for _ in groups[1:]]
        state[keys.CLIP_GRAD] = _clip_grad(saved)
    info = saved.model.get(keys.UNIVERSAL_CHECKPOINT_INFO)
    if info is not None:
        state[keys.UNIVERSAL_CHECKPOINT_INFO] = info
    return state


def _clip_grad(saved: SavedTag) -> float:
    source = saved.any_shard() if saved.stage in (1, 2) else saved.model.get(keys.OPTIMIZER) or {}
    return float(source.get(keys.CLIP_GRAD, 0.0))


def scaler_attributes(found: Any) -> dict[str, Any]:
    """A loss scaler of a file, an object or plain data, as plain data."""
    attributes = dict(found if isinstance(found, dict) else vars(found) if found is not None else {})
    return {"cur_scale": 1.0, "dynamic": False, **attributes}


def scaler_object(state: dict[str, Any]) -> trusted.PlainObject:
    """What other releases expect in the file: an object of their class with these attributes."""
    kind = "DynamicLossScaler" if state.get("dynamic") else "LossScaler"
    attributes = {key: value for key, value in state.items() if key != "class"}
    return trusted.old_object(f"deepspeed.runtime.fp16.loss_scaler.{kind}", attributes)


def _empty(dtype: str) -> PlainTensor:
    return zeros((0,), DTYPES[dtype])


def model_states(saved: SavedTag, record: UniversalRecord, source_files: list[SavedTag]) -> tuple[str, dict[str, Any]]:
    """``(file name, content)`` of the model states: those of the tag, with parameters empty and no optimizer state."""
    content = dict(saved.model)
    module: OrderedDict[str, Any] = OrderedDict()
    for part in source_files:
        for name, value in part.model[keys.MODULE].items():
            kept = record.parameters.get(record.shared.get(name, name))
            module[name] = _empty(kept.dtype) if kept is not None else value
    metadata = getattr(saved.model[keys.MODULE], "_metadata", None)
    if metadata is not None:
        module._metadata = metadata  # type: ignore[attr-defined]
    held = [(name, entry) for name, entry in record.parameters.items() if entry.group is not None]
    rest = [(name, entry) for name, entry in record.parameters.items() if entry.group is None]
    content[keys.MODULE] = module
    content[keys.OPTIMIZER] = None
    content[keys.PARAM_SHAPES] = [
        OrderedDict((name, Size(entry.shape)) for name, entry in held if entry.group == group)
        for group in sorted({entry.group for _, entry in held if entry.group is not None})
    ]
    content[keys.FROZEN_PARAM_SHAPES] = OrderedDict((name, Size(entry.shape)) for name, entry in rest)
    content[keys.FROZEN_PARAM_FRAGMENTS] = None
    content[keys.SHARED_PARAMS] = dict(record.shared)
    content[keys.LAYOUT_RECORD] = None
    file = names.sharded_model_file(0, 0) if record.form == FLAT else names.model_file(0)
    return file, content
