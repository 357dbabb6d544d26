"""The C++ kernels of blockwise quantization: torch's bits, instruction sets, odd memory, the choice."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator

import pytest
import torch

from deepspeed.comm import blockwise, blockwise_native, blockwise_torch
from deepspeed.comm.blockwise import INT4, INT8, Packing, dequantize, quantize, sum_packed
from deepspeed.native import build, isa
from deepspeed.native.build import find_compiler
from deepspeed.ops.registry import OPS

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler here")
RUNNABLE = [variant.name for variant in isa.ISAS if isa.runnable(variant)]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (1, 2, 15, 16, 17, 255, 256, 257, 300, 511, 513, 5003)


@pytest.fixture
def chosen_anew() -> Iterator[None]:
    """What the process knows about the library is forgotten before and after."""

    def forget() -> None:
        blockwise_native.library.cache_clear()
        blockwise_native.problem.cache_clear()

    forget()
    yield
    forget()


@pytest.fixture
def native() -> None:
    if blockwise_native.problem():
        pytest.skip(blockwise_native.problem())


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal bits, but for which NaN a NaN is."""
    nan = left.isnan()
    signs = torch.equal(left.signbit() | nan, right.signbit() | nan)
    return torch.equal(nan, right.isnan()) and signs and torch.equal(left.nan_to_num(0.0), right.nan_to_num(0.0))


