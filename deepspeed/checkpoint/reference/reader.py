"""A tag that DeepSpeed itself wrote (0.19.6 to 0.19.8), opened for reading: the same questions answered as by a
:class:`~.reader.SavedTag`, so that everything behind it is one path.

Its files have no layout record; one is made from the shapes in the model-states file and the lengths in a shard. At
stage 3 every rank's model states list tied names, but not what they are tied to: a name without elements anywhere is
left out, and the live module, which ties it, serves it.

Owns: which file says what. Does not own: the arithmetic (``reference/layout.py``, ``reference/stage0.py``), what an
engine does with it (``restore.py``).
Invariant: model-parallel slices, experts and pipeline layers, which this release does not read, are refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import index as indexing
from deepspeed.checkpoint import trusted
from deepspeed.checkpoint.constants import base_state_key, dtype_name, masters_key
from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.checkpoint.reader import SavedTag
from deepspeed.checkpoint.reference import layout as layouts
from deepspeed.checkpoint.reference.stage0 import Stage0Optimizer, parameters_in
from deepspeed.utils.torch_archive.tensors import is_tensor

_EXPECTED = (keys.MODULE, keys.DP_WORLD_SIZE, keys.PARAM_SHAPES, keys.GLOBAL_STEPS)
_UNREAD = {
    "num_experts": "experts",
    keys.AUTOEP_LAYERS_KEY: "experts",
    keys.AUTOEP_LAYERS_KEY_LEGACY: "experts",
    keys.FOLDING_METADATA_KEY: "experts folded with tensor parallelism",
}


def open_saved(
    load_dir: Path,
    tag: str,
    mp_rank: int = 0,
    shard_rank: int = 0,
    world: int = 1,
    *,
    node_local: bool = False,
    plain: bool = False,
) -> SavedTag:
    """The tag, whoever wrote it. Raises CheckpointError for one that is absent, damaged or refused."""
    opened = SavedTag(load_dir, tag, mp_rank, shard_rank, world, node_local=node_local, plain=plain)
    written_here = opened.ours or keys.LAYOUT_RECORD in opened.model
    return opened if written_here or keys.DS_VERSION not in opened.model else ReferenceTag(opened, shard_rank)


class ReferenceTag(SavedTag):
    """See the module docstring. Takes over what ``opened`` has opened; ``shard_rank``: whose shard to ask first."""

    def __init__(self, opened: SavedTag, shard_rank: int = 0) -> None:
        self.__dict__.update(opened.__dict__)
        self.first_rank = shard_rank
        self.orders: list[list[list[str]]] = []
        self._refuse_incomplete()
        self._refuse_unread()

    def _refuse_incomplete(self) -> None:
        missing = [key for key in _EXPECTED if key not in self.model]
        if missing:
            raise CheckpointError(
                f"{self.path} has no {', '.join(missing)}, which every model-states file of DeepSpeed 0.19 has (found "
                f"version {self.model[keys.DS_VERSION]}): another release wrote it, or it was changed. Load another "
                "tag, or its weights through the zero_to_fp32.py beside it"
            )

    def _refuse_unread(self) -> None:
        found = [what for key, what in _UNREAD.items() if self.model.get(key)]
        degree = int(self.model.get(keys.MP_WORLD_SIZE) or 1)
        if degree > 1:
            found.append(f"a model cut into {degree} model-parallel slices")
        if self.model[keys.MODULE] is None:
            found.append("pipeline layers")
        if found:
            raise CheckpointError(
                f"{self.path} was written by DeepSpeed {self.model[keys.DS_VERSION]} and holds {', '.join(found)}, "
                "which this release does not read"
            )

    # ---- what kind of tag ------------------------------------------------------------------------------------------

    @property
    def stage(self) -> int:
        """3, 2 (also for stage 1, whose files are the same) or 0."""
        if self._sharded_model_files:
            return 3
        return 2 if self.model.get(keys.PARAM_SHAPES) is not None else 0

    @property
    def holds_optimizer(self) -> bool:
        return bool(self.model.get(keys.PARAM_SHAPES) if self.stage else self.model.get(keys.OPTIMIZER))

    @property
    def shards(self) -> int:
        return int(self.model[keys.DP_WORLD_SIZE]) if self.stage and self.holds_optimizer else 0

    @cached_property
    def loss_scaler(self) -> dict[str, Any]:
        if not self.holds_optimizer or (self.stage and not self.has_optim_files()):
            return {}
        if self.stage:
            return layouts.scaler_of(self.any_shard().get(keys.LOSS_SCALER))
        saved = self.model[keys.OPTIMIZER]
        return layouts.scaler_of(saved) if keys.OPTIMIZER_STATE_DICT in saved else {}

    def take_order(self, *orders: Sequence[Sequence[str]]) -> None:
        self.orders = [[list(group) for group in order] for order in orders]

    # ---- the record ------------------------------------------------------------------------------------------------

    @cached_property
    def record(self) -> dict[str, Any] | None:
        config = self.model.get(keys.DS_CONFIG)
        if not self.holds_optimizer:
            return None
        if self.stage == 0:
            states = self._stage_0.plain["state"].values()
            groups = self._stage_0.groups_of_record(self._named)
            return layouts.record_of(0, groups, [], 1, layouts.families_of(config, states))
        shard, where = self.any_shard(), str(self.folder / self.optim_file(min(self._shards)))
        shapes, world = self.model[keys.PARAM_SHAPES], self._partitions(shard)
        families = layouts.families_of(config, layouts.flat_states(shard, self.stage))
        if self.stage < 3:
            groups = layouts.partitioned_groups(shapes, self._dtypes, shard, where)
            return layouts.record_of(self.stage, groups, [], world, families)
        groups = layouts.sub_groups(shapes, self._dtypes, shard, world, where)
        layouts.number_groups(groups, self.base_state(shard)[keys.PARAM_GROUPS])
        rest = layouts.rest_runs(self.model.get(keys.FROZEN_PARAM_SHAPES) or {}, self._dtypes, world)
        return layouts.record_of(3, groups, rest, world, families)

    def _partitions(self, shard: dict[str, Any]) -> int:
        """Ranks the state was cut over. Raises CheckpointError where that is not all of them."""
        counts = shard[keys.PARTITION_COUNT]
        for count in counts if isinstance(counts, (list, tuple)) else [counts]:
            if int(count) != self.shards:
                raise CheckpointError(
                    f"{self.folder}: a group was cut over {count} ranks, {keys.DP_WORLD_SIZE} is {self.shards}; shards "
                    "with replicas and expert groups of DeepSpeed are not read by this release"
                )
        return self.shards

    @cached_property
    def _dtypes(self) -> dict[str, str]:
        """Of every tensor of the module, in the file and therefore in the saved run."""
        module = self.check_trust(keys.MODULE, self.model[keys.MODULE])
        return {name: dtype_name(value.dtype) for name, value in module.items() if is_tensor(value)}

    @cached_property
    def _stage_0(self) -> Stage0Optimizer:
        module = parameters_in(self.model[keys.MODULE], self.model.get(keys.BUFFER_NAMES) or ())
        return Stage0Optimizer(self.model[keys.OPTIMIZER], module, str(self.path))

    @cached_property
    def _named(self) -> list[list[str]]:
        return self._stage_0.named_groups(self.orders)

    # ---- module ----------------------------------------------------------------------------------------------------

    def module_state(self) -> dict[str, Any]:
        """As of every tag; at stage 3 without the names that have elements nowhere (see the module docstring)."""
        state = super().module_state()
        buffers = set(self.model.get(keys.BUFFER_NAMES) or ())
        for name in [name for name in state if name not in buffers] if self.stage == 3 else ():
            value = state[name]
            if is_tensor(value) and value.shape == (0,):
                del state[name]
        return state

    def _index_rest(self, made: indexing.FragmentIndex, rank: int) -> None:
        assert self.record is not None
        file, held = self._frozen_of(rank)
        layouts.add_frozen(made, self.record, held, rank, file, str(self.folder / file))

    # ---- optimizer state -------------------------------------------------------------------------------------------

    @cached_property
    def hyper_parameters(self) -> list[dict[str, Any]]:
        if self.stage == 0:
            return self._stage_0.settings
        return layouts.settings_of(self.any_shard(), self.stage, len(self.model[keys.PARAM_SHAPES]))

    def base_state(self, shard: dict[str, Any]) -> dict[str, Any]:
        found = shard[base_state_key(self.stage)]
        return found if isinstance(found, dict) else {}

    def any_shard(self) -> dict[str, Any]:
        self.optim_files()  # all that are due are there
        here = self._optim_files
        return self.shard(min(self._shards, default=self.first_rank if self.first_rank in here else min(here)))

    def shard(self, rank: int) -> dict[str, Any]:
        """The optimizer state dict in the file of shard ``rank``, mapped, checked for its keys."""
        if rank not in self._shards:
            path = self.folder / self.optim_file(rank)
            self._require([path.name])
            data = self._load_file(path)
            asked = trusted.untrusted_paths(data)
            if asked:
                raise CheckpointError(f"{path} asks for {', '.join(asked)}, which is refused")
            shard = data.get(keys.OPTIMIZER_STATE_DICT) if isinstance(data, dict) else None
            shard = shard if isinstance(shard, dict) else {}
            for key in (base_state_key(self.stage), masters_key(self.stage), keys.PARTITION_COUNT):
                if key not in shard:
                    raise CheckpointError(
                        f"{path} is not an optimizer-states file of stage {self.stage}: it has no {key!r}"
                    )
            self._shards[rank] = shard
        found: dict[str, Any] = self._shards[rank]
        return found

    def _index_shard(self, made: indexing.FragmentIndex, rank: int) -> None:
        assert self.record is not None
        file = self.optim_file(rank)
        zero = (self.model.get(keys.DS_CONFIG) or {}).get("zero_optimization") or {}
        # With round_robin_gradients the flat order is that of the shapes; the mappings there are of another order.
        mapped = self.stage < 3 and not zero.get("round_robin_gradients")
        where = str(self.folder / file)
        layouts.add_shard(made, self.record, self.shard(rank), rank, file, where, mapped=mapped)

    def _index_stage_0(self, made: indexing.FragmentIndex) -> None:
        self._stage_0.add_to(made, self._named, self.model_file)
