"""Adam, Lion and LAMB over many tensors in one launch, for GPUs. Needs triton; import it lazily.

Owns: the kernels and their launches. Does not own: which tensors may be given to them, the tables and the numbers of a
rule (`multi_tensor.py`, `multi_tensor_rules.py`), the choice of an implementation (`registry.py`).

A launch gets a table with a row of eight int64 per tensor (addresses of parameter, gradient, two states and the copy;
numel, rule, first unit), the number of the row of each unit (CHUNK elements of one tensor, one program each), and the
fp32 numbers of each rule. Nothing else varies: a new learning rate, step, loss scale or clip factor is data on the
device, so no step compiles anything again and none waits for the device. Offsets are int64.

Invariants: the operations of `native/csrc/update_rules.h`, in its order, each rounded as there (fused only where it is
written so, divisions and square roots correctly rounded), so an Adam or Lion step has the bits of the CPU kernel and of
torch's vector loops on a CPU. torch's CUDA kernels order and fuse otherwise: against those the last bits differ.
Nothing a kernel computes depends on the order in which programs run.
"""

# The bodies of kernels are triton's language, in which an int has methods and arguments have no types.
# mypy: disable-error-code="no-untyped-def, attr-defined"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from deepspeed.ops.multi_tensor import Batch

# Elements per program, and per pass of its loop. With 8 warps a thread holds 8 elements of each tensor at a time: two
# loads of 16 bytes in fp32, and few enough registers for four programs on a multiprocessor.
CHUNK = 8192
BLOCK = 2048
WARPS = 8

# Places in a row of the table, and how many numbers a rule has (`multi_tensor.py`, `multi_tensor_rules.py`).
_ROW = tl.constexpr(8)
_NUMEL, _RULE, _FIRST_UNIT = tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)
_NUMBERS = tl.constexpr(12)

_DTYPES = {None: None, torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _unit(rows, units, CHUNK: tl.constexpr):
    """(row, first element, elements) of this program."""
    unit = tl.program_id(0)
    row = rows + tl.load(units + unit).to(tl.int64) * _ROW
    start = (unit - tl.load(row + _FIRST_UNIT)) * CHUNK
    return row, start, tl.minimum(tl.load(row + _NUMEL) - start, CHUNK)


@triton.jit
def _rule(numbers, row):
    """The numbers of the row's rule, read once; those a kernel does not use are not."""
    at = numbers + tl.load(row + _RULE) * _NUMBERS
    return (
        tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5),
        tl.load(at + 6), tl.load(at + 7), tl.load(at + 8), tl.load(at + 9), tl.load(at + 10),
    )  # fmt: skip


