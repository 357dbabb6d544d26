"""Run by `test_multi_tensor_triton.py` in a process of its own: the optimizers' GPU kernels, without a GPU.

    python -m tests.kernels.multi_tensor_kernels compare [all]    # in triton's interpreter, on the CPU
    python -m tests.kernels.multi_tensor_kernels compile 90       # for GPUs that need not be here: sm_90
    python -m tests.kernels.multi_tensor_kernels compile 90 all   # every specialisation there is

Prints one JSON list of what is wrong.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from deepspeed.ops import multi_tensor, multi_tensor_rules
from deepspeed.ops.adam import FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import FusedLion
from tests.kernels.interpreter import prepare_once

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
CLASSES: dict[str, Any] = {"adam": FusedAdam, "lion": FusedLion, "lamb": FusedLamb}
# Empty, one element, ragged, exactly one pass of a program's loop, two programs; CHUNK and BLOCK are small here.
SIZES = (0, 1, 31, 128, 300, 7)
CHUNK, BLOCK = 256, 128
WORST = {FP32: 1e-6, BF16: 2.0**-7, FP16: 2.0**-10}
# (dtype, with infinities and NaN, elements between the start of the memory and of the tensor)
INPUTS = ((FP32, False, 0), (FP32, True, 1), (BF16, True, 0), (FP16, False, 3))


def emulate() -> None:
    """Make triton's interpreter walk the host's memory, round to bf16 as devices do, and fuse with one rounding."""
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    from deepspeed.ops import multi_tensor_triton

    multi_tensor._DEVICES = {"cpu"}
    multi_tensor_triton.CHUNK, multi_tensor_triton.BLOCK = CHUNK, BLOCK
    plain_cast = InterpreterBuilder.cast_impl

    def cast(self: Any, source: Any, target: Any) -> Any:
        if str(source.dtype.scalar) == "fp32" and str(target.scalar) == "bf16":
            given = np.ascontiguousarray(source.data)
            rounded = torch.from_numpy(given.reshape(-1).copy()).bfloat16().view(torch.int16).numpy()
            return TensorHandle(rounded.view(np.uint16).reshape(given.shape), target.scalar)
        return plain_cast(self, source, target)

    def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        wide = np.longdouble
        return TensorHandle((x.data.astype(wide) * y.data + z.data).astype(z.data.dtype), z.dtype.scalar)

    InterpreterBuilder.cast_impl, InterpreterBuilder.create_fma = cast, fma
    prepare_once(multi_tensor_triton)


def made(dtype: torch.dtype, sizes: tuple[int, ...], strange: bool, shift: int = 0) -> list[torch.nn.Parameter]:
    """Parameters; shift: they begin so many elements after the start of their memory."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for numel in sizes:
        values = torch.randn(numel, generator=generator)
        if strange and numel > 20:
            values[3], values[5], values[7], values[9] = math.inf, math.nan, -math.inf, 0.0
        memory = torch.empty(numel + shift, dtype=dtype)
        found.append(torch.nn.Parameter(memory[shift:].copy_(values)))
    return found


def train(optimizer: Any, params: list[Any], dtype: torch.dtype, steps: range, strange: bool = False) -> None:
    """Steps with seeded gradients; every fourth is left out, so that step counts differ."""
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for index, param in enumerate(params):
            grad = torch.randn(param.shape, generator=generator)
            if strange and param.numel() > 20 and step == 1:
                grad[11], grad[13], grad[15] = math.inf, math.nan, 1e30
            param.grad = None if (step + index) % 4 == 3 else grad.to(dtype)
        optimizer.step()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits, all NaN being one."""
    plain = torch.where(tensor.isnan(), torch.full_like(tensor, math.nan), tensor)
    return plain.view(torch.int32 if tensor.dtype is FP32 else torch.int16)


def differ(one: torch.Tensor, other: torch.Tensor, exact: bool) -> bool:
    """exact: the same bits, except in what torch's loop over vectors leaves over; there and otherwise, to rounding."""
    one, other = one.detach(), other.detach()
    if one.dtype != other.dtype or one.shape != other.shape:
        return True
    whole = one.numel() - one.numel() % 32 if exact else 0
    worst = WORST[one.dtype]
    return not (
        torch.equal(bits(one[:whole]), bits(other[:whole]))
        and torch.allclose(one.float(), other.float(), rtol=worst, atol=worst, equal_nan=True)
    )


