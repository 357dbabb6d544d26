#!/usr/bin/env python
"""Turn a checkpoint of sharded training into one ordinary state dict, on one machine, without an engine.

    python zero_to_fp32.py <folder with `latest`> <output folder> [--safe_serialization] [--max_shard_size 5GB] ...

This file is copied beside every checkpoint and needs torch, or the package that wrote it: then it starts without torch,
which is imported only by functions that return tensors. It reads the files of this release (by their
layout record) and those of older ones (by the historical order of their flat tensors). Files are mapped and tensors are
put together one at a time, so memory does not grow with the model where the output can be streamed.

Owns: reading for export, and the export files. Does not own: the layout arithmetic of running engines
(``runtime/zero/layout.py``, which a test keeps equal to :func:`record_fragments`).
Invariant: every tensor of the model comes out (buffers, frozen and tied ones too), or the error names what is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import json
import math
import os
import pickle
import re
import sys
import types
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO

try:
    from deepspeed.utils.torch_archive import bridge, load, packs, save, tensors
    from deepspeed.utils.torch_archive.cast import cast
except ImportError:  # torch does it all
    bridge = None  # type: ignore[assignment]

if TYPE_CHECKING:
    import torch


class _Dtype(str):
    """The name of a dtype of torch, which prints as that does."""

    def __repr__(self) -> str:
        return f"torch.{self}"


_FLOAT32 = _Dtype("float32")
_OUTPUT_DTYPES = {
    "float32": "float32", "fp32": "float32", "float16": "float16", "fp16": "float16", "bfloat16": "bfloat16",
    "bf16": "bfloat16",
}  # fmt: skip
debug = 0


def __getattr__(name: str) -> Any:
    """Historical constants that hold objects of torch."""
    if name == "device":
        return _torch().device("cpu")
    if name == "OUTPUT_DTYPE_NAMES":
        return {key: _torch_dtype(dtype) for key, dtype in _OUTPUT_DTYPES.items()}
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _torch() -> Any:
    import torch

    return torch


def _torch_dtype(name: str) -> Any:
    return getattr(_torch(), name)


def _name_of(dtype: Any) -> str:
    """``float32`` for ``torch.float32``, from either world."""
    return str(dtype).removeprefix("torch.")


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "data_ptr") and hasattr(value, "stride")


_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SAFE_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_ITEMSIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
_PIECE_NUMEL = 1 << 21


class GatheredTensor:
    """A tensor as the parts it is made of, in order; ``contiguous()`` puts it together.

    ``parts`` are 1D tensors (mapped from files), of torch or of ``torch_archive``; ``dtype`` is what floating elements
    become.
    """

    def __init__(self, parts: Iterable[Any], shape: Iterable[int], dtype: Any) -> None:
        self.parts = list(parts)
        self.sizes = tuple(shape)
        self.dtype_name = _name_of(dtype)

    @property
    def shape(self) -> torch.Size:
        return _torch().Size(self.sizes)

    @property
    def dtype(self) -> torch.dtype:
        return _torch_dtype(self.dtype_name)

    @property
    def is_floating(self) -> bool:
        return "float" in self.dtype_name

    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def nbytes(self) -> int:
        size = _ITEMSIZES.get(self.dtype_name) or (self.parts[0].dtype.itemsize if self.parts else 0)
        return int(self.numel() * size)

    def contiguous(self) -> torch.Tensor:
        """The tensor, in memory of its own."""
        whole = _torch().empty(self.numel(), dtype=self.dtype)
        offset = 0
        for part in map(_of_torch, self.parts):
            whole[offset : offset + part.numel()].copy_(part)
            offset += part.numel()
        return whole.view(self.sizes)

    def pieces(self) -> Iterator[memoryview]:
        """The bytes of the elements, a few MiB at a time."""
        for part in self.parts:
            for start in range(0, part.numel(), _PIECE_NUMEL):
                piece = part[start : start + _PIECE_NUMEL]
                if bridge is not None and isinstance(piece, tensors.PlainTensor):
                    yield cast(piece, tensors.DTYPES[self.dtype_name])
                else:
                    whole = piece.to(self.dtype).contiguous()
                    yield memoryview(whole.as_strided(whole.shape, (1,)).view(_torch().uint8).numpy())


def _of_torch(value: Any) -> torch.Tensor:
    """``value`` as a tensor of torch."""
    return bridge.tensor_to_torch(value) if bridge is not None and isinstance(value, tensors.PlainTensor) else value


@dataclass
class zero_model_state:
    """What the model-states files say. ``param_shapes``: per group, in the order of the flat tensors."""

    buffers: dict[str, torch.Tensor]
    param_shapes: list[dict[str, torch.Size]]
    shared_params: list[list[str]]
    ds_version: Any
    frozen_param_shapes: dict[str, torch.Size] | None
    frozen_param_fragments: dict[str, torch.Tensor] | None


# ---- files ---------------------------------------------------------------------------------------------------------


def atoi(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def natural_keys(text: str) -> list[int | str]:
    """Sort key that puts ``rank_10`` behind ``rank_9``."""
    return [atoi(part) for part in re.split(r"(\d+)", text)]


def get_checkpoint_files(checkpoint_dir: str, glob_pattern: str) -> list[str]:
    """Files of a tag folder that match, in natural order. Raises FileNotFoundError when there are none."""
    found = sorted(glob.glob(os.path.join(glob.escape(checkpoint_dir), glob_pattern)), key=natural_keys)
    if not found:
        raise FileNotFoundError(f"there are no {glob_pattern} files in {checkpoint_dir}")
    return found


def get_optim_files(checkpoint_dir: str) -> list[str]:
    return get_checkpoint_files(checkpoint_dir, "*_optim_states.pt")


def get_model_state_files(checkpoint_dir: str) -> list[str]:
    return get_checkpoint_files(checkpoint_dir, "*_model_states.pt")


def get_model_state_file(checkpoint_dir: str, zero_stage: int) -> str:
    """The first model-states file. Raises FileNotFoundError when the folder or the file is missing."""
    if not os.path.isdir(checkpoint_dir):
        raise FileNotFoundError(f"there is no folder {checkpoint_dir}")
    name = "zero_pp_rank_0_mp_rank_00_model_states.pt" if int(zero_stage) == 3 else "mp_rank_00_model_states.pt"
    path = os.path.join(checkpoint_dir, name)
    if not os.path.exists(path):
        raise FileNotFoundError(f"there is no model-states file {path}")
    return path


class _Inert:
    """Stands for an object of a class this script has no use for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __setstate__(self, state: Any) -> None: ...
    def __setitem__(self, key: Any, value: Any) -> None: ...
    def append(self, value: Any) -> None: ...
    def extend(self, values: Any) -> None: ...


