"""One saved tag, opened for reading: its files checked, its weights mapped, its optimizer state indexed.

At stage 3 every rank has written model states, with empty parameters. One of these files is *the* model-states file of
this process: its own at the same number of ranks, else the first. The weights are found through the index.

Owns: finding the tag, checking that its files are there and whole, and turning them into a :class:`FragmentIndex`.
Does not own: what an engine does with them (``restore.py``), agreement between ranks (``manager.py``).
Invariant: opening changes nothing on disk but one thing: a tag that a crash left without its name gets it back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import index as indexing
from deepspeed.checkpoint import names, trusted
from deepspeed.checkpoint.constants import FLAT, base_state_key, masters_key
from deepspeed.checkpoint.disk import durable
from deepspeed.checkpoint.disk.manifest import Manifest, is_complete, read_manifest, wrong_checksums, wrong_sizes
from deepspeed.checkpoint.errors import CheckpointError, OneNodesPart
from deepspeed.checkpoint.sharded_weight import ShardedWeight
from deepspeed.runtime.zero.layout import ShardLayout
from deepspeed.utils.torch_archive.tensors import DTYPES

if TYPE_CHECKING:
    import torch


def read_latest(load_dir: Path, pointer: str = names.LATEST) -> str | None:
    """The tag ``latest`` names, or None when there is no such file. Raises ValueError for a tag that is refused."""
    try:
        text = (load_dir / pointer).read_text(encoding="utf-8", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return names.check_tag(text)
    except ValueError as error:
        raise ValueError(f"{load_dir / pointer}: {error}") from None


def tags_in(load_dir: Path) -> list[str]:
    """Folders of ``load_dir`` that look like tags."""
    if not load_dir.is_dir():
        return []
    return sorted(
        entry.name
        for entry in load_dir.iterdir()
        if entry.is_dir() and not entry.name.startswith(".") and is_tag(entry)
    )


def is_tag(folder: Path) -> bool:
    """Whether ``folder`` looks like a tag: model states lie in it."""
    return any(folder.glob(f"*{keys.MODEL_FILE_SUFFIX}"))


def describe(load_dir: Path, limit: int = 20) -> str:
    """What ``load_dir`` holds, for messages."""
    if not load_dir.exists():
        return f"{load_dir} does not exist"
    if not load_dir.is_dir():
        return f"{load_dir} is a file"
    entries = sorted(entry.name + ("/" if entry.is_dir() else "") for entry in load_dir.iterdir())
    if not entries:
        return f"{load_dir} is empty"
    more = f" and {len(entries) - limit} more" if len(entries) > limit else ""
    whole = load_dir.resolve()
    itself = f"; it is a tag itself: give {whole.parent} and the tag {whole.name!r}" if is_tag(load_dir) else ""
    return f"{load_dir} holds {', '.join(entries[:limit])}{more}{itself}"


def _manifest_of(folder: Path) -> Manifest | None:
    try:
        return read_manifest(folder)
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{error}; without it nothing tells whether {folder} is whole") from error


@dataclass(frozen=True)
class SavedParameter:
    """What the layout record says of a parameter the saved optimizer held."""

    shape: tuple[int, ...]
    dtype: str
    master_dtype: str
    aliased: bool
    group_index: int


class SavedTag:
    """See the module docstring. ``mp_rank`` is the slice of the model this process needs, ``shard_rank`` of ``world``
    its place among those that share it. ``node_local``: files of other nodes' ranks are on their disks. ``plain``:
    tensors are plain ones, torch is not imported."""

    node_local = plain = False

    def __init__(
        self,
        load_dir: Path,
        tag: str,
        mp_rank: int = 0,
        shard_rank: int = 0,
        world: int = 1,
        *,
        node_local: bool = False,
        plain: bool = False,
    ) -> None:
        self.load_dir, self.tag, self.mp_rank, self.node_local = load_dir, tag, mp_rank, node_local
        self.plain = plain
        self.folder = load_dir if tag == names.THIS_FOLDER else load_dir / tag
        durable.recover(self.folder, is_complete)
        if not self.folder.is_dir():
            found = tags_in(load_dir)
            raise CheckpointError(
                f"there is no checkpoint {tag!r} in {load_dir}; "
                + (f"the tags there are {', '.join(found)}" if found else describe(load_dir))
            )
        self.manifest: Manifest | None = _manifest_of(self.folder)
        self._sharded_model_files = self._find_sharded_model_files()
        files = self._sharded_model_files
        own = shard_rank if shard_rank in files and (node_local or len(files) == world) else min(files, default=0)
        self.model_file = files.get(own, names.model_file(mp_rank))
        self._require([self.model_file])
        self.model: dict[str, Any] = self._load_file(self.folder / self.model_file)
        if not isinstance(self.model, dict) or keys.MODULE not in self.model:
            raise CheckpointError(f"{self.path} is not a model-states file: it has no {keys.MODULE!r}")
        self._check_library_part()

    def _load_file(self, path: Path) -> Any:
        return trusted.load_plain(path) if self.plain else trusted.load_file(path)

    def _dtype(self, name: str) -> Any:
        """The dtype that files spell so."""
        if self.plain:
            return DTYPES[name]
        import torch

        return getattr(torch, name)

    @property
    def path(self) -> Path:
        """The model-states file."""
        return self.folder / self.model_file

    @property
    def record(self) -> dict[str, Any] | None:
        """The layout record; None when no optimizer was saved or another release wrote the tag."""
        found: dict[str, Any] | None = self.model.get(keys.LAYOUT_RECORD)
        return found

    @property
    def engine_state(self) -> dict[str, Any]:
        return self.model.get(keys.ENGINE_STATE) or {}

    @property
    def loss_scaler(self) -> dict[str, Any]:
        """The loss scaler's state as plain data; empty where none was saved."""
        return dict(self.engine_state.get("loss_scaler", {}))

    @property
    def ours(self) -> bool:
        return keys.ENGINE_STATE in self.model

    @property
    def stage(self) -> int:
        return int(self.record["zero_stage"]) if self.record else 0

    @property
    def shards(self) -> int:
        """Ranks the optimizer state was saved by."""
        return int(self.model.get(keys.DP_WORLD_SIZE, 1)) if self.stage >= 1 and self.holds_optimizer else 0

    @property
    def holds_optimizer(self) -> bool:
        """An optimizer's state was saved, in a form this release knows."""
        return self.record is not None and bool(self.record["groups"])

    def take_order(self, *orders: Sequence[Sequence[str]]) -> None:
        """The parameter names of the running optimizer, group by group, for files that hold none. Ours hold them.

        Several when it is not known whether those files count the frozen ones."""

    # ---- checks ----------------------------------------------------------------------------------------------------

    def _check_library_part(self) -> None:
        if self.ours and self.manifest is None:
            raise CheckpointError(
                f"{self.folder} has no {names.MANIFEST}: the save did not finish, or the folder was copied without it"
            )
        for key in keys.LIBRARY_KEYS - {keys.MODULE, keys.LR_SCHEDULER, keys.ENGINE_STATE, keys.DS_CONFIG}:
            asked = trusted.untrusted_paths(self.model.get(key))
            if asked:
                raise CheckpointError(
                    f"{self.path}: {key!r} asks for {', '.join(asked)}, which no checkpoint needs; refused"
                )
        version = (self.model.get(keys.LAYOUT_RECORD) or {}).get("version", keys.LAYOUT_RECORD_VERSION)
        if version != keys.LAYOUT_RECORD_VERSION:
            raise CheckpointError(
                f"{self.path}: layout record version {version}; this release reads version {keys.LAYOUT_RECORD_VERSION}"
            )

    def check_trust(self, key: str, value: Any) -> Any:
        """``value``, unless it holds objects of classes nobody allowed: then CheckpointError with the way out."""
        asked = trusted.untrusted_paths(value)
        if asked:
            classes = ", ".join(path.rpartition(".")[2] for path in asked)
            raise CheckpointError(
                f"{self.path}: {key} holds objects of {', '.join(asked)}, which are not plain data and need your "
                "trust (weights and optimizer state do not). If you trust this file, call "
                f"torch.serialization.add_safe_globals([{classes}]) before loading"
            )
        return value

    def _find_sharded_model_files(self) -> dict[int, str]:
        """``shard rank -> model-states file`` of a tag of stage 3; empty for others."""
        listed = self.manifest.files if self.manifest is not None else [entry.name for entry in self.folder.iterdir()]
        found = ((names.parse_sharded_model_file(name), name) for name in listed)
        return {parts[0]: name for parts, name in found if parts is not None and parts[1] == self.mp_rank}

    def model_files(self) -> list[str]:
        """Every model-states file a load may read. Raises CheckpointError naming the missing ones."""
        if not self._sharded_model_files:
            return [self.model_file]
        if self.node_local:
            return list(self._sharded_model_files.values())
        ranks = range(int(self.model[keys.DP_WORLD_SIZE]))
        missing = [names.sharded_model_file(r, self.mp_rank) for r in ranks if r not in self._sharded_model_files]
        if missing:
            raise self._error(
                f"{self.folder} was saved by {len(ranks)} ranks; model-states files are missing: {', '.join(missing)}",
                missing,
            )
        return [self._sharded_model_files[rank] for rank in ranks]

    def optim_files(self) -> list[str]:
        """The file of every shard, in rank order. Raises CheckpointError naming the missing ones, where all are due."""
        found = self._optim_files
        missing = [rank for rank in range(self.shards) if rank not in found]
        if missing and not (self.node_local and found):
            raise self._absent(missing)
        return [found[rank] for rank in range(self.shards) if rank in found]

    def optim_file(self, rank: int) -> str:
        """The file of shard ``rank``. Raises CheckpointError when it is not here."""
        if rank not in self._optim_files:
            raise self._absent([rank])
        return self._optim_files[rank]

    @cached_property
    def _optim_files(self) -> dict[int, str]:
        """``shard rank -> optimizer-states file`` of what lies in the folder."""
        parsed = ((names.parse_optim_file(entry.name), entry.name) for entry in self.folder.iterdir())
        return {parts.dp_rank: name for parts, name in parsed if parts is not None and parts.mp_rank == self.mp_rank}

    def _absent(self, ranks: Sequence[int]) -> CheckpointError:
        bf16 = any(name.startswith("bf16") for name in self._optim_files.values())
        absent = [names.optim_file(rank, self.mp_rank, bf16=bf16) for rank in ranks]
        said = f"{self.folder} was saved by {self.shards} ranks; optimizer-states files are missing: "
        tags = f". The tags in {self.load_dir} are {', '.join(tags_in(self.load_dir)) or 'none'}"
        return self._error(said + ", ".join(absent), absent, tags)

    def _error(self, said: str, absent: Iterable[str], further: str = "") -> CheckpointError:
        """``said``, and what to do where the ``absent`` files were never in this folder."""
        if self.manifest is None or any(name in self.manifest.files for name in absent):
            return CheckpointError(said + further)
        return OneNodesPart(
            f"{said} (this is one node's part of a save with checkpoint.use_node_local_storage: the same ranks on the "
            "same nodes load it with that key; for anything else put the disks together: "
            f"python -m deepspeed.checkpoint merge NODE0 NODE1 ... --out WHOLE){further}"
        )

    def has_optim_files(self) -> bool:
        return any(names.parse_optim_file(entry.name) for entry in self.folder.iterdir())

    def _require(self, chosen: Iterable[str]) -> None:
        place = f"checkpoint {self.tag!r} in {self.load_dir} is not complete: "
        if self.manifest is None:
            problems = [f"{name} is missing" for name in chosen if not (self.folder / name).exists()]
        else:
            unknown = [name for name in chosen if name not in self.manifest.files]
            problems = wrong_sizes(self.folder, self.manifest, [name for name in chosen if name not in unknown])
            if unknown:
                absent = [f"{name} is not part of this checkpoint" for name in unknown]
                raise self._error(place + "; ".join([*problems, *absent]), unknown)
        if problems:
            raise CheckpointError(place + "; ".join(problems))

    def check_sizes(self, chosen: Iterable[str]) -> None:
        """All of ``chosen`` are there in full size. Raises CheckpointError."""
        self._require(chosen)

    def check_files(
        self,
        chosen: list[str],
        rank: int,
        world: int,
        leads_node: bool = False,
        sum_of: Callable[[Path], int] | None = None,
    ) -> None:
        """All of ``chosen`` are there in full size, and this rank's share of them has the right checksums.

        Rank r checks the file of shard r, which it is the most likely to read anyway; what belongs to no shard is
        checked by rank 0, or by the rank that ``leads_node`` where nodes have their own. ``sum_of``: who knows the
        CRC-32 of a file (default: it is read). Raises CheckpointError.
        """
        self._require(chosen)
        if self.manifest is None:
            return
        share = []
        for number, name in enumerate(chosen):
            shard = names.shard_rank_of(name)
            mine = (number if shard is None else shard) % world == rank
            if mine or (shard is None and leads_node and self.node_local):
                share.append(name)
        problems = wrong_checksums(self.folder, self.manifest, share, sum_of)
        if problems:
            raise CheckpointError(f"checkpoint {self.tag!r} in {self.load_dir}: {'; '.join(problems)}")

    # ---- module ----------------------------------------------------------------------------------------------------

    def module_state(self) -> dict[str, Any]:
        """The saved state of the module: tensors, mapped, and a :class:`ShardedWeight` for what lies in shards."""
        state: dict[str, Any] = self.check_trust(keys.MODULE, self.model[keys.MODULE])
        if self.stage < 3:
            return state
        first = self.model.get(keys.SHARED_PARAMS) or {}
        made: dict[str, ShardedWeight] = {}
        listed = type(state)()
        for name, value in state.items():
            kept = first.get(name, name)
            if kept not in made and (weight := self._weight(kept)) is not None:
                made[kept] = weight
            listed[name] = made.get(kept, value)
        if hasattr(state, "_metadata"):
            listed._metadata = state._metadata  # type: ignore[attr-defined]
        return listed

    def _weight(self, name: str) -> ShardedWeight | None:
        if name in self.parameters:
            held = self.parameters[name]
            return ShardedWeight(name, held.shape, self._dtype(held.dtype), self.index, indexing.MASTER)
        if name in self._rest:
            shape, dtype = self._rest[name]
            return ShardedWeight(name, shape, self._dtype(dtype), self.rest_index, indexing.WEIGHT)
        return None

    @cached_property
    def _rest(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of every parameter no optimizer held (stage 3)."""
        runs = self.record["rest"] if self.record else ()
        return {
            name: (tuple(shape), run["dtype"])
            for run in runs
            for name, shape in zip(run["names"], run["shapes"], strict=True)
        }

    @cached_property
    def rest_index(self) -> indexing.FragmentIndex:
        """Where the weights lie that no optimizer held (stage 3). Files are opened when first needed."""
        assert self.record is not None
        made = indexing.FragmentIndex(indexing.owners_of(self.record["rest"]))
        made.open_rank = lambda rank: self._index_rest(made, rank)
        return made

    def _frozen_of(self, rank: int) -> tuple[str, dict[str, torch.Tensor]]:
        """The model-states file of ``rank``, and what it holds of parameters that no optimizer held (1D, mapped)."""
        file = self._sharded_model_files.get(rank) or self.model_files()[rank]
        model = self.model
        if file != self.model_file:
            self._require([file])
            model = self._load_file(self.folder / file)
            if model.get(keys.LAYOUT_RECORD) != self.model.get(keys.LAYOUT_RECORD):
                raise CheckpointError(
                    f"{self.folder / file} does not belong to this checkpoint: its layout record differs from the one "
                    f"in {self.model_file}"
                )
        held = model.get(keys.FROZEN_PARAM_FRAGMENTS) or {}
        asked = trusted.untrusted_paths(held)
        if asked:
            raise CheckpointError(f"{self.folder / file} asks for {', '.join(asked)}, which is refused")
        return file, held

    def _index_rest(self, made: indexing.FragmentIndex, rank: int) -> None:
        assert self.record is not None
        file, held = self._frozen_of(rank)
        for run in self.record["rest"]:
            for part in ShardLayout.from_record(run["layout"]).fragments(rank):
                if part.name in held:
                    indexing.add_weight(made, file, part.name, part.param_start, part.numel, held[part.name])

    # ---- optimizer state -------------------------------------------------------------------------------------------

    @cached_property
    def parameters(self) -> dict[str, SavedParameter]:
        """Every parameter the saved optimizer held."""
        held = {}
        for group in self.record["groups"] if self.record else ():
            for slot, shape in zip(group["layout"]["slots"], group["shapes"], strict=True):
                held[slot[0]] = SavedParameter(
                    tuple(shape), group["dtype"], group["master_dtype"], group["aliased"], group["group_index"]
                )
        return held

    @cached_property
    def hyper_parameters(self) -> list[dict[str, Any]]:
        """The saved optimizer's parameter groups."""
        if self.stage == 0:
            return list(_plain_optimizer(self.model[keys.OPTIMIZER])[keys.PARAM_GROUPS])
        return list(self.base_state(self.any_shard())[keys.PARAM_GROUPS])

    def base_state(self, shard: dict[str, Any]) -> dict[str, Any]:
        """The base optimizer's state in a shard's dict."""
        found: dict[str, Any] = shard[base_state_key(self.stage)]
        return found

    @cached_property
    def _shards(self) -> dict[int, dict[str, Any]]:
        return {}

    def shard(self, rank: int) -> dict[str, Any]:
        """The optimizer state dict in the file of shard ``rank``, mapped; its layout record is checked."""
        if rank not in self._shards:
            name = self.optim_file(rank)
            self._require([name])
            data = self._load_file(self.folder / name)
            asked = trusted.untrusted_paths(data)
            if asked:
                raise CheckpointError(f"{self.folder / name} asks for {', '.join(asked)}, which is refused")
            shard = data[keys.OPTIMIZER_STATE_DICT]
            if shard.get(keys.LAYOUT_RECORD) != self.record or shard.get(keys.SHARD_RANK) != rank:
                raise CheckpointError(
                    f"{self.folder / name} does not belong to this checkpoint: its layout record differs from the one "
                    f"in {self.model_file}"
                )
            self._shards[rank] = shard
        return self._shards[rank]

    def any_shard(self) -> dict[str, Any]:
        """A shard for what all of them hold: one that is open already, if there is one."""
        return self.shard(min(self._shards, default=min(self._optim_files, default=0)))

    @cached_property
    def index(self) -> indexing.FragmentIndex:
        """Where masters and optimizer state lie. Files of shards are opened when their elements are first asked for."""
        made = indexing.FragmentIndex()
        if self.record is None:
            return made
        module = self.model[keys.MODULE]
        for name, saved in self.parameters.items():
            if saved.aliased and name in module and self.stage < 3:
                extent = indexing.Extent(
                    self.model_file, f"module.{name}", 0, 0, module[name].numel(), FLAT, module[name]
                )
                made.add(name, indexing.MASTER, extent)
        if self.stage == 0:
            self._index_stage_0(made)
        else:
            made.owners = indexing.owners_of(self.record["groups"])
            made.open_rank = lambda rank: self._index_shard(made, rank)
        return made

    def _index_shard(self, made: indexing.FragmentIndex, rank: int) -> None:
        assert self.record is not None
        shard, file = self.shard(rank), self.optim_file(rank)
        states, flat = self.base_state(shard)["state"], shard[masters_key(self.stage)]
        for number, group in enumerate(self.record["groups"]):
            layout = ShardLayout.from_record(group["layout"])
            if rank >= layout.world:
                continue
            fragments = [(part.name, part.param_start, part.numel) for part in layout.fragments(rank)]
            master = None if group["aliased"] and self.stage < 3 else flat[number]
            table = shard[keys.STATE_TABLES][number]
            indexing.add_fragments(made, file, fragments, states[number], table, master, f"group {number}")

    def _index_stage_0(self, made: indexing.FragmentIndex) -> None:
        saved = self.model[keys.OPTIMIZER]
        plain = _plain_optimizer(saved)
        listed = [name for group in plain[keys.PARAM_GROUPS] for name in group["param_names"]]
        numels = [_numel(self.parameters[name].shape) for name in listed]
        indexing.add_parameter_states(made, self.model_file, listed, numels, plain["state"])
        masters = [tensor for group in saved.get(keys.FP32_GROUPS, ()) for tensor in group]
        for position, (name, tensor) in enumerate(zip(listed, masters, strict=False)):
            if not self.parameters[name].aliased:
                extent = indexing.Extent(self.model_file, f"fp32_groups.{position}", 0, 0, tensor.numel(), FLAT, tensor)
                made.add(name, indexing.MASTER, extent)


def _plain_optimizer(saved: dict[str, Any]) -> dict[str, Any]:
    """The torch state dict inside the stage 0 optimizer entry."""
    found: dict[str, Any] = saved.get(keys.OPTIMIZER_STATE_DICT, saved)
    return found


def _numel(shape: Iterable[int]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel
