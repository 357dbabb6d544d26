"""Universal folders written by DeepSpeed's own tool: a record made of what their files say.

    parameters     ``param_shapes`` of the model states, one entry per group
    states         the files in each parameter's folder; at stage 3 the step of ``optimizer_state.pt``
    the rest       at stages 1 and 2 in the module's state dict; frozen parameters of stage 3 as fragments in each
                   rank's model states

A parameter that has some of the states the others have has lost the rest: an error. One that has none of them never had
a gradient.

Owns: that record, and the index of those fragments. Does not own: files of parameters (``universal/reader.py``).
"""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import index as indexing
from deepspeed.checkpoint import names, trusted
from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.checkpoint.reference.layout import families_of_states
from deepspeed.checkpoint.universal.record import FLAT as FLAT_FORM
from deepspeed.checkpoint.universal.record import WHOLE, UniversalParameter, UniversalRecord
from deepspeed.runtime.zero import state_dict as zero_state


def foreign_record(folder: Path, model: dict[str, Any], common: dict[str, Any]) -> UniversalRecord:
    """The record of a folder without one. Raises CheckpointError naming parameters and files that are missing."""
    groups = model.get(keys.PARAM_SHAPES)
    if not groups:
        raise CheckpointError(f"{folder} lists no {keys.PARAM_SHAPES} in its model states: what it holds is not known")
    flat = keys.OPTIMIZER_STATE_DICT in common
    record = UniversalRecord(FLAT_FORM if flat else WHOLE, int(common.get(keys.ZERO_STAGE, 1)), _family(model), {})
    record.shared = dict(model.get(keys.SHARED_PARAMS) or {})
    module = model[keys.MODULE]
    step = _common_step(common) if flat else None
    for number, group in enumerate(groups):
        for name, shape in group.items():
            value = module.get(name)
            dtype = value.dtype if isinstance(value, torch.Tensor) else torch.float32
            entry = UniversalParameter(tuple(shape), zero_state.dtype_name(dtype), "float32", number)
            entry.states = _states_in(folder, name)
            record.parameters[name] = entry
    _check_states(folder, record)
    # An optimizer given as an object is not in the config; then its states tell.
    states = {key for entry in record.parameters.values() for key in entry.states}
    record.optimizer = record.optimizer or families_of_states(states - {"step"})
    for entry in record.parameters.values():
        if step is not None and entry.states:
            entry.states["step"] = zero_state.SCALAR
            entry.values["step"] = torch.tensor(step)
    if flat:
        for name, shape in (model.get(keys.FROZEN_PARAM_SHAPES) or {}).items():
            value = module.get(name)
            held = zero_state.dtype_name(value.dtype if isinstance(value, torch.Tensor) else torch.float32)
            record.parameters[name] = UniversalParameter(tuple(shape), held, held)
    return record


def _family(model: dict[str, Any]) -> list[str]:
    """The optimizer's name in the config, as ``runtime/zero/state_dict.py`` spells it; empty when it is not there."""
    config = model.get(keys.DS_CONFIG)
    section = config.get("optimizer") if isinstance(config, dict) else None
    kind = section.get("type") if isinstance(section, dict) else None
    return [zero_state.family(kind)] if isinstance(kind, str) else []


def _common_step(common: dict[str, Any]) -> float | None:
    state = common[keys.OPTIMIZER_STATE_DICT].get("state") or {}
    found = [entry["step"] for entry in state.values() if isinstance(entry, dict) and "step" in entry]
    return float(found[0]) if found else None


def _states_in(folder: Path, name: str) -> dict[str, str]:
    master = folder / names.universal_file(name, keys.FP32_WEIGHT_KEY)
    if not master.exists():
        raise CheckpointError(f"{master} is missing: parameter {name!r} cannot be loaded")
    found = sorted(entry.stem for entry in master.parent.glob("*.pt"))
    return {
        key: zero_state.SCALAR if key == "step" else zero_state.FLAT for key in found if key != keys.FP32_WEIGHT_KEY
    }


def _check_states(folder: Path, record: UniversalRecord) -> None:
    everything = {key for entry in record.parameters.values() for key in entry.states}
    if not everything:
        raise CheckpointError(f"{folder / names.UNIVERSAL_STATES} holds no optimizer state of any parameter")
    for name, entry in record.parameters.items():
        missing = sorted(everything - set(entry.states))
        # At stage 3 every parameter has state, at the others those that had a gradient.
        if missing and (entry.states or record.form == FLAT_FORM):
            path = folder / names.universal_file(name, missing[0])
            raise CheckpointError(f"{path} is missing: {', '.join(missing)} of parameter {name!r} cannot be loaded")


class ForeignFrozen:
    """Frozen parameters of stage 3, of which every rank's model states hold a piece: ``ceil(numel / ranks)`` elements.

    ``names`` is empty for folders written here, where they have files of their own.
    """

    def __init__(self, folder: Path, record: UniversalRecord, model_files: dict[int, str]) -> None:
        self.folder, self.record, self.model_files = folder, record, model_files
        self.names = {
            name
            for name, entry in record.parameters.items()
            if entry.group is None and not (folder / names.universal_file(name, keys.FP32_WEIGHT_KEY)).exists()
        }

    @cached_property
    def index(self) -> indexing.FragmentIndex:
        made = indexing.FragmentIndex()
        for rank, file in sorted(self.model_files.items()):
            model = trusted.load_file(self.folder / file)
            held = model.get(keys.FROZEN_PARAM_FRAGMENTS) or {}
            asked = trusted.untrusted_paths(held)
            if asked:
                raise CheckpointError(f"{self.folder / file} asks for {', '.join(asked)}, which is refused")
            for name in self.names & set(held):
                numel = math.prod(self.record.parameters[name].shape)
                piece = -(-numel // int(model[keys.DP_WORLD_SIZE]))
                start = min(rank * piece, numel)
                part = held[name].reshape(-1)[: min(piece, numel - start)]
                indexing.add_weight(made, file, name, start, part.numel(), part)
        return made