def _plain_tensor(rebuild: Any, kind: Any, args: tuple[Any, ...], state: Any) -> Any:
    """A tensor with attributes or a class of its own, without them."""
    return rebuild(*args)


def _plain_class(module: str, name: str) -> Any:
    """What a name in a file may make that is not torch's: plain data. Anything else becomes inert."""
    if module.partition(".")[0] == "torch":
        return None
    if (module, name) == ("collections", "OrderedDict"):
        return OrderedDict
    return int if name == "ZeroStageEnum" else _Inert


class _Unpickler(pickle.Unpickler):
    """Where torch reads: knows tensors and plain data; anything else becomes inert, so a file can run no code here."""

    _torch = frozenset({"_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter"})

    def find_class(self, module: str, name: str) -> Any:
        torch = _torch()
        if module == "torch._utils" and name in self._torch:
            return getattr(torch._utils, name)
        if module == "torch" and (name in ("Size", "device") or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if (module, name) in (("collections", "OrderedDict"), ("torch.nn.parameter", "Parameter")):
            return OrderedDict if name == "OrderedDict" else torch.nn.Parameter
        if (module, name) == ("torch._tensor", "_rebuild_from_type_v2"):
            return _plain_tensor
        if name == "ZeroStageEnum":
            return int
        return _Inert


class _PickleModule(types.ModuleType):
    Unpickler = _Unpickler


def _load(path: str) -> Any:
    """The object in a file, tensors mapped, foreign objects inert. Raises ValueError naming a file that is torn."""
    if bridge is None:
        return _load_by_torch(path)
    try:
        return load.load(path, _plain_class)
    except load.NeedsTorch:
        return bridge.from_torch(_load_by_torch(path))
    except FileNotFoundError:
        raise
    except Exception as error:  # whatever a damaged pickle makes of plain data
        raise ValueError(f"{path} cannot be read, it is torn or not a checkpoint file: {error}") from error


def _load_by_torch(path: str) -> Any:
    torch = _torch()
    try:
        with contextlib.suppress(pickle.UnpicklingError):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        return torch.load(
            path, map_location="cpu", mmap=True, weights_only=False, pickle_module=_PickleModule("pickle")
        )
    except FileNotFoundError:
        raise
    except (RuntimeError, ValueError, EOFError, OSError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} cannot be read, it is torn or not a checkpoint file: {error}") from error


# ---- one saved tag -------------------------------------------------------------------------------------------------


def record_fragments(layout: dict[str, Any], rank: int) -> Iterator[tuple[str, int, int]]:
    """``(name, start in the parameter, elements)`` of what ``rank`` saved, in the order of its flat tensors.

    ``layout`` is one group's entry of a layout record: parameters placed in a flat space, cut into segments, each
    segment cut evenly over the ranks.
    """
    flat = 0
    for numel, piece in layout["segments"]:
        low = flat + rank * piece
        for name, size, start in layout["slots"]:
            first, last = max(start, low), min(start + size, low + piece)
            if first < last:
                yield name, first - start, last - first
        flat += numel
    if rank == 0:
        yield from ((name, 0, 0) for name, size, _ in layout["slots"] if size == 0)


@dataclass
class _Saved:
    """The content of a tag folder: every tensor of the model by name, and which names are frozen or aliases."""

    folder: str
    model: dict[str, Any]
    masters: dict[str, GatheredTensor] = field(default_factory=dict)
    frozen: set[str] = field(default_factory=set)
    aliases: dict[str, str] = field(default_factory=dict)

    def tensors(self, dtype: str, exclude_frozen: bool) -> OrderedDict[str, GatheredTensor]:
        """Buffers, frozen parameters, trained parameters, aliases: each a GatheredTensor; aliases the same object."""
        module = {name: value for name, value in self.model["module"].items() if _is_tensor(value)}
        buffers = [name for name in self.model.get("buffer_names") or () if name in module]
        if self.model.get("buffer_names") is None:
            raise ValueError(f"{self.folder}: the model-states file has no buffer_names")
        left_out = self.frozen if exclude_frozen else ()
        trained = [name for name in self.masters if name not in self.aliases and name not in left_out]
        known = {*buffers, *trained, *self.aliases}
        others = [name for name in module if name not in known and module[name].numel()]
        frozen = [name for name in others if name not in known and name not in self.frozen]
        order = dict.fromkeys([*buffers, *([] if exclude_frozen else frozen), *trained])
        out: OrderedDict[str, GatheredTensor] = OrderedDict()
        for name in order:
            source = self.masters.get(name) or _of_tensor(module[name])
            source.dtype_name = dtype if source.is_floating else source.dtype_name
            out[name] = source
        for alias, kept in self.aliases.items():
            if kept in out:
                out[alias] = out[kept]
        return out


def _of_tensor(tensor: Any) -> GatheredTensor:
    return GatheredTensor([tensor.detach().reshape(-1)], tensor.shape, tensor.dtype)


def _find_tag(checkpoint_dir: str, tag: str | None) -> str:
    if tag is None:
        latest = os.path.join(checkpoint_dir, "latest")
        if not os.path.isfile(latest):
            raise ValueError(f"there is no file {latest}: give the tag, or the folder that contains `latest`")
        with open(latest) as file:
            tag = file.read().strip()
    folder = os.path.join(checkpoint_dir, str(tag))
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"there is no folder {folder}")
    return folder


