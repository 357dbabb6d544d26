"""A universal folder, opened for reading: the same questions answered as by a :class:`~.reader.SavedTag`.

Owns: finding the files of every parameter and turning them into a :class:`~.index.FragmentIndex`. Does not own: what an
engine does with them (``restore.py``), folders of other releases, which have no record (``universal/foreign.py``).
Invariant: a file the record lists is read or its absence is an error that names it and its parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import index as indexing
from deepspeed.checkpoint import names, reader, trusted
from deepspeed.checkpoint.disk import durable
from deepspeed.checkpoint.disk.manifest import is_complete, read_manifest
from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.checkpoint.reader import SavedParameter, SavedTag
from deepspeed.checkpoint.reference.reader import open_saved
from deepspeed.checkpoint.sharded_weight import ShardedWeight
from deepspeed.checkpoint.universal.common import scaler_attributes
from deepspeed.checkpoint.universal.foreign import ForeignFrozen, foreign_record
from deepspeed.checkpoint.universal.record import UniversalParameter, UniversalRecord
from deepspeed.runtime.zero.state_dict import FLAT, SCALAR, TENSOR


def is_universal(folder: Path) -> bool:
    """True for a folder that holds the common part of a universal checkpoint."""
    return (folder / names.UNIVERSAL_COMMON).exists()


def open_tag(
    load_dir: Path,
    tag: str,
    mp_rank: int,
    shard_rank: int,
    world: int,
    *,
    universal: bool = False,
    node_local: bool = False,
) -> SavedTag:
    """The tag, by what its folder holds. ``universal``: it must be a universal one. Raises CheckpointError."""
    folder = load_dir if tag == names.THIS_FOLDER else load_dir / tag
    durable.recover(folder, is_complete)
    if is_universal(folder):
        return UniversalTag(load_dir, tag, mp_rank)
    if universal and folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a universal checkpoint: {names.UNIVERSAL_COMMON} is missing. Ordinary tags load at any "
            "number of ranks and stage as they are, without checkpoint.load_universal; to make a universal one, run "
            "python -m deepspeed.checkpoint.ds_to_universal"
        )
    return open_saved(load_dir, tag, mp_rank, shard_rank, world, node_local=node_local)


class UniversalTag(SavedTag):
    """See the module docstring. ``mp_rank`` is the slice of the model this process needs."""

    def __init__(self, load_dir: Path, tag: str, mp_rank: int = 0) -> None:
        self.load_dir, self.tag, self.mp_rank = load_dir, tag, mp_rank
        self.folder = load_dir if tag == names.THIS_FOLDER else load_dir / tag
        self.manifest = read_manifest(self.folder)
        self._sharded_model_files = self._find_sharded_model_files()
        own = self._sharded_model_files
        self.model_file = own[min(own)] if own else names.model_file(mp_rank)
        self._require([self.model_file, names.UNIVERSAL_COMMON])
        self.model = trusted.load_file(self.folder / self.model_file)
        if not isinstance(self.model, dict) or keys.MODULE not in self.model:
            raise CheckpointError(f"{self.path} is not a model-states file: it has no {keys.MODULE!r}")
        common = self.folder / names.UNIVERSAL_COMMON
        self.common: dict[str, Any] = trusted.load_file(common)
        asked = trusted.untrusted_paths(self.common)
        if asked:
            raise CheckpointError(f"{common} asks for {', '.join(asked)}, which is refused")
        self.universal = UniversalRecord("", 0, [], {})
        self._check_library_part()
        if keys.UNIVERSAL_RECORD in self.common:
            self.universal = UniversalRecord.from_data(self.common[keys.UNIVERSAL_RECORD], common)
            if self.manifest is None:
                raise CheckpointError(
                    f"{self.folder} has no {names.MANIFEST}: the conversion did not finish, or the folder was copied "
                    "without it"
                )
        else:
            self.universal = foreign_record(self.folder, self.model, self.common)

    @property
    def record(self) -> dict[str, Any]:
        """What of a layout record a universal folder has: nothing is laid out in it."""
        return {
            "zero_stage": self.universal.zero_stage,
            "optimizer": self.universal.optimizer,
            "groups": [],
            "rest": [],
        }

    @property
    def engine_state(self) -> dict[str, Any]:
        state = self.model.get(keys.ENGINE_STATE)
        if state:
            return dict(state)
        return {"loss_scaler": scaler_attributes(self.common.get(keys.LOSS_SCALER))}

    @property
    def stage(self) -> int:
        """3: as there, weights are found through the index."""
        return 3

    @property
    def shards(self) -> int:
        return 1

    @property
    def holds_optimizer(self) -> bool:
        return True

    def model_files(self) -> list[str]:
        return [self.model_file]

    def optim_files(self) -> list[str]:
        """Every file of every parameter, and the common one."""
        return [names.UNIVERSAL_COMMON] + [
            names.universal_file(name, stem)
            for name, entry in self.universal.parameters.items()
            for stem in (entry.stems() if entry.group is not None or self._has_own_file(name) else ())
        ]

    def _has_own_file(self, name: str) -> bool:
        return name not in self._foreign_frozen.names

    def has_optim_files(self) -> bool:
        return True

    def check_files(
        self,
        chosen: list[str],
        rank: int,
        world: int,
        leads_node: bool = False,
        sum_of: Callable[[Path], int] | None = None,
    ) -> None:
        """As for a tag; files are shared out by their place in the list, there is no shard they belong to."""
        self._require(chosen)
        if self.manifest is not None:
            share = [name for number, name in enumerate(sorted(chosen)) if number % world == rank]
            problems = reader.wrong_checksums(self.folder, self.manifest, share, sum_of)
            if problems:
                raise CheckpointError(f"universal checkpoint {self.folder}: {'; '.join(problems)}")

    # ---- module ----------------------------------------------------------------------------------------------------

    def _weight(self, name: str) -> ShardedWeight | None:
        name = self.universal.shared.get(name, name)
        entry = self.universal.parameters.get(name)
        if entry is None:
            return None
        dtype = getattr(torch, entry.dtype)
        if not self._has_own_file(name):
            return ShardedWeight(name, entry.shape, dtype, self._foreign_frozen.index, indexing.WEIGHT)
        return ShardedWeight(name, entry.shape, dtype, self.weights_index, indexing.MASTER)

    @cached_property
    def _foreign_frozen(self) -> ForeignFrozen:
        return ForeignFrozen(self.folder, self.universal, self._sharded_model_files)

    @cached_property
    def weights_index(self) -> indexing.FragmentIndex:
        """Masters alone: their files are opened when a weight is asked for."""
        return self._lazy_index(self.universal.parameters, with_states=False)

    # ---- optimizer state -------------------------------------------------------------------------------------------

    @cached_property
    def parameters(self) -> dict[str, SavedParameter]:
        return {
            name: SavedParameter(entry.shape, entry.dtype, entry.master_dtype, False, entry.group)
            for name, entry in self.universal.parameters.items()
            if entry.group is not None
        }

    @cached_property
    def hyper_parameters(self) -> list[dict[str, Any]]:
        groups = self.common.get(keys.PARAM_GROUPS)
        if groups is None:
            raise CheckpointError(f"{self.folder / names.UNIVERSAL_COMMON} has no {keys.PARAM_GROUPS!r}")
        return list(groups)

    def base_state(self, shard: dict[str, Any]) -> dict[str, Any]:
        return {"extra": self.universal.extra}

    def shard(self, rank: int) -> dict[str, Any]:
        return self.common

    @cached_property
    def index(self) -> indexing.FragmentIndex:
        return self._lazy_index(self.parameters, with_states=True)

    def _lazy_index(self, chosen: Iterable[str], *, with_states: bool) -> indexing.FragmentIndex:
        listed = list(chosen)
        made = indexing.FragmentIndex(
            {
                name: [indexing.Owner(0, math.prod(self.universal.parameters[name].shape), number)]
                for number, name in enumerate(listed)
            }
        )
        made.open_rank = lambda number: self._index_parameter(made, listed[number], with_states)
        return made

    def _index_parameter(self, made: indexing.FragmentIndex, name: str, with_states: bool) -> None:
        entry = self.universal.parameters[name]
        numel = math.prod(entry.shape)
        file = names.universal_file(name, keys.FP32_WEIGHT_KEY)
        value = self._load(name, file, entry, FLAT)
        made.add(name, indexing.MASTER, indexing.Extent(file, "", 0, 0, numel, FLAT, value))
        for key, kind in entry.states.items() if with_states else ():
            if key in entry.values:
                extent = indexing.Extent(names.UNIVERSAL_COMMON, key, 0, 0, numel, kind, entry.values[key])
            else:
                file = names.universal_file(name, entry.stem(key))
                value = self._load(name, file, entry, kind)
                extent = indexing.Extent(file, "", 0, 0, numel, kind, value)
            made.add(name, key, extent)

    def _load(self, name: str, file: str, entry: UniversalParameter, kind: str) -> torch.Tensor:
        path = self.folder / file
        if not path.exists():
            raise CheckpointError(f"{path} is missing: {Path(file).stem} of parameter {name!r} cannot be loaded")
        found = trusted.load_file(path)
        value = found.get(keys.PARAM) if isinstance(found, dict) else found
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(f"{path} holds no tensor for parameter {name!r}, but a {type(value).__name__}")
        expected = 1 if kind == SCALAR else math.prod(entry.shape)
        if kind != TENSOR and value.numel() != expected:
            raise CheckpointError(
                f"{path} holds {value.numel()} elements ({tuple(value.shape)}), parameter {name!r} of shape "
                f"{entry.shape} needs {expected}"
            )
        return value