@triton.jit
def _pointer(row, place, start, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(row + place).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + start


@triton.jit
def _read(pointer, offsets, left, FULL: tl.constexpr):
    # A mask would cost the wide loads: how far it reaches is known when the kernel runs.
    if FULL:
        value = tl.load(pointer + offsets)
    else:
        value = tl.load(pointer + offsets, mask=offsets < left, other=0.0)
    return value.to(tl.float32)


@triton.jit
def _write(pointer, value, offsets, left, FULL: tl.constexpr):
    if FULL:
        tl.store(pointer + offsets, value)
    else:
        tl.store(pointer + offsets, value, mask=offsets < left)


@triton.jit
def _write_param(param, out, value, offsets, left, PARAM: tl.constexpr, OUT: tl.constexpr, FULL: tl.constexpr):
    """The new value, rounded to the parameter's dtype; the copy has what the parameter holds then."""
    stored = value.to(PARAM)
    _write(param, stored, offsets, left, FULL)
    if OUT is not None:
        _write(out, stored.to(tl.float32).to(OUT), offsets, left, FULL)


@triton.jit
def _lerp(start, end, coefficient):
    """torch's lerp: from the nearer end. The coefficient is the weight, or the weight - 1 where that is nearer."""
    return tl.fma(coefficient, end - start, tl.where(coefficient > 0.0, start, end))


# ---- Adam


@triton.jit
def _adam_block(
    param, grad, first, second, out, offsets, left, rule,
    PARAM: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, OUT: tl.constexpr,
    DECOUPLED: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    decay = rule[4]
    value = _read(param, offsets, left, FULL)
    g = _read(grad, offsets, left, FULL) * rule[7]
    if DECOUPLED:
        value = value * decay
    else:
        g = tl.where(decay != 0.0, tl.fma(value, decay, g), g)
    mean = _lerp(_read(first, offsets, left, FULL), g, rule[0])
    square = tl.fma(rule[2] * g, g, rule[1] * _read(second, offsets, left, FULL))
    divisor = tl.div_rn(tl.sqrt_rn(square), rule[6]) + rule[3]
    value = value + tl.div_rn(rule[5] * mean, divisor)
    _write(first, mean.to(FIRST), offsets, left, FULL)
    _write(second, square.to(SECOND), offsets, left, FULL)
    _write_param(param, out, value, offsets, left, PARAM, OUT, FULL)


@triton.jit
def adam_kernel(
    rows, units, numbers,
    PARAM: tl.constexpr, GRAD: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, OUT: tl.constexpr,
    FORM: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """FORM: decoupled decay. Numbers: lerp coefficient, beta2, 1 - beta2, eps, decay, -lr / bias1, sqrt(bias2)."""
    row, start, count = _unit(rows, units, CHUNK)
    rule = _rule(numbers, row)
    param = _pointer(row, 0, start, PARAM, ALIGNED)
    grad = _pointer(row, 1, start, GRAD, ALIGNED)
    first = _pointer(row, 2, start, FIRST, ALIGNED)
    second = _pointer(row, 3, start, SECOND, ALIGNED)
    out = param
    if OUT is not None:
        out = _pointer(row, 4, start, OUT, ALIGNED)
    for begin in range(0, count.to(tl.int32), BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        if begin + BLOCK <= count:
            _adam_block(
                param, grad, first, second, out, offsets, count, rule, PARAM, FIRST, SECOND, OUT, FORM, True
            )
        else:
            _adam_block(
                param, grad, first, second, out, offsets, count, rule, PARAM, FIRST, SECOND, OUT, FORM, False
            )


# ---- Lion


@triton.jit
def _lion_block(
    param, grad, first, out, offsets, left, rule,
    PARAM: tl.constexpr, FIRST: tl.constexpr, OUT: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    rate = rule[2]
    g = _read(grad, offsets, left, FULL) * rule[7]
    momentum = _read(first, offsets, left, FULL)
    towards = _lerp(momentum, g, rule[0])
    # The sign of 0 and of NaN is 0.
    change = tl.where(towards > 0.0, rate, 0.0) - tl.where(towards < 0.0, rate, 0.0)
    value = _read(param, offsets, left, FULL) * rule[3] - change
    _write(first, _lerp(momentum, g, rule[1]).to(FIRST), offsets, left, FULL)
    _write_param(param, out, value, offsets, left, PARAM, OUT, FULL)


@triton.jit
def lion_kernel(
    rows, units, numbers,
    PARAM: tl.constexpr, GRAD: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, OUT: tl.constexpr,
    FORM: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Numbers: lerp coefficients of the direction and of the momentum, lr, 1 - lr * decay."""
    row, start, count = _unit(rows, units, CHUNK)
    rule = _rule(numbers, row)
    param = _pointer(row, 0, start, PARAM, ALIGNED)
    grad = _pointer(row, 1, start, GRAD, ALIGNED)
    first = _pointer(row, 2, start, FIRST, ALIGNED)
    out = param
    if OUT is not None:
        out = _pointer(row, 4, start, OUT, ALIGNED)
    for begin in range(0, count.to(tl.int32), BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        if begin + BLOCK <= count:
            _lion_block(param, grad, first, out, offsets, count, rule, PARAM, FIRST, OUT, True)
        else:
            _lion_block(param, grad, first, out, offsets, count, rule, PARAM, FIRST, OUT, False)


# ---- LAMB
#
# The trust ratio needs the norms of a whole tensor before any element may change. `lamb_norms_kernel` computes the
# directions and keeps their sums of squares alone, `lamb_ratio_kernel` adds those up per tensor, and `lamb_kernel`
# computes the directions again and applies them. Reading twice moves 44 bytes per fp32 element; keeping the directions
# or updating the moments in the first pass would move 40, but the one needs memory for them, and the other would divide
# by moments that 16-bit states have rounded, to zero even.


@triton.jit
def _lamb_block(param, grad, first, second, offsets, left, rule, INSIDE: tl.constexpr, FULL: tl.constexpr):
    """(parameter, its direction, mean, square) before the update."""
    value = _read(param, offsets, left, FULL)
    g = tl.div_rn(_read(grad, offsets, left, FULL), rule[7])
    mean = _lerp(_read(first, offsets, left, FULL), g, rule[0])
    square = _read(second, offsets, left, FULL) * rule[1] + rule[2] * g * g
    divisor = tl.div_rn(square, rule[8])
    if INSIDE:
        divisor = tl.sqrt_rn(divisor + rule[3])
    else:
        divisor = tl.sqrt_rn(divisor) + rule[3]
    direction = tl.div_rn(tl.div_rn(mean, rule[6]), divisor)
    decay = rule[4]
    return value, tl.where(decay != 0.0, direction + decay * value, direction), mean, square


@triton.jit
def lamb_norms_kernel(
    rows, units, numbers, sums,
    PARAM: tl.constexpr, GRAD: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    FORM: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """sums: of the squares of each unit's parameters and directions, [units, 2] fp32. FORM: eps inside the root."""
    row, start, count = _unit(rows, units, CHUNK)
    rule = _rule(numbers, row)
    param = _pointer(row, 0, start, PARAM, ALIGNED)
    grad = _pointer(row, 1, start, GRAD, ALIGNED)
    first = _pointer(row, 2, start, FIRST, ALIGNED)
    second = _pointer(row, 3, start, SECOND, ALIGNED)
    of_params = tl.zeros((BLOCK,), tl.float32)
    of_directions = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, count.to(tl.int32), BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        if begin + BLOCK <= count:
            value, direction, _mean, _square = _lamb_block(
                param, grad, first, second, offsets, count, rule, FORM, True
            )
            of_params += value * value
            of_directions += direction * direction
        else:
            value, direction, _mean, _square = _lamb_block(
                param, grad, first, second, offsets, count, rule, FORM, False
            )
            # Beyond the end all is zero; with eps = 0 the direction there is 0 / 0.
            direction = tl.where(offsets < count, direction, 0.0)
            of_params += value * value
            of_directions += direction * direction
    unit = tl.program_id(0).to(tl.int64)
    tl.store(sums + 2 * unit, tl.sum(of_params, axis=0))
    tl.store(sums + 2 * unit + 1, tl.sum(of_directions, axis=0))


@triton.jit
def lamb_ratio_kernel(rows, numbers, sums, ratios, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """The trust ratio of each row: clamp(|p| / |u|), 1 where a norm is 0 or NaN; one program per row."""
    row = rows + tl.program_id(0).to(tl.int64) * _ROW
    rule = _rule(numbers, row)
    sums += 2 * tl.load(row + _FIRST_UNIT)
    count = (tl.load(row + _NUMEL) + CHUNK - 1) // CHUNK
    of_params = tl.zeros((BLOCK,), tl.float32)
    of_directions = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, count.to(tl.int32), BLOCK):
        place = begin + tl.arange(0, BLOCK)
        of_params += tl.load(sums + 2 * place, mask=place < count, other=0.0)
        of_directions += tl.load(sums + 2 * place + 1, mask=place < count, other=0.0)
    param_norm = tl.sqrt_rn(tl.sum(of_params, axis=0))
    direction_norm = tl.sqrt_rn(tl.sum(of_directions, axis=0))
    usable = (param_norm > 0.0) & (direction_norm > 0.0)
    ratio = tl.div_rn(param_norm, tl.where(usable, direction_norm, 1.0))
    low, high = rule[9], rule[10]
    ratio = tl.where(ratio < low, low, tl.where(ratio > high, high, ratio))  # NaN, of inf / inf, stays
    tl.store(ratios + tl.program_id(0), tl.where(usable, ratio, 1.0))


@triton.jit
def _lamb_apply(
    param, grad, first, second, offsets, left, rule, ratio,
    PARAM: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, INSIDE: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    value, direction, mean, square = _lamb_block(param, grad, first, second, offsets, left, rule, INSIDE, FULL)
    value = value - direction * ratio * rule[5]
    _write(first, mean.to(FIRST), offsets, left, FULL)
    _write(second, square.to(SECOND), offsets, left, FULL)
    _write(param, value.to(PARAM), offsets, left, FULL)


@triton.jit
def lamb_kernel(
    rows, units, numbers, ratios,
    PARAM: tl.constexpr, GRAD: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    FORM: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Numbers: lerp coefficient, beta2, 1 - beta2, eps, decay, lr, bias1, divisor of gradients, bias2, min, max."""
    row, start, count = _unit(rows, units, CHUNK)
    rule = _rule(numbers, row)
    param = _pointer(row, 0, start, PARAM, ALIGNED)
    grad = _pointer(row, 1, start, GRAD, ALIGNED)
    first = _pointer(row, 2, start, FIRST, ALIGNED)
    second = _pointer(row, 3, start, SECOND, ALIGNED)
    ratio = tl.load(ratios + tl.load(units + tl.program_id(0)))
    for begin in range(0, count.to(tl.int32), BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        if begin + BLOCK <= count:
            _lamb_apply(
                param, grad, first, second, offsets, count, rule, ratio, PARAM, FIRST, SECOND, FORM, True
            )
        else:
            _lamb_apply(
                param, grad, first, second, offsets, count, rule, ratio, PARAM, FIRST, SECOND, FORM, False
            )


# ---- launches


def constants(batch: Batch, *, out: bool) -> dict[str, Any]:
    """The compile-time values of a kernel for this batch. out: the kernel can write copies."""
    param, grad, first, second, copy = (_DTYPES[dtype] for dtype in batch.dtypes)
    found = {"PARAM": param, "GRAD": grad, "FIRST": first, "SECOND": first if second is None else second}
    if out:
        found["OUT"] = copy
    return found | {"FORM": batch.form, "ALIGNED": batch.aligned, "CHUNK": CHUNK, "BLOCK": BLOCK}


def adam(batch: Batch, numbers: torch.Tensor) -> None:
    """Adam for the rows of `batch`; numbers: fp32 [rules, 12] on the batch's device."""
    _elementwise(adam_kernel, batch, numbers)


def lion(batch: Batch, numbers: torch.Tensor) -> None:
    """Lion for the rows of `batch`; numbers as in `adam`."""
    _elementwise(lion_kernel, batch, numbers)


def lamb(batch: Batch, numbers: torch.Tensor) -> torch.Tensor:
    """LAMB for the rows of `batch`; returns the trust ratios, fp32 [rows]."""
    ratios = torch.empty(batch.count, dtype=torch.float32, device=batch.rows.device)
    sums = torch.empty(max(batch.unit_count, 1), 2, dtype=torch.float32, device=batch.rows.device)
    options = {**constants(batch, out=False), "num_warps": WARPS, "enable_fp_fusion": False}
    if batch.unit_count:
        lamb_norms_kernel[(batch.unit_count,)](batch.rows, batch.units, numbers, sums, **options)
    lamb_ratio_kernel[(batch.count,)](
        batch.rows, numbers, sums, ratios, CHUNK=CHUNK, BLOCK=1024, num_warps=4, enable_fp_fusion=False
    )
    if batch.unit_count:
        lamb_kernel[(batch.unit_count,)](batch.rows, batch.units, numbers, ratios, **options)
    return ratios


def _elementwise(kernel: Any, batch: Batch, numbers: torch.Tensor) -> None:
    if batch.unit_count:
        kernel[(batch.unit_count,)](
            batch.rows, batch.units, numbers, **constants(batch, out=True), num_warps=WARPS, enable_fp_fusion=False
        )