def _manifest(folder: str) -> dict[str, Any] | None:
    """What a save of this release wrote about itself. Raises ValueError naming the file when it is damaged."""
    path = os.path.join(folder, "manifest.json")
    if not os.path.exists(path):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            found: dict[str, Any] = json.load(file)
        return {"files": {name: int(entry["nbytes"]) for name, entry in found["files"].items()}}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error


def _check_sizes(folder: str) -> None:
    """Compare with the manifest, where there is one. Raises ValueError naming files that are missing or cut."""
    manifest = _manifest(folder)
    for name, nbytes in manifest["files"].items() if manifest is not None else ():
        path = os.path.join(folder, name)
        found = os.path.getsize(path) if os.path.exists(path) else None
        if found != nbytes and name.endswith(("_model_states.pt", "_optim_states.pt")):
            raise ValueError(f"{folder}/{name} has {found} bytes, {nbytes} were saved: the copy is incomplete")


def _open(folder: str) -> _Saved:
    _check_sizes(folder)
    files = get_model_state_files(folder)
    if os.path.basename(files[0]).startswith("mp_rank_") and len(files) > 1:
        raise ValueError(f"{folder} is the checkpoint of a model cut over {len(files)} model-parallel ranks")
    model = _load(files[0])
    record = model.get("ds_layout")
    if record is not None:
        return _open_recorded(folder, model, record)
    return _open_historical(folder, files, model)


