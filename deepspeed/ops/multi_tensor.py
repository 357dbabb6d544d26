"""Tables of tensors on a GPU, for the kernels that update all of them in one launch (`multi_tensor_triton.py`).

Owns: which tensors may be walked, the rows and units on the device and when they are made anew, whether the kernels can
be used here. Does not own: the arithmetic, the numbers of a rule (`multi_tensor_rules.py`), and what is done with other
tensors (`row_optimizer.py`, `lamb/fused_lamb.py`).

Invariants:
- A table on the device is used again only while every address, size, dtype and rule number in it is the same. It is
  compared in each step, so tensors may be replaced at any time.
- Nothing here waits for the device: what changes goes there from locked memory, on the stream of the kernels.
- Tensors of a row have one device and one number of elements, or nothing is launched.
"""

from __future__ import annotations

import array
import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from deepspeed.native.build import switched_off
from deepspeed.ops.multi_tensor_rules import NUMBERS, OPS, SCALE, Number
from deepspeed.ops.native_kernels import KINDS
from deepspeed.utils.logging import warning_once

__all__ = ["SWITCH", "Batch", "Cache", "DeviceTable", "problem", "usable"]

SWITCH = "multi_tensor"
"""`DS_SKIP_MULTI_TENSOR=1` turns the kernels off, as a library's name does for native code."""
_ROW = 8  # int64 of a row
_WIDE = 16  # bytes of the widest load
_OLDEST_CAPABILITY = (8, 0)  # sm_80; the kernels are not built for older ones

# Types of devices whose memory the kernels can walk (triton's interpreter: the host's, in tests).
_DEVICES = {"cuda"}
_PLAIN = {torch.Tensor, torch.nn.Parameter}
_data_ptr, _is_contiguous, _numel = torch.Tensor.data_ptr, torch.Tensor.is_contiguous, torch.Tensor.numel
_get_device = torch.Tensor.get_device

# One launch per kind: dtypes of param, grad, states and copy (None: there is none), form of the rule, alignment.
_Dtypes = tuple[torch.dtype | None, ...]
_Kind = tuple[_Dtypes, bool, bool]


@dataclass(frozen=True)
class Batch:
    """Rows of one kind on their device.

    rows: int64 [count, 8]. units: int32 [unit_count], the row of each. dtypes: of param, grad, two states, copy.
    form: a flag of the rule that the kernel is compiled for.
    """

    rows: torch.Tensor
    units: torch.Tensor
    count: int
    unit_count: int
    dtypes: _Dtypes
    form: bool
    aligned: bool


@dataclass(frozen=True)
class _Kept:
    content: array.array[int]
    stream: int
    batch: Batch


class Cache:
    """Tables that are on a device already, of one optimizer. Bounded: the oldest is dropped."""

    LIMIT = 256  # an optimizer driven unit by unit has one table per unit

    def __init__(self) -> None:
        self._kept: dict[Any, _Kept] = {}
        self.uploads = 0

    def batch(self, key: Any, content: array.array[int], make: Callable[[_Kept | None], Batch], stream: int) -> Batch:
        """The batch kept under `key` if it was made of `content` on `stream`, else a new one."""
        kept = self._kept.get(key)
        if kept is not None and kept.stream == stream and kept.content == content:
            return kept.batch
        self.uploads += 1
        made = make(kept if kept is not None and kept.stream == stream else None)
        self._kept.pop(key, None)
        if len(self._kept) >= self.LIMIT:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = _Kept(content, stream, made)
        return made


# ---- the table of one call