def differences(where: str, left: Any, right: Any, exact: bool) -> list[str]:
    """What differs between two pairs (params, optimizer)."""
    wrong = []
    for index, (a, b) in enumerate(zip(left[0], right[0], strict=True)):
        states = left[1].state[a], right[1].state[b]
        if states[0].keys() != states[1].keys() or states[0].get("step") != states[1].get("step"):
            wrong.append(f"{where}: states of parameter {index}: {states}")
            continue
        pairs = [("param", a, b), *((key, states[0][key], states[1][key]) for key in states[0] if key != "step")]
        for key, one, other in pairs:
            if differ(one, other, exact):
                off = float((one.float() - other.float()).abs().nan_to_num(0.0).max())
                wrong.append(f"{where}: {key} of parameter {index} ({one.numel()} elements), up to {off}")
    return wrong


def builders(name: str) -> Iterator[tuple[str, Callable[[list[Any]], Any]]]:
    kinds: dict[str, tuple[dict[str, Any], ...]] = {
        "adam": (
            {"betas": (0.9, 0.99)},
            {"betas": (0.9, 0.99), "adam_w_mode": False},
            {"betas": (0.4, 0.0), "bias_correction": False, "fp32_optimizer_states": True},
        ),
        "lion": ({"betas": (0.9, 0.99)}, {"betas": (0.3, 0.0), "fp32_optimizer_states": True}),
        "lamb": (
            {"betas": (0.9, 0.99), "fp32_optimizer_states": True},
            {"eps_inside_sqrt": True, "max_coeff": 0.5, "min_coeff": 0.2},
            {"max_grad_norm": 1.5, "bias_correction": False},
        ),
    }
    for options in kinds[name]:

        def build(params: list[Any], options: dict[str, Any] = options) -> Any:
            groups = [{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.0, "lr": 0.3}]
            return CLASSES[name](groups, lr=0.05, weight_decay=0.1, **options)

        yield f"{name} {options}", build


def prepared(optimizer: Any, by_kernels: bool) -> Any:
    """The optimizer, made to use the kernels, or torch itself (not our kernels for CPUs)."""
    optimizer._on_device = by_kernels
    optimizer._native = False
    return optimizer


def compare_steps(every: bool) -> list[str]:
    """Several groups, missing gradients, every dtype, infinities and NaN, memory that is not aligned."""
    wrong = []
    for name in CLASSES:
        for (number, (label, build)), inputs in itertools.product(enumerate(builders(name)), INPUTS):
            if number and inputs is not INPUTS[1] and not every:
                continue
            dtype, strange, shift = inputs
            where, found = f"{label} {dtype} strange={strange} shift={shift}", []
            for by_kernels in (False, True):
                params = made(dtype, SIZES, strange, shift)
                optimizer = prepared(build(params), by_kernels)
                train(optimizer, params, dtype, range(3), strange)
                found.append((params, optimizer))
            wrong += differences(where, *found, exact=name != "lamb")
            if name == "lamb":
                ratios = [torch.tensor(optimizer.get_lamb_coeffs()) for _, optimizer in found]
                if not torch.allclose(*ratios, rtol=WORST[dtype], equal_nan=True) or not len(ratios[0]):
                    wrong.append(f"{where}: ratios {ratios}")
    return wrong