def _open_recorded(folder: str, model: dict[str, Any], record: dict[str, Any]) -> _Saved:
    """A tag of this release: the layout record says where every element is."""
    module = model["module"]
    saved = _Saved(folder, model, aliases=dict(model.get("shared_params") or _tied(module)))
    if int(record["zero_stage"]) == 0:
        _stage_0_masters(saved, record)
        return saved
    world, stage = int(model["dp_world_size"]), int(record["zero_stage"])
    shards = [part["optimizer_state_dict"] for part in _shard_files(folder, world)] if record["groups"] else []
    if stage == 3:
        _recorded_rest(saved, record, world)
    for number, group in enumerate(record["groups"]):
        shapes = {slot[0]: shape for slot, shape in zip(group["layout"]["slots"], group["shapes"], strict=True)}
        if group["aliased"] and stage < 3:
            saved.masters.update((name, _of_tensor(module[name])) for name in shapes)
            continue
        pieces: dict[str, list[tuple[int, torch.Tensor]]] = {name: [] for name in shapes}
        key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        for rank in range(group["layout"]["world"]):
            flat, offset = shards[rank][key][number], 0
            for name, start, numel in record_fragments(group["layout"], rank):
                pieces[name].append((start, flat[offset : offset + numel]))
                offset += numel
            if offset != flat.numel():
                raise ValueError(f"{folder}: shard {rank} of group {number} has {flat.numel()} elements, not {offset}")
        for name, parts in pieces.items():
            saved.masters[name] = _put_together(folder, name, parts, shapes[name])
    return saved


def _recorded_rest(saved: _Saved, record: dict[str, Any], world: int) -> None:
    """Stage 3: parameters no optimizer held, from the fragments in every rank's model-states file."""
    if not record["rest"]:
        return
    files = get_model_state_files(saved.folder)
    if len(files) != world:
        raise ValueError(f"{saved.folder} was saved by {world} ranks but has {len(files)} model-states files")
    held = [_load(file)["frozen_param_fragments"] for file in files]
    for run in record["rest"]:
        pieces: dict[str, list[tuple[int, torch.Tensor]]] = {name: [] for name in run["names"]}
        for rank in range(run["layout"]["world"]):
            for name, start, numel in record_fragments(run["layout"], rank):
                if name not in pieces:
                    continue
                if held[rank][name].numel() != numel:
                    raise ValueError(f"{files[rank]}: {name} has {held[rank][name].numel()} elements, not {numel}")
                pieces[name].append((start, held[rank][name]))
        for name, shape in zip(run["names"], run["shapes"], strict=True):
            saved.masters[name] = _put_together(saved.folder, name, pieces[name], shape, held[0][name].dtype)
            saved.frozen.add(name)


def _put_together(
    folder: str, name: str, parts: list[tuple[int, torch.Tensor]], shape: Any, dtype: Any = _FLOAT32
) -> GatheredTensor:
    parts = sorted((part for part in parts if part[1].numel()), key=lambda part: part[0])
    reached = 0
    for start, part in parts:
        if start != reached:
            break
        reached += part.numel()
    if reached != math.prod(shape):
        raise ValueError(f"{folder}: parameter {name} has {math.prod(shape)} elements, only {reached} were found")
    return GatheredTensor([part for _, part in parts], shape, dtype)