class DeviceTable:
    """Rows of tensors for one call of the kernels of `op` ("fused_adam", ...); answers as `native_kernels.Table`."""

    def __init__(self, op: str, cache: Cache) -> None:
        self._op = OPS[op]
        self._cache = cache
        self._rules: list[list[Number]] = []
        self._forms: list[bool] = []
        # device index -> kind -> [addresses of five places, numel, rule, place in the table], a column each
        self._kinds: dict[int, dict[_Kind, list[list[int]]]] = {}
        self._written: list[list[torch.Tensor]] = []
        self._kept: list[Any] = []
        self._count = 0

    def takes(self, states: int) -> bool:
        """Whether the kernels know a rule with so many states."""
        return states == self._op.states

    @staticmethod
    def readable(tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the kernels may walk the memory of all these tensors: plain, contiguous, on a GPU, of known dtype."""
        try:
            return (
                _PLAIN.issuperset(map(type, tensors))
                and KINDS.keys() >= {tensor.dtype for tensor in tensors}
                and False not in (
                    [tensor.is_cuda for tensor in tensors] if "cuda" in _DEVICES else [t.is_cpu for t in tensors]
                )
                and all(map(_is_contiguous, tensors))
            )
        except RuntimeError:  # a layout without strides
            return False

    def add_rule(self, numbers: Sequence[Number]) -> int:
        """Take the numbers of a rule; returns the rule's number. Those that are tensors on a device stay there."""
        numbers = [_number(value) for value in numbers]
        found, form = self._op.numbers(numbers)
        # Gradients are multiplied by the scale that `run` gets; LAMB divides them by one of its numbers.
        self._rules.append(found + [1.0] * (NUMBERS - len(found)))
        self._forms.append(form)
        return len(self._rules) - 1

    def extend(
        self,
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        states: list[list[torch.Tensor]],
        outs: list[torch.Tensor | None] | None,
        rules: list[int],
    ) -> None:
        """Add a row per parameter, of readable tensors; arguments as those of `native_kernels.Table.extend`.

        Raises:
            ValueError: tensors of a row differ in device or number of elements; nothing was added.
        """
        if not params:
            return
        given = [params, grads, *states]
        sizes, devices = list(map(_numel, params)), list(map(_get_device, params))
        for column in given[1:]:
            if list(map(_numel, column)) != sizes or list(map(_get_device, column)) != devices:
                raise ValueError(_unlike(params, column))
        some_outs = [out for out in outs if out is not None] if outs is not None else []
        if some_outs:
            there = [param for param, out in zip(params, outs or (), strict=True) if out is not None]
            if any(o.numel() != p.numel() or o.device != p.device for p, o in zip(there, some_outs, strict=True)):
                raise ValueError(_unlike(there, some_outs))
        count = len(params)
        columns: list[list[int]] = [list(map(_data_ptr, column)) for column in given]
        columns += [[0] * count] * (4 - len(columns))
        columns.append([0] * count if not some_outs else [0 if o is None else o.data_ptr() for o in outs or ()])
        columns += [sizes, rules, list(range(self._count, self._count + count))]
        found: list[list[torch.dtype | None]] = [[tensor.dtype for tensor in column] for column in given]
        found += [[None] * count] * (4 - len(found))
        found.append([None] * count if not some_outs else [None if o is None else o.dtype for o in outs or ()])
        self._sort(devices, found, rules, columns)
        self._count += count
        self._written += [params, some_outs]
        self._kept.append((grads, states))

    def _sort(
        self,
        devices: list[int],
        dtypes: list[list[torch.dtype | None]],
        rules: list[int],
        columns: list[list[int]],
    ) -> None:
        """Put rows, given as columns, to those of their device and kind."""
        forms = {self._forms[rule] for rule in set(rules)}
        sorts: list[list[Any]] = [devices, *dtypes]
        uniform = len(forms) == 1 and all(column.count(column[0]) == len(column) for column in sorts)
        low_bits = 0
        for addresses in columns[:5]:
            low_bits |= functools.reduce(operator.or_, addresses)
        if uniform and not low_bits % _WIDE:
            kind = tuple(column[0] for column in dtypes), forms.pop(), True
            for column, values in zip(self._columns(devices[0], kind), columns, strict=True):
                column += values
            return
        # One by one: the rule, and tensors of other dtypes or addresses, make a difference.
        aligned = [not functools.reduce(operator.or_, row) % _WIDE for row in zip(*columns[:5], strict=True)]
        kinds = zip(zip(*dtypes, strict=True), [self._forms[rule] for rule in rules], aligned, strict=True)
        for device, kind, row in zip(devices, kinds, zip(*columns, strict=True), strict=True):
            for column, value in zip(self._columns(device, kind), row, strict=True):
                column.append(value)

    def _columns(self, device: int, kind: _Kind) -> list[list[int]]:
        kinds = self._kinds.setdefault(device, {})
        if kind not in kinds:
            kinds[kind] = [[] for _ in range(8)]
        return kinds[kind]

    def run(self, scale: float | torch.Tensor = 1.0) -> list[torch.Tensor]:
        """Launch: one kernel per kind of row (LAMB: three). scale: factor of the gradients, for Adam and Lion.

        Returns what the kernels give back per row (LAMB: the ratios), 0-dim tensors in the order of the rows.

        Raises:
            RuntimeError: the stream is being captured into a graph.
        """
        if any(device >= 0 for device in self._kinds):
            _refuse_capture()
        results: list[Any] = [None] * self._count
        launch = getattr(_kernels(), self._op.launch)
        for device, kinds in self._kinds.items():
            with _device(device) as place:
                numbers = self._upload_numbers(place, scale)
                for kind, columns in kinds.items():
                    given = launch(self._batch(place, kind, columns), numbers)
                    if given is not None:
                        for at, value in zip(columns[7], given.unbind(), strict=True):
                            results[at] = value
        for tensors in self._written:
            torch.autograd.graph.increment_version(tensors)
        return results

    def _batch(self, device: torch.device, kind: _Kind, columns: list[list[int]]) -> Batch:
        count = len(columns[0])
        content = array.array("q", bytes(8 * _ROW * count))
        for place in range(7):
            content[place::_ROW] = array.array("q", columns[place])
        chunk: int = _kernels().CHUNK
        units = [-(-numel // chunk) for numel in columns[5]]
        content[7::_ROW] = array.array("q", _starts(units))

        def make(before: _Kept | None) -> Batch:
            rows = _upload(content, torch.int64, device)
            total = sum(units)
            if before is not None and before.content[7::_ROW] == content[7::_ROW] and before.batch.unit_count == total:
                of_units = before.batch.units  # addresses change more often than sizes
            else:
                of_units = _upload_units(units, device)
            return Batch(rows, of_units, count, total, *kind)

        return self._cache.batch((device, kind, columns[0][0], count), content, make, _stream(device))

    def _upload_numbers(self, device: torch.device, scale: float | torch.Tensor) -> torch.Tensor:
        """The numbers of all rules, fp32 [rules, 12] on the device."""
        scaled = not (isinstance(scale, float) and scale == 1.0)
        rules = [[*rule[:SCALE], scale, *rule[SCALE + 1 :]] if scaled else rule for rule in self._rules]
        plain = [0.0 if isinstance(value, torch.Tensor) else float(value) for rule in rules for value in rule]
        found = _upload(array.array("f", plain), torch.float32, device).view(-1, NUMBERS)
        for row, rule in enumerate(rules):
            for place, value in enumerate(rule):
                if isinstance(value, torch.Tensor):
                    found[row, place].copy_(value.reshape(()), non_blocking=True)
        return found


def _number(value: Number) -> Number:
    """A number of a rule; a tensor that is not in host memory stays there, in fp64."""
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        return value.detach().double()
    return float(value)


def _unlike(params: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> str:
    param, other = next(
        (p, o) for p, o in zip(params, others, strict=True) if p.numel() != o.numel() or p.device != o.device
    )
    return (
        f"multi-tensor kernel: a tensor of shape {tuple(other.shape)} on {other.device} beside a parameter of shape "
        f"{tuple(param.shape)} on {param.device}; expected as many elements on the same device"
    )


def _starts(units: list[int]) -> list[int]:
    found, total = [], 0
    for count in units:
        found.append(total)
        total += count
    return found


def _upload_units(units: list[int], device: torch.device) -> torch.Tensor:
    """The row of each unit, int32."""
    content = array.array("i")
    for row, count in enumerate(units):
        content.extend(array.array("i", [row]) * count)
    return _upload(content, torch.int32, device) if content else torch.empty(0, dtype=torch.int32, device=device)


def _upload(values: array.array[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On the device without waiting: locked memory is handed out again only when the copy has left it."""
    host = torch.frombuffer(values, dtype=dtype)  # host memory, whatever the default device is
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def _refuse_capture() -> None:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a fused optimizer's step cannot be captured into a CUDA graph: its number and learning rate come from the "
            "host each time, and a replay would repeat those of the capture; leave optimizer.step() out of the graph, "
            "or take torch's optimizer with capturable=True"
        )


class _device:
    """Makes a device (by its index; -1 is the host's memory, in triton's interpreter) the current one."""

    def __init__(self, index: int) -> None:
        self.place = torch.device("cpu") if index < 0 else torch.device("cuda", index)
        self._guard = None if index < 0 else torch.cuda.device(index)

    def __enter__(self) -> torch.device:
        if self._guard is not None:
            self._guard.__enter__()
        return self.place

    def __exit__(self, *problem: Any) -> None:
        if self._guard is not None:
            self._guard.__exit__(*problem)


def _stream(device: torch.device) -> int:
    """The stream whose order protects a table; on another one its upload might not have happened yet."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


# ---- whether they can be used


def problem(op: str, device: str) -> str:
    """Why the kernels of `op` cannot be used for tensors on a type of device; empty when they can.

    The first call that gets so far compiles them and compares one step with torch on the device (1 to 3 seconds, and a
    fraction of one once triton has them in its cache).
    """
    if op not in OPS:
        return f"{op} has no kernels for GPUs"
    if device not in _DEVICES:
        return f"for tensors on {' or '.join(sorted(_DEVICES))}, not on {device}"
    return switched_off(op) or switched_off(SWITCH) or _missing(device) or _trial(op, device)


def usable(op: str, device: str) -> bool:
    """Whether the kernels are used for `op` on such a device; says once why not, where it is a GPU."""
    reason = problem(op, device)
    if reason and device == "cuda" and op in OPS:
        warning_once(f"{op}: torch's kernels instead of one launch for all tensors: {reason}")
    return not reason


@functools.cache
def _missing(device: str) -> str:
    try:
        _kernels()
    except ImportError as failure:
        return f"triton cannot be imported ({failure}); it comes with torch's GPU wheels"
    if device == "cuda" and not torch.cuda.is_available():
        return "no GPU here"
    if device == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability() < _OLDEST_CAPABILITY:
        return f"compute capability {torch.cuda.get_device_capability()} is below {_OLDEST_CAPABILITY}"
    return ""


@functools.cache
def _kernels() -> ModuleType:
    return import_module("deepspeed.ops.multi_tensor_triton")


@functools.cache
def _trial(op: str, device: str) -> str:
    """Two steps of small tensors, by the kernels and by torch: a kernel that fails or errs here is not taken."""
    module, _, name = OPS[op].optimizer.partition(":")
    make = getattr(import_module(module), name)
    results = []
    for by_kernels in (False, True):
        generator = torch.Generator("cpu").manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(n, generator=generator, device="cpu").to(device)) for n in (5, 10_007)]
        optimizer = make(params, lr=0.1, weight_decay=0.1)
        optimizer._on_device = by_kernels
        try:
            for _ in range(2):
                for param in params:
                    param.grad = torch.randn(param.numel(), generator=generator, device="cpu").to(device)
                optimizer.step()
            results.append(torch.cat([param.detach() for param in params]).cpu())
        except Exception as failure:  # of any compiler or driver: torch serves
            return f"one step on this device failed: {type(failure).__name__}: {failure}".splitlines()[0]
    off = float((results[0] - results[1]).abs().max())
    # Values are up to 4 and steps of 0.1; a sign of Lion may flip where the momentum cancels, but not with this seed.
    return "" if off < 1e-5 else f"one step on this device is {off:.1e} off torch's"