def check_boundary() -> list[str]:
    """`update_from`: masters from gradients that lie elsewhere, scaled by a number or a tensor, with rounded copies."""
    wrong = []
    kinds = (BF16, BF16), (FP32, BF16), (FP16, FP16), (BF16, None)
    for name, (grad_dtype, out_dtype) in itertools.product(("adam", "lion"), kinds):
        found: list[Any] = []
        for by_kernels in (False, True):
            params = made(FP32, SIZES, False)
            optimizer = prepared(next(builders(name))[1](params), by_kernels)
            outs = [None if out_dtype is None else torch.empty(p.numel(), dtype=out_dtype) for p in params]
            for step in range(2):
                generator = torch.Generator().manual_seed(step)
                grads = [torch.randn(p.numel(), generator=generator).to(grad_dtype) for p in params]
                rows = list(zip(params, grads, outs, strict=True))
                if by_kernels and not optimizer.takes_rows(rows):
                    wrong.append(f"takes_rows {name} {grad_dtype}")
                scale = 0.37 if step or not by_kernels else torch.tensor(0.37)
                optimizer.update_from(rows, scale)
            found.append((params, optimizer, outs))
        wrong += differences(f"update_from {name} {grad_dtype}", found[0], found[1], True)
        for param, out in zip(found[1][0], found[1][2], strict=True):
            if out is not None and not torch.equal(bits(out), bits(param.detach().to(out.dtype))):
                wrong.append(f"copies of {name} {out_dtype}, {param.numel()} elements")
    return wrong


def check_saved() -> list[str]:
    """A run that is saved and loaded goes on with the same bits, states in fp32 beside bf16 parameters."""
    wrong = []
    for name in CLASSES:
        params = made(BF16, SIZES, False)
        _, build = next(builders(name))
        optimizer = prepared(build(params), True)
        train(optimizer, params, BF16, range(2))
        others = copy.deepcopy(params)
        resumed = prepared(build(others), True)
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for pair in ((optimizer, params), (resumed, others)):
            train(*pair, BF16, range(2, 4))
        wrong += differences(f"resumed {name}", (params, optimizer), (others, resumed), True)
    return wrong


def check_table() -> list[str]:
    """When tables are sent again; one launch for many tiny tensors; what the kernels must not get."""
    from deepspeed.ops import multi_tensor_triton

    wrong = []
    params = made(FP32, (5,) * 40, False)
    optimizer = prepared(FusedAdam(params, lr=0.05), True)
    launched: list[int] = []
    plain = multi_tensor_triton.adam
    multi_tensor_triton.adam = lambda batch, numbers: launched.append(batch.count) or plain(batch, numbers)
    for param in params:
        param.grad = torch.ones(5)
    version = params[0]._version
    expected = ((lambda: None, 1), (lambda: None, 1), (lambda: setattr(params[7], "grad", torch.ones(5)), 2))
    for change, uploads in expected:
        change()
        optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.step()
        if optimizer._cache.uploads != uploads:
            wrong.append(f"{optimizer._cache.uploads} uploads, expected {uploads}")
    if launched != [40] * 3 or params[0]._version <= version:
        wrong.append(f"launches {launched}, version {params[0]._version}")

    # A kind of its own each: dtypes, and what torch has to do (fp64, strides, states of another kind).
    mixed = [*made(BF16, (6, 40), False), *made(FP32, (9,), False), *made(torch.float64, (4,), False)]
    mixed.append(torch.nn.Parameter(torch.randn(6, 4).t()))
    plain_mixed = copy.deepcopy(mixed)
    found = []
    for by_kernels, chosen in ((False, plain_mixed), (True, mixed)):
        optimizer = prepared(FusedAdam(chosen, lr=0.05), by_kernels)
        launched.clear()
        for step in range(2):
            for index, param in enumerate(chosen):
                generator = torch.Generator().manual_seed(10 * step + index)
                param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
            optimizer.step()
        found.append([param.detach().float() for param in chosen])
    wrong += [f"mixed {i}" for i, pair in enumerate(zip(*found, strict=True)) if not torch.allclose(*pair, rtol=1e-2)]
    if launched != [2, 1] * 2:
        wrong.append(f"launches of a mixture: {launched}")
    multi_tensor_triton.adam = plain

    wrong += check_sizes()
    return wrong


def check_sizes() -> list[str]:
    """A row whose tensors differ in size is refused, whatever its place."""
    wrong = []
    table = multi_tensor.DeviceTable("fused_adam", multi_tensor.Cache())
    table.add_rule((0.1, 0.9, 0.99, 1e-8, 0.0, 1.0, 1.0, 1))
    column = [torch.zeros(4)]
    for places in range(1, 4):
        columns = [column if place != places else [torch.zeros(3)] for place in range(4)]
        try:
            table.extend(columns[0], columns[1], columns[2:], None, [0])
            wrong.append(f"a tensor of another size in column {places} was taken")
        except ValueError:
            pass
    return wrong