def _stage_0_masters(saved: _Saved, record: dict[str, Any]) -> None:
    module, optimizer = saved.model["module"], saved.model["optimizer"] or {}
    for group in record["groups"]:
        saved.masters.update((slot[0], _of_tensor(module[slot[0]])) for slot in group["layout"]["slots"])
    plain = optimizer.get("optimizer_state_dict", optimizer)
    names = [name for group in plain.get("param_groups", ()) for name in group["param_names"]]
    masters = [tensor for group in optimizer.get("fp32_groups", ()) for tensor in group]
    for name, tensor in zip(names, masters, strict=False):
        saved.masters[name] = _of_tensor(tensor)


def _tied(module: dict[str, Any]) -> dict[str, str]:
    """``alias -> first name`` of tensors that share their memory in the file."""
    first: dict[Any, str] = {}
    found = {}
    for name, value in module.items():
        if _is_tensor(value) and value.numel():
            kept = first.setdefault((value.data_ptr(), value.shape, value.stride(), value.dtype), name)
            if kept != name:
                found[name] = kept
    return found


def _merge_hint(folder: str, found: int) -> str:
    """What to do where the files that are missing were never in ``folder``: it is one node's part of a save."""
    manifest = _manifest(folder)
    if manifest is None or sum(name.endswith("_optim_states.pt") for name in manifest["files"]) != found:
        return ""
    return (
        ". This is one node's part of a save with checkpoint.use_node_local_storage; put the folders of all nodes "
        "together first: python -m deepspeed.checkpoint merge NODE0 NODE1 ... --out WHOLE"
    )


def _shard_files(folder: str, world: int) -> list[dict[str, Any]]:
    files = get_optim_files(folder)
    if len(files) != world:
        raise ValueError(
            f"{folder} was saved by {world} ranks but has {len(files)} optimizer-states files: "
            + ", ".join(map(os.path.basename, files))
            + _merge_hint(folder, len(files))
        )
    return [_load(file) for file in files]


# ---- tags of other releases ------------------------------------------------------------------------------------------


def parse_model_states(files: list[str]) -> list[zero_model_state]:
    """Buffers, shapes and frozen parameters of each model-states file. Raises ValueError without buffer names."""
    parsed = []
    for file in files:
        model = _load(file)
        if "buffer_names" not in model:
            raise ValueError(f"{file} is not a model-states file: it has no buffer_names")
        module = model["module"]
        buffers = {name: _of_torch(module[name]) for name in model["buffer_names"] if name in module}
        fragments = model.get("frozen_param_fragments")
        shared = [[alias, kept] for alias, kept in (model.get("shared_params") or {}).items()]
        parsed.append(
            zero_model_state(
                buffers=buffers,
                param_shapes=list(model.get("param_shapes") or ()),
                shared_params=shared,
                ds_version=model.get("ds_version"),
                frozen_param_shapes=model.get("frozen_param_shapes"),
                frozen_param_fragments=fragments and {name: _of_torch(part) for name, part in fragments.items()},
            )
        )
    return parsed


def parse_optim_states(files: list[str], ds_checkpoint_dir: str) -> tuple[int, int, list[list[torch.Tensor]]]:
    """``(stage, ranks, flat fp32 tensors per rank)``. Raises ValueError for files of another kind or number."""
    stage, world, flats = _optim_states(files, ds_checkpoint_dir)
    return stage, world, [[_of_torch(flat) for flat in rank] for rank in flats]


def _optim_states(files: list[str], ds_checkpoint_dir: str) -> tuple[int, int, list[list[Any]]]:
    states = [_load(file)["optimizer_state_dict"] for file in files]
    if "zero_stage" not in states[0]:
        raise ValueError(f"{files[0]} is not a sharded optimizer-states file: it has no zero_stage")
    stage, count = int(states[0]["zero_stage"]), states[0]["partition_count"]
    world = max(count) if isinstance(count, (list, tuple)) else int(count)
    if world != len(files):
        raise ValueError(f"{ds_checkpoint_dir} was saved by {world} ranks but has {len(files)} optimizer-states files")
    if stage not in (1, 2, 3):
        raise ValueError(f"{ds_checkpoint_dir}: unknown stage {stage}")
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    return stage, world, [list(state[key]) for state in states]