def strange(source: torch.Tensor) -> torch.Tensor:
    """Numbers that are special in some way put among the others."""
    numel = source.shape[1]
    source[0, numel // 2], source[-1, numel - 1], source[-1, 0] = math.inf, math.nan, -0.0
    if numel > 600:
        source[-1, 300] = torch.finfo(source.dtype).max
        source[0, 256:512] = 1e-44
    return source


def differences(packing: Packing, numel: int, dtype: torch.dtype, error_dtype: torch.dtype | None) -> list[str]:
    """What the library does otherwise than plain torch."""
    wrong = []
    for spoiled in (False, True):
        where = f"{packing} {numel} {dtype} error {error_dtype} {'strange numbers' if spoiled else ''}"
        source = torch.randn(2, 3, numel).mul_(torch.logspace(-3, 3, numel)).to(dtype)[:, 1, :]
        if spoiled:
            strange(source)
        packed = [torch.full((2, packing.nbytes(numel)), 0xAB, dtype=torch.uint8) for _ in range(2)]
        error = None if error_dtype is None else (torch.randn(2, numel) * 0.1).to(error_dtype)
        errors = [None if error is None else error.clone() for _ in range(2)]
        blockwise_torch.quantize(packed[0], source, packing, errors[0], 0.7)
        blockwise_native.quantize(packed[1], source, packing, errors[1], 0.7)
        scales, others = (packing.split(one, numel)[0] for one in packed)
        if not same(scales, others):
            wrong.append(f"scales {where}")
        if not torch.equal(*(one[:, 4 * packing.blocks(numel) :] for one in packed)):  # and nothing behind the codes
            wrong.append(f"codes {where}")
        if errors[0] is not None and errors[1] is not None and not same(errors[0], errors[1]):
            wrong.append(f"kept error {where}")
        parts = torch.stack(packed)
        for place, accumulate in itertools.product((-1, 0, 1, 2), (False, True)):
            own = None if place < 0 else torch.randn(2, 2, numel)[:, 1].to(error_dtype or dtype)
            sums = [torch.full((2, 3, numel), 0.7, dtype=dtype)[:, 2] for _ in range(2)]
            blockwise_torch.sum_packed(sums[0], parts, packing, own, place, 0.3, accumulate)
            blockwise_native.sum_packed(sums[1], parts, packing, own, place, 0.3, accumulate)
            if not same(*sums):
                wrong.append(f"sum, own at {place}, accumulate={accumulate}, {where}")
    return wrong


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("packing", (INT8, INT4, Packing(8, 16), Packing(4, 4096)), ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bits_are_those_of_plain_torch(packing: Packing, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for numel, error_dtype in itertools.product(LENGTHS, (None, torch.float32, dtype)):
        assert differences(packing, numel, dtype, error_dtype) == []


@needs_compiler
@pytest.mark.usefixtures("chosen_anew")
@pytest.mark.parametrize("variant", RUNNABLE[1:])
def test_every_instruction_set_this_cpu_has(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ISA", variant)
    assert blockwise_native.problem() == ""
    for packing, dtype in itertools.product((INT8, INT4), FLOATS):
        assert differences(packing, 1003, dtype, torch.bfloat16) == []


@pytest.mark.usefixtures("native")
def test_tensors_at_odd_addresses() -> None:
    def odd(values: torch.Tensor) -> torch.Tensor:
        memory = bytearray(values.nbytes + 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tensor = torch.frombuffer(memory, dtype=values.dtype, offset=1, count=values.numel())
        assert tensor.data_ptr() % 2
        return tensor.view(values.shape).copy_(values)

    for packing, dtype in itertools.product((INT8, INT4), FLOATS):
        source, error = torch.randn(2, 1001).to(dtype), torch.randn(2, 1001).to(dtype)
        packed = torch.zeros(2, packing.nbytes(1001), dtype=torch.uint8)
        moved = [odd(tensor) for tensor in (packed, source, error)]
        blockwise_native.quantize(packed, source, packing, error, 0.5)
        blockwise_native.quantize(moved[0], moved[1], packing, moved[2], 0.5)
        assert torch.equal(packed, moved[0])
        assert torch.equal(error, moved[2])
        blockwise_native.sum_packed(source, packed[None], packing, error, 0, 0.5, True)
        blockwise_native.sum_packed(moved[1], moved[0][None], packing, moved[2], 0, 0.5, True)
        assert torch.equal(source, moved[1])


@pytest.mark.usefixtures("native")
def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    source = torch.randn(2, 200_003)
    found = []
    for threads in (3, 1):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        packed, error = torch.zeros(2, INT4.nbytes(200_003), dtype=torch.uint8), source.bfloat16() * 0.01
        output = torch.zeros_like(source)
        quantize(packed, source, INT4, error=error, err_beta=0.8)
        dequantize(output, packed, INT4)
        found.append((packed, error, output))
    assert all(map(torch.equal, *found))


@pytest.mark.usefixtures("native")
def test_the_output_may_be_the_own_contribution() -> None:
    own = torch.randn(1, 1000)
    parts = torch.zeros(1, 1, INT8.nbytes(1000), dtype=torch.uint8)
    quantize(parts[0], torch.randn(1, 1000), INT8)
    apart = torch.empty_like(own)
    sum_packed(apart, parts, INT8, own=own, own_place=1)
    sum_packed(own, parts, INT8, own=own, own_place=1)
    assert torch.equal(own, apart)


@pytest.mark.usefixtures("native")
def test_autograd_sees_what_was_written() -> None:
    weight = torch.ones(1, 300, requires_grad=True)
    saved = torch.ones(1, 300)
    product = (weight * saved).sum()
    packed = torch.zeros(1, INT8.nbytes(300), dtype=torch.uint8)
    quantize(packed, torch.randn(1, 300))
    dequantize(saved, packed)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    with torch.inference_mode():
        quantize(torch.zeros_like(packed), torch.randn(1, 300), error=torch.zeros(1, 300))


# ---- the choice


def way(packing: Packing, floats: torch.Tensor, others: torch.Tensor | None = None) -> str:
    return blockwise._kernels(packing, floats, others).__name__.rpartition("_")[2]


@pytest.mark.usefixtures("native")
def test_the_library_takes_plain_tensors_on_the_cpu() -> None:
    floats = torch.zeros(1, 5)
    assert way(INT8, floats) == way(INT4, torch.nn.Parameter(floats.half()), floats.bfloat16()) == "native"
    assert way(INT8, floats, floats.double()) == "torch"
    assert way(Packing(8, 8192), floats) == "torch"
    assert way(INT8, floats.to("meta")) == "torch"
    own_class: torch.Tensor = floats.as_subclass(type("Own", (torch.Tensor,), {}))
    assert way(INT8, own_class) == "torch"
    largest = blockwise_native.library().ds_blockwise_largest_block()
    assert largest == blockwise_native._LARGEST_BLOCK


@pytest.mark.usefixtures("chosen_anew")
@pytest.mark.parametrize(
    ("variable", "value"),
    (
        ("DS_SKIP_BLOCKWISE", "1"),
        ("DS_BUILD_BLOCKWISE", "0"),
        ("DS_SKIP_BLOCKWISE_QUANTIZER", "1"),
        ("DS_BUILD_OPS", "0"),
    ),
)
def test_without_the_library_plain_torch_serves_and_the_reason_is_known(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setenv(variable, value)
    assert way(INT8, torch.zeros(1, 5)) == "torch"
    assert f"{variable}={value} is set" in blockwise_native.problem()
    packed, output = torch.zeros(INT4.nbytes(5), dtype=torch.uint8), torch.empty(5)
    quantize(packed, torch.tensor([7.0, 1, 2, 3, -7]), INT4)
    dequantize(output, packed, INT4)
    assert output.tolist() == [7.0, 1, 2, 3, -7]
    ways = [(found.name, problem) for found, problem in OPS[blockwise_native.OP].candidates()]
    assert [name for name, _ in ways] == ["native kernel", "Triton kernels", "torch operations"]
    assert f"{variable}={value} is set" in ways[0][1]
    assert ways[2][1] == ""
    assert capfd.readouterr() == ("", "")


def test_a_library_that_cannot_be_built_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said = "no C++ compiler found, this time"
    monkeypatch.setattr(blockwise_native, "problem", lambda: said)
    for _ in range(2):
        packed = torch.zeros(INT8.nbytes(7), dtype=torch.uint8)
        blockwise.quantize(packed, torch.ones(7), INT8)
    lines = [record for record in caplog.records if said in record.getMessage()]
    assert [record.levelname for record in lines] == ["WARNING"]
    monkeypatch.setattr(blockwise_native, "problem", lambda: "switched off by the user")
    monkeypatch.setenv("DS_SKIP_BLOCKWISE", "1")
    blockwise.quantize(packed, torch.ones(7), INT8)
    assert "switched off by the user" not in caplog.text
