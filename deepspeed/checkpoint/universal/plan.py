"""Which files a universal folder gets, and what is in each of them.

    every parameter    its master, every state the optimizer has of it (whatever it is called), its step
    the others         frozen parameters, as they are
    one file           hyper-parameters, loss scale and the record (``universal/record.py``)
    model states       buffers, counters, schedule, client state; parameters are empty there

Owns: content. Does not own: writing (``universal/write.py``), how slices are joined (``universal/patterns.py``).
Invariant: planning reads the tag's metadata and maps its files; elements are read when a file is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed.checkpoint import constants as keys
from deepspeed.checkpoint import names
from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.checkpoint.index import MASTER, Extent
from deepspeed.checkpoint.reader import SavedTag
from deepspeed.checkpoint.reference.reader import open_saved
from deepspeed.checkpoint.sharded_weight import ShardedWeight
from deepspeed.checkpoint.universal.common import common_state, model_states
from deepspeed.checkpoint.universal.patterns import WHOLE as UNCUT
from deepspeed.checkpoint.universal.patterns import Category, Patterns, join
from deepspeed.checkpoint.universal.record import FLAT, WHOLE, UniversalParameter, UniversalRecord, safe_stem
from deepspeed.utils.torch_archive import bridge
from deepspeed.utils.torch_archive.archive import Written
from deepspeed.utils.torch_archive.packs import Pack, Slice
from deepspeed.utils.torch_archive.tensors import DTYPES, PlainTensor, is_tensor, scalar, zeros

_EXTRA_STATE = "_extra_state"  # what a module of torch saves beside parameters and buffers


@dataclass(frozen=True)
class FileJob:
    """One file of the result: its path in the folder, what to put in (made when it is written), bytes of data.

    ``copied``: the file of the tag that it is, byte for byte; ``saved``: what the manifest says of that.
    """

    path: str
    make: Callable[[], Any]
    nbytes: int
    copied: Path | None = None
    saved: Written | None = None


@dataclass
class Source:
    """The tags of all tensor-parallel ranks of one pipeline stage, and the patterns their parameters follow."""

    slices: list[SavedTag]
    patterns: Patterns

    @property
    def first(self) -> SavedTag:
        return self.slices[0]


def open_sources(folder: Path, inject_missing_state: bool = False) -> list[Source]:
    """The tag of every pipeline stage, each with its tensor-parallel slices. Raises CheckpointError."""
    first = open_saved(folder.parent, folder.name, plain=True)
    if not first.holds_optimizer:
        raise CheckpointError(f"{folder} holds no optimizer state; zero_to_fp32.py exports weights alone")
    degrees = first.model.get(keys.CHECKPOINT_PARALLEL_DIMS) or {}
    tp, pp = (int(degrees.get(key, 1)) for key in (keys.CHECKPOINT_TP_DEGREE, keys.CHECKPOINT_PP_DEGREE))
    found = int(first.model.get(keys.MP_WORLD_SIZE, 1))
    if tp * pp != found:
        tp, pp = found, 1
    if tp > 1 and first.stage >= 3:
        raise CheckpointError(f"{folder} was saved at stage 3 on {tp} tensor-parallel ranks, which cannot be joined")
    sources = []
    for stage in range(pp):
        ranks = range(stage * tp, (stage + 1) * tp)
        slices = [open_saved(folder.parent, folder.name, rank, plain=True) if rank else first for rank in ranks]
        info = slices[0].model.get(keys.UNIVERSAL_CHECKPOINT_INFO)
        if info is None and tp > 1 and not inject_missing_state:
            raise CheckpointError(
                f"{slices[0].path} has no {keys.UNIVERSAL_CHECKPOINT_INFO}: how {tp} slices make one parameter is not "
                "known. --inject_missing_state joins all of them along dim 0"
            )
        trusted_info = slices[0].check_trust(keys.UNIVERSAL_CHECKPOINT_INFO, info or {})
        sources.append(Source(slices, Patterns(dict(trusted_info))))
    return sources


def plan_conversion(sources: list[Source], stage: int | None = None) -> tuple[UniversalRecord, list[FileJob]]:
    """The record and every file. ``stage``: see :func:`~deepspeed.checkpoint.universal.write.convert`."""
    first = sources[0].first
    assert first.record is not None
    for key, value in first.model.items():
        first.check_trust(key if key in keys.LIBRARY_KEYS else f"client_state[{key!r}]", value)
    form = FLAT if (first.stage if stage is None else stage) >= 3 else WHOLE
    record = UniversalRecord(form, first.stage, list(first.record["optimizer"]), {})
    if first.stage >= 1:
        record.extra = dict(first.base_state(first.any_shard()).get("extra", {}))
    jobs: list[FileJob] = []
    for source in sources:
        for name in source.first.parameters:
            if name not in record.parameters:  # else tied over pipeline stages
                jobs += _plan_parameter(record, source, name)
            source.patterns.kept_once(name)
        jobs += _plan_rest(record, source)
    steps = _steps(first, record)
    jobs += _plan_empty_states(record, steps)
    jobs.append(FileJob(names.UNIVERSAL_COMMON, partial(common_state, first, record, steps), 0))
    file, content = model_states(first, record, source_files=[source.first for source in sources])
    jobs.append(FileJob(file, lambda: content, _tensor_nbytes(content[keys.MODULE])))
    listed = first.manifest.files if first.manifest is not None else {}
    for entry in sorted(first.folder.glob("rng_state_*.pt")):
        nbytes = entry.stat().st_size
        jobs.append(FileJob(entry.name, partial(_itself, None), nbytes, entry, listed.get(entry.name)))
    return record, jobs


# ---- parameters ----------------------------------------------------------------------------------------------------


def _plan_parameter(record: UniversalRecord, source: Source, name: str) -> Iterator[FileJob]:
    """The files of one parameter; its entry is added to ``record``."""
    first, category = source.first, source.patterns.of(name)
    held = first.parameters[name]
    shape = _whole_shape(name, [saved.parameters[name].shape for saved in source.slices], category)
    entry = UniversalParameter(shape, held.dtype, held.master_dtype, held.group_index)
    record.parameters[name] = entry
    numel = math.prod(held.shape)
    found = first.index.kinds(name, 0, numel)
    for key in [MASTER, *(key for key in found if key != MASTER)]:
        extents = [saved.index.cover(name, key, 0, math.prod(saved.parameters[name].shape)) for saved in source.slices]
        kind = extents[0][0].kind if extents[0] else keys.FLAT
        stem = key
        if key != MASTER:
            stem = safe_stem(key, entry.stems())
            entry.states[key] = kind
        if kind == keys.PLAIN:
            entry.values[key] = extents[0][0].whole()
            if key == "step" and isinstance(entry.values[key], (int, float)):
                step = scalar(float(entry.values[key]))
                yield FileJob(names.universal_file(name, key), partial(_itself, step), 0)
            continue
        if stem != key:
            entry.files[key] = stem
        path = names.universal_file(name, stem)
        if kind == keys.SCALAR and held.shape == () and key != "step":
            kind = keys.FLAT  # a moment of a 0-dim parameter looks like a number per parameter
        make = partial(_content, record.form, name, extents, entry.shape, kind, category, held.shape)
        yield FileJob(path, make, _elements_nbytes(extents, math.prod(entry.shape)))


def _itself(value: Any) -> Any:
    return value


def _whole_shape(name: str, shapes: list[tuple[int, ...]], category: Category) -> tuple[int, ...]:
    if len(shapes) == 1:
        return category.rows(shapes[0])
    if category.cat_dim is None:
        return shapes[0]
    import torch

    return tuple(join(name, [torch.empty(shape, device="meta") for shape in shapes], category).shape)


def _elements_nbytes(extents: list[list[Extent]], numel: int) -> int:
    first = extents[0][0].value if extents[0] else None
    return numel * int(first.dtype.itemsize) if isinstance(first, PlainTensor) else 0


def _content(
    form: str,
    name: str,
    extents: list[list[Extent]],
    shape: tuple[int, ...],
    kind: str,
    category: Category,
    slice_shape: tuple[int, ...],
) -> Any:
    """What one file holds. ``extents``: per slice, those of all elements of it."""
    if kind == keys.SCALAR:
        return extents[0][0].whole()
    if kind == keys.TENSOR:
        value: Any = extents[0][0].value
        return {keys.PARAM: value} if form == WHOLE else value
    stored = shape if form == WHOLE else (math.prod(shape),)
    if len(extents) == 1:
        value = _packed(extents[0], stored)
    else:
        joined = join(name, [_gathered(part, slice_shape) for part in extents], category)
        value = bridge.tensor_from_torch(joined)
    return category.entry(value) if form == WHOLE else value


def _packed(extents: list[Extent], shape: tuple[int, ...]) -> Slice:
    """The first elements of a parameter, as many as ``shape`` has, read when the file is written."""
    left = math.prod(shape)
    pack = Pack(extents[0].value.dtype if extents else DTYPES["float32"])
    for extent in extents:
        part = extent.elements()[:left]
        if part.numel():
            pack.add(part)
        left -= part.numel()
    return Slice(pack, 0, shape)


def _gathered(extents: list[Extent], shape: tuple[int, ...]) -> Any:
    """A slice, as a tensor of torch: how it is joined is arithmetic."""
    import torch

    return torch.cat([bridge.tensor_to_torch(extent.elements()) for extent in extents]).reshape(shape)


def _plan_empty_states(record: UniversalRecord, steps: float | None) -> Iterator[FileJob]:
    """Zeros for parameters that never had a gradient, which DeepSpeed wants of all. The record does not list them."""
    held = [(name, entry) for name, entry in record.parameters.items() if entry.group is not None]
    dims = [
        (len(entry.shape), entry) for _, entry in held
    ]  # a 0-dim parameter's moments look like numbers: it is first
    ordered = [entry for _, entry in sorted(dims, key=lambda item: item[0])]
    kinds = {key: kind for entry in ordered for key, kind in entry.states.items() if key not in entry.files}
    for name, entry in held:
        for key, kind in kinds.items() if not entry.states else ():
            path = names.universal_file(name, key)
            if kind == keys.FLAT:
                yield FileJob(path, partial(_zeros, record.form, entry.shape), 4 * math.prod(entry.shape))
            elif key == "step" and steps is not None:
                yield FileJob(path, partial(scalar, steps), 0)


def _zeros(form: str, shape: tuple[int, ...]) -> Any:
    value = zeros(shape if form == WHOLE else (math.prod(shape),))
    return Category().entry(value) if form == WHOLE else value


def _plan_rest(record: UniversalRecord, source: Source) -> Iterator[FileJob]:
    """Parameters no optimizer holds; also notes in ``record`` which names are other names of a parameter."""
    saved = source.first
    state = saved.module_state()
    record.shared.update(shared_names(saved, state))
    buffers = set(saved.model.get(keys.BUFFER_NAMES) or ())
    for name, value in state.items():
        is_weight = (is_tensor(value) or isinstance(value, ShardedWeight)) and not name.endswith(_EXTRA_STATE)
        if not is_weight or name in buffers or name in record.parameters or name in record.shared:
            continue
        dtype = keys.dtype_name(value.dtype)
        record.parameters[name] = UniversalParameter(tuple(value.shape), dtype, dtype)
        # Found here, not by the workers: an index is filled by one thread.
        held = value.cover(0, math.prod(value.shape)) if isinstance(value, ShardedWeight) else value.detach()
        make = partial(_rest_content, record.form, held, tuple(value.shape))
        nbytes = math.prod(value.shape) * value.dtype.itemsize
        yield FileJob(names.universal_file(name, keys.FP32_WEIGHT_KEY), make, nbytes)


def _rest_content(form: str, held: PlainTensor | list[Extent], shape: tuple[int, ...]) -> Any:
    stored_shape = shape if form == WHOLE else (math.prod(shape),)
    stored = held.reshape(stored_shape) if isinstance(held, PlainTensor) else _packed(held, stored_shape)
    return UNCUT.entry(stored) if form == WHOLE else stored


def shared_names(saved: SavedTag, state: dict[str, Any]) -> dict[str, str]:
    """``other name -> first name`` of tied parameters; found by their memory where the tag does not list them."""
    listed = saved.model.get(keys.SHARED_PARAMS)
    if listed is not None:
        return dict(listed)
    first: dict[Any, str] = {}
    made = {}
    for name, value in state.items():
        if is_tensor(value) and value.numel():
            kept = first.setdefault((value.data_ptr(), tuple(value.shape), value.dtype), name)
            if kept != name:
                made[name] = kept
    return made


def _steps(saved: SavedTag, record: UniversalRecord) -> float | None:
    """The step count of the optimizer, for readers that want one number: that of the parameter that has most."""
    counts = [float(entry.values["step"]) for entry in record.parameters.values() if "step" in entry.values]
    for name, entry in record.parameters.items():
        if entry.states.get("step") == keys.SCALAR:
            extent = saved.index.cover(name, "step", 0, math.prod(entry.shape)) if name in saved.parameters else []
            counts += [float(extent[0].whole())] if extent else []
    return max(counts, default=None)


def _tensor_nbytes(state: dict[str, Any]) -> int:
    return sum(value.nbytes for value in state.values() if is_tensor(value))