def zero3_partitioned_param_info(unpartitioned_numel: int, world_size: int) -> tuple[int, int]:
    """``(elements per rank, padding)`` of a parameter cut evenly at stage 3."""
    piece = math.ceil(unpartitioned_numel / world_size)
    return piece, piece * world_size - unpartitioned_numel


def _open_historical(folder: str, files: list[str], model: dict[str, Any]) -> _Saved:
    optim_files = get_optim_files(folder)
    stage, world, flats = _optim_states(optim_files, folder)
    saved = _Saved(folder, model, aliases=dict(model.get("shared_params") or {}))
    shapes = list(model.get("param_shapes") or ())
    if stage == 3:
        _stage_3_masters(saved, shapes, world, flats)
        _stage_3_frozen(saved, files, world)
    else:
        paddings = _load(optim_files[0])["optimizer_state_dict"].get("param_alignment_paddings")
        _stage_2_masters(saved, shapes, flats, paddings)
    return saved


def _stage_2_masters(saved: _Saved, shapes: list[Any], flats: list[list[torch.Tensor]], paddings: Any) -> None:
    """Groups end to end, cut into one partition per rank; partitions carry no tail padding, parameters may."""
    for number, group in enumerate(shapes):
        partitions, offset = [rank[number] for rank in flats], 0
        for position, (name, shape) in enumerate(group.items()):
            numel = math.prod(shape)
            saved.masters[name] = GatheredTensor(_window(partitions, offset, numel), shape, _FLOAT32)
            offset += numel + (paddings[number][position] if paddings else 0)
        held = sum(partition.numel() for partition in partitions)
        unit = 2 * len(partitions)
        if -(-offset // unit) != -(-held // unit):
            raise ValueError(f"{saved.folder}: group {number} has {held} elements, its parameters need {offset}")


def _window(partitions: list[torch.Tensor], start: int, numel: int) -> list[torch.Tensor]:
    parts, base = [], 0
    for partition in partitions:
        low, high = max(start - base, 0), min(start + numel - base, partition.numel())
        if low < high:
            parts.append(partition[low:high])
        base += partition.numel()
    if sum(part.numel() for part in parts) != numel:
        raise ValueError(f"elements {start} to {start + numel} are not in the optimizer-states files")
    return parts


def _stage_3_masters(saved: _Saved, shapes: list[Any], world: int, flats: list[list[torch.Tensor]]) -> None:
    """Every parameter cut evenly over the ranks; a rank's pieces end to end over all its sub-groups."""
    offset = 0
    for group in shapes:
        for name, shape in group.items():
            numel = math.prod(shape)
            piece, _ = zero3_partitioned_param_info(numel, world)
            parts = [part for rank in flats for part in _window(rank, offset, piece)]
            saved.masters[name] = GatheredTensor(_trim(parts, numel), shape, _FLOAT32)
            offset += piece
    held = sum(flat.numel() for flat in flats[0])
    if offset != held:
        raise ValueError(f"{saved.folder}: each rank has {held} elements, the parameters need {offset}")


def _trim(parts: list[torch.Tensor], numel: int) -> list[torch.Tensor]:
    kept = []
    for part in parts:
        kept.append(part[:numel])
        numel -= kept[-1].numel()
    return [part for part in kept if part.numel()]


def _stage_3_frozen(saved: _Saved, files: list[str], world: int) -> None:
    shapes = saved.model.get("frozen_param_shapes") or {}
    if not shapes:
        return
    models = [_load(file) for file in files]
    for name, shape in shapes.items():
        parts = [model["frozen_param_fragments"][name].reshape(-1) for model in models[:world]]
        source = GatheredTensor(_trim(parts, math.prod(shape)), shape, _FLOAT32)
        saved.masters[name] = source
        saved.frozen.add(name)


# ---- public functions ------------------------------------------------------------------------------------------------


def _gather(checkpoint_dir: str, tag: str | None, exclude_frozen: bool, dtype: str) -> Any:
    folder = _find_tag(checkpoint_dir, tag)
    saved = _open(folder)
    left_out = (saved.model.get("ds_engine_state") or {}).get("excluded_frozen")
    if left_out:
        print(f"{len(left_out)} frozen parameters were left out when {folder} was saved and are not in the result")
    found = saved.tensors(dtype, exclude_frozen)
    if exclude_frozen:
        print("frozen parameters are left out, as asked")
    if debug:
        for name, tensor in found.items():
            print(f"{name}: {tensor.sizes} torch.{tensor.dtype_name} from {len(tensor.parts)} parts")
    return found


def to_torch_tensor(
    state_dict: dict[str, Any], return_empty_tensor: bool = False, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """The tensors behind lazy ones; one that occurs under several names is made once. Empty: shapes without memory."""
    made: dict[int, torch.Tensor] = {}
    out: dict[str, torch.Tensor] = {}
    for name, value in state_dict.items():
        if id(value) not in made:
            wanted = dtype if dtype is not None and value.dtype.is_floating_point else value.dtype
            if return_empty_tensor:
                made[id(value)] = _torch().empty(value.shape, dtype=wanted, device="meta")
            else:
                made[id(value)] = value.contiguous().to(wanted)
        out[name] = made[id(value)]
    return out


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Any]:
    """The whole model in fp32 by name; integer buffers keep their dtype, tied names share one tensor.

    ``checkpoint_dir`` is the folder that contains ``latest`` (or give ``tag``). ``lazy_mode``: values are
    :class:`GatheredTensor` objects whose ``contiguous()`` makes the tensor, for models that do not fit in memory.
    Raises FileNotFoundError for missing files and ValueError for files that do not fit together.
    """
    found: dict[str, Any] = _gather(os.fspath(checkpoint_dir), tag, exclude_frozen_parameters, _FLOAT32)
    return found if lazy_mode else to_torch_tensor(found)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str,
    output_dir: str,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the whole model in fp32; see :func:`convert_zero_checkpoint_to_state_dict`."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir, output_dir, _FLOAT32, max_shard_size, safe_serialization, tag, exclude_frozen_parameters
    )


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str,
    output_dir: str,
    dtype: Any = _FLOAT32,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write ``pytorch_model.bin`` (or ``model.safetensors``) to ``output_dir``, floats in ``dtype``.

    More than ``max_shard_size`` (text like ``5GB``, or bytes; None: one file) is split over numbered files with an
    ``.index.json``. A file has its final name only when it is complete.
    """
    found = _gather(os.fspath(checkpoint_dir), tag, exclude_frozen_parameters, _name_of(dtype))
    stem, suffix = ("model", ".safetensors") if safe_serialization else ("pytorch_model", ".bin")
    shards = _split(found, _size(max_shard_size))
    os.makedirs(output_dir, exist_ok=True)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"{stem}{suffix}" if len(shards) == 1 else f"{stem}-{number:05d}-of-{len(shards):05d}{suffix}"
        with _complete_file(os.path.join(output_dir, file)) as out:
            (_write_safetensors if safe_serialization else _write_bin)(out, {name: found[name] for name in names})
        weight_map.update(dict.fromkeys(names, file))
        print(f"wrote {os.path.join(output_dir, file)}")
    if len(shards) > 1:
        total = sum({id(value): value.nbytes for value in found.values()}.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        with _complete_file(os.path.join(output_dir, f"{stem}{suffix}.index.json")) as out:
            out.write((json.dumps(index, indent=2, sort_keys=True) + "\n").encode())


def load_state_dict_from_zero_checkpoint(
    model: torch.nn.Module, checkpoint_dir: str, tag: str | None = None
) -> torch.nn.Module:
    """Move ``model`` to the host, load the whole fp32 state into it, return it. No engine can use it any more.

    Parameters that an engine has sharded over ranks (stage 3) become plain ones, of their own dtype.
    """
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    _unshard(model)
    model = model.cpu()
    missing, unexpected = model.load_state_dict(state, strict=False)
    for names, what in ((missing, "not in the checkpoint"), (unexpected, "not in the model")):
        if names:
            print(f"{len(names)} tensors are {what}: {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}")
    return model


def _unshard(model: torch.nn.Module) -> None:
    """Put empty plain parameters where sharded ones are, tied ones tied, and take away the hooks that gather them."""
    torch = _torch()
    made: dict[int, Any] = {}
    for part in model.modules():
        for name, param in part._parameters.items():
            shape = getattr(param, "ds_shape", None)
            if param is None or shape is None:
                continue
            if id(param) not in made:
                empty = torch.empty(shape, dtype=param.dtype, device="cpu")
                made[id(param)] = torch.nn.Parameter(empty, requires_grad=param.requires_grad)
            part._parameters[name] = made[id(param)]
        for hooks in (part._forward_pre_hooks, part._forward_hooks):
            for key, hook in list(hooks.items()):
                if getattr(hook, "__module__", "").startswith("deepspeed.runtime.zero"):
                    del hooks[key]


# ---- writing -------------------------------------------------------------------------------------------------------


def _size(text: str | int | None) -> int | None:
    if text is None or isinstance(text, int):
        return text
    found = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]I?B)\s*", text.upper())
    if found is None:
        raise ValueError(f"max_shard_size {text!r}: expected a number with KB, MB, GB or TB, like 5GB")
    return int(float(found[1]) * _UNITS[found[2]])


def _split(found: dict[str, GatheredTensor], limit: int | None) -> list[list[str]]:
    """Names per file, in order; names of one tensor stay together."""
    names_of: dict[int, list[str]] = {}
    for name, value in found.items():
        names_of.setdefault(id(value), []).append(name)
    shards: list[list[str]] = [[]]
    held = 0
    for names in names_of.values():
        nbytes = found[names[0]].nbytes
        if limit is not None and shards[-1] and held + nbytes > limit:
            shards.append([])
            held = 0
        shards[-1] += names
        held += nbytes
    return shards


@contextlib.contextmanager
def _complete_file(path: str) -> Iterator[BinaryIO]:
    aside = f"{path}.{os.getpid()}.partial"
    try:
        with open(aside, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:  # a write that failed does not say where
            error.filename = path
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise


def _write_bin(out: BinaryIO, found: dict[str, GatheredTensor]) -> None:
    """A torch file: streamed where the package is installed, else put together in memory first."""
    if bridge is None:
        _torch().save(to_torch_tensor(found), out)
        return
    slices: dict[int, Any] = {}
    for value in found.values():
        if id(value) not in slices:
            pack = packs.Pack(tensors.DTYPES[value.dtype_name])
            for part in value.parts:
                pack.add(part)
            slices[id(value)] = packs.Slice(pack, 0, value.sizes)
    save.PlainFile({name: slices[id(value)] for name, value in found.items()}).write(out)


def _write_safetensors(out: BinaryIO, found: dict[str, GatheredTensor]) -> None:
    """The safetensors format: 8 bytes length, JSON header, data. Tied names are written once each."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, value in found.items():
        end = offset + value.nbytes
        code, shape = _SAFE_DTYPES[value.dtype_name], list(value.sizes)
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    out.write(len(text).to_bytes(8, "little") + text)
    for value in found.values():
        for piece in value.pieces():
            out.write(piece)