def check_far_offsets() -> list[str]:
    """Elements beyond 2^31: a table whose tensor begins that far before the memory that is touched."""
    from deepspeed.ops import multi_tensor_triton

    chunks = (1 << 31) // CHUNK + 3
    far, count = chunks * CHUNK, 150
    tensors = [torch.full((count,), value) for value in (1.0, 0.5, 0.0, 0.0)]
    expected = [tensor.clone() for tensor in tensors]
    rows = [tensor.data_ptr() - 4 * far for tensor in tensors] + [0, far + count, 0, -chunks]
    batch = multi_tensor.Batch(
        torch.tensor(rows), torch.zeros(1, dtype=torch.int32), 1, 1, (FP32,) * 4 + (None,), True, True
    )
    numbers, _ = multi_tensor_rules._adam_numbers((0.1, 0.9, 0.99, 1e-8, 0.1, 0.1, 0.1, 1))
    multi_tensor_triton.adam(batch, torch.tensor([[*numbers, 1.0, 0, 0, 0, 0]]))
    parameter = torch.nn.Parameter(expected[0])
    parameter.grad = expected[1]
    torch.optim.AdamW([parameter], lr=0.1, betas=(0.9, 0.99), weight_decay=0.1, fused=True).step()
    return [] if torch.allclose(tensors[0], parameter.detach()) else [f"far offsets: {tensors[0][:3]}"]


def compare(every: bool) -> list[str]:
    emulate()
    return [*compare_steps(every), *check_boundary(), *check_saved(), *check_table(), *check_far_offsets()]


def compile_ahead(arch: int, every: bool) -> list[str]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from deepspeed.ops import multi_tensor_triton as kernels

    types = {"rows": "*i64", "units": "*i32"} | dict.fromkeys(("numbers", "sums", "ratios"), "*fp32")
    mixtures = (
        (FP32, FP32, FP32, FP32, None), (FP32, BF16, FP32, FP32, BF16), (BF16, BF16, BF16, BF16, None),
        (BF16, BF16, FP32, FP32, None), (FP16, FP16, FP16, FP16, None), (FP32, FP32, FP32, FP32, BF16),
        (FP32, FP16, FP32, FP32, FP16), (FP16, FP16, FP32, FP32, None),
    )  # fmt: skip
    wrong = []
    for mixture, form, aligned in itertools.product(mixtures, (True, False), (True, False)):
        # Usually no more than one thing is unusual, and on the older devices nothing.
        usual = (mixture in mixtures[:3]) + form + aligned
        if not every and (usual < 2 or (usual == 2 and (mixture not in mixtures[:1] or arch == 80))):
            continue
        batch = multi_tensor.Batch(torch.empty(0), torch.empty(0), 1, 1, mixture, form, aligned)
        chosen = [kernels.adam_kernel] + [kernels.lion_kernel] * form
        chosen += [kernels.lamb_norms_kernel, kernels.lamb_kernel] * (mixture[4] is None)
        chosen += [kernels.lamb_ratio_kernel] * (mixture == mixtures[0] and form and aligned)
        for kernel in chosen:
            constants = kernels.constants(batch, out="OUT" in kernel.arg_names)
            constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
            signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
            if "constexpr" in {signature[name] for name in kernel.arg_names if name not in constants}:
                wrong.append(f"{kernel.__name__}: an argument that is neither memory nor a constant")
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
            options = {"num_warps": kernels.WARPS, "enable_fp_fusion": False}
            built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
            text = built.asm["ptx"]
            wide = "ld.global.v4" in text or kernel is kernels.lamb_ratio_kernel
            if f".target sm_{arch}" not in text or not built.asm["cubin"] or wide != aligned:
                wrong.append(f"{kernel.__name__} sm_{arch} {mixture} {form} {aligned}: wide={wide}")
    return wrong


if __name__ == "__main__":
    torch.manual_seed(0)
    if sys.argv[1] == "compare":
        assert os.environ.get("TRITON_INTERPRET") == "1", "the interpreter is chosen before triton is imported"
        print(json.dumps(compare("all" in sys.argv)))
    else:
        print(json.dumps(compile_ahead(int(sys.argv[2]), every="all" in sys.argv)))