# ---- command line --------------------------------------------------------------------------------------------------


def build_parser(with_dtype: bool = False) -> argparse.ArgumentParser:
    """The options of this script; ``with_dtype`` adds the one of ``zero_to_torch.py``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint_dir", help="folder of the checkpoints, the one that contains `latest`")
    parser.add_argument("output_dir", help="folder for the result; created when it does not exist")
    if with_dtype:
        parser.add_argument("--dtype", required=True, choices=sorted(_OUTPUT_DTYPES), help="of floating tensors")
    parser.add_argument("--max_shard_size", default="5GB", help="largest size of one file, like 5GB (default: 5GB)")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors instead of torch files")
    parser.add_argument("-t", "--tag", default=None, help="checkpoint to read, like global_step100 (default: latest)")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave frozen parameters out")
    parser.add_argument("-d", "--debug", action="store_true", help="print every tensor")
    return parser


def main(argv: list[str] | None = None, with_dtype: bool = False) -> int:
    """Run the command line; 1 with a message on stderr when the checkpoint cannot be read or the result be written."""
    global debug
    args = build_parser(with_dtype).parse_args(argv)
    debug = int(args.debug)
    dtype = _OUTPUT_DTYPES[args.dtype] if with_dtype else _FLOAT32
    try:
        convert_zero_checkpoint_to_state_dict(
            args.checkpoint_dir, args.output_dir, dtype, args.max_shard_size, args.safe_serialization, args.tag,
            args.exclude_frozen_parameters,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
