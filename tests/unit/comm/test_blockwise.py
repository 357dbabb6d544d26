"""Blockwise quantization: bounds, odd lengths, numbers that are not finite, sums, error feedback.

Each test runs in plain torch, which defines the numbers, and with the native library.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.comm import blockwise_native, blockwise_torch
from deepspeed.comm.blockwise import INT4, INT8, SMALLEST_SCALE, Packing, dequantize, quantize, sum_packed

LENGTHS = (1, 2, 15, 255, 256, 257, 511, 513, 5003)


@pytest.fixture(autouse=True, scope="module", params=("torch", "native"))
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Who does it."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(blockwise_native, "takes", lambda *_: False)
        elif blockwise_native.problem():
            pytest.skip(blockwise_native.problem())
        yield request.param


def packed_of(source: torch.Tensor, packing: Packing, **options: object) -> torch.Tensor:
    packed = torch.full((source.shape[0], packing.nbytes(source.shape[1])), 0xAB, dtype=torch.uint8)
    quantize(packed, source, packing, **options)  # type: ignore[arg-type]
    return packed


def unpacked(packed: torch.Tensor, numel: int, packing: Packing, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    output = torch.full((packed.shape[0], numel), 77.0, dtype=dtype)
    dequantize(output, packed, packing)
    return output


def steps(packed: torch.Tensor, numel: int, packing: Packing) -> torch.Tensor:
    """The scale of each element."""
    return packing.split(packed, numel)[0].repeat_interleave(packing.block, 1)[:, :numel]


def reference(source: torch.Tensor, packing: Packing) -> torch.Tensor:
    """One block after the other, in the words of the format."""
    result = torch.empty(source.shape)
    for piece, values in enumerate(source.float()):
        for start in range(0, values.numel(), packing.block):
            block = values[start : start + packing.block]
            step = max(block.abs().max() * (1.0 / packing.largest_code), torch.tensor(SMALLEST_SCALE))
            result[piece, start : start + packing.block] = (block * (1.0 / step)).round() * step
    return result


@pytest.mark.parametrize("packing", (INT8, INT4, Packing(8, 16), Packing(4, 64)))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_every_element_is_within_half_a_step(packing: Packing, dtype: torch.dtype) -> None:
    for numel in LENGTHS:
        source = torch.randn(3, numel).mul(torch.logspace(-3, 3, numel)).to(dtype)
        packed = packed_of(source, packing)
        output = unpacked(packed, numel, packing)
        assert torch.equal(output, reference(source, packing)), numel
        # The inverse of the step is rounded once: 1e-5 of a step.
        assert ((output - source.float()).abs() <= steps(packed, numel, packing) * 0.50001).all(), numel
        rounded = unpacked(packed, numel, packing, dtype)
        assert torch.equal(rounded, output.to(dtype)), numel


@given(
    bits=st.sampled_from((4, 8)),
    block=st.sampled_from((16, 32, 256)),
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=100),
)
@settings(max_examples=150, deadline=None)
def test_the_bound_holds_for_any_finite_numbers(bits: int, block: int, values: list[float]) -> None:
    packing = Packing(bits, block)
    source = torch.tensor([values])
    packed = packed_of(source, packing)
    # In fp64: the largest finite fp32 may come out one rounding above it.
    scales, _ = packing.split(packed, len(values))
    step = scales.double().repeat_interleave(block, 1)[:, : len(values)]
    output = unpacked(packed, len(values), packing).double()
    finite = output.isfinite()
    assert (finite | (source.abs() > 3.4e38)).all()
    assert ((output - source.double()).abs()[finite] <= (step * 0.50001)[finite]).all()


@pytest.mark.parametrize("packing", (INT8, INT4))
def test_blocks_of_zeros_and_of_subnormals(packing: Packing) -> None:
    source = torch.zeros(1, 600)
    source[0, 256:512] = 1e-44
    output = unpacked(packed_of(source, packing), 600, packing)
    assert (output[0, :256] == 0).all()
    assert (output[0, 512:] == 0).all()
    assert ((output - source).abs() <= SMALLEST_SCALE / 2).all()


@pytest.mark.parametrize("packing", (INT8, INT4))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("strange", (math.inf, -math.inf, math.nan))
def test_a_number_that_is_not_finite_spoils_its_block_and_no_other(
    packing: Packing, dtype: torch.dtype, strange: float
) -> None:
    for place in (0, 200, 255, 256, 599):
        source = torch.randn(1, 600).to(dtype)
        source[0, place] = strange
        output = unpacked(packed_of(source, packing), 600, packing, dtype)
        spoiled = slice(place // 256 * 256, place // 256 * 256 + 256)
        assert output[0, spoiled].isnan().all()
        output[0, spoiled] = 0
        assert output.isfinite().all()


def test_the_format_has_the_promised_size() -> None:
    assert INT8.nbytes(1 << 20) == (1 << 20) + 4 * 4096
    assert INT4.nbytes(1 << 20) == (1 << 19) + 4 * 4096
    assert INT4.nbytes(1) == 8
    assert INT8.nbytes(257) == 268
    assert INT8.nbytes(0) == 0


@pytest.mark.parametrize("packing", (INT8, INT4))
def test_pieces_may_lie_apart_and_chunks_do_not_show(packing: Packing, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.randn(2, 3, 1300)
    apart = whole[:, 1, :]
    packed = packed_of(apart, packing)
    assert torch.equal(packed, packed_of(apart.clone(), packing))
    monkeypatch.setattr(blockwise_torch, "CHUNK_NUMEL", 512)
    assert torch.equal(packed, packed_of(apart, packing))
    into = torch.zeros(2, 3, 1300)
    dequantize(into[:, 2, :], packed, packing)
    assert torch.equal(into[:, 2, :], unpacked(packed, 1300, packing))
    assert (into[:, :2, :] == 0).all()


@pytest.mark.parametrize("packing", (INT8, INT4))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("place", (0, 1, 2))
def test_sums_run_in_rank_order_with_the_own_part_exact(packing: Packing, dtype: torch.dtype, place: int) -> None:
    numel = 700
    others = [torch.randn(2, numel) for _ in range(2)]
    own = torch.randn(2, numel).to(dtype)
    parts = torch.stack([packed_of(other, packing) for other in others])
    ordered = [unpacked(part, numel, packing) for part in parts]
    ordered.insert(place, own.float())
    total = (ordered[0] + ordered[1]) + ordered[2]
    before = torch.randn(2, numel).to(dtype)
    output = before.clone()
    sum_packed(output, parts, packing, own=own, own_place=place, scale=0.3)
    assert torch.equal(output, (total * 0.3).to(dtype))
    output = before.clone()
    sum_packed(output, parts, packing, own=own, own_place=place, accumulate=True)
    assert torch.equal(output, (total + before.float()).to(dtype))


@pytest.mark.parametrize("packing", (INT8, INT4))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_error_feedback_sends_later_what_was_lost(packing: Packing, dtype: torch.dtype) -> None:
    source = torch.randn(1, 700)
    error = torch.zeros(1, 700, dtype=dtype)
    sent, without = torch.zeros(1, 700), torch.zeros(1, 700)
    rounds = 50
    for _ in range(rounds):
        sent += unpacked(packed_of(source, packing, error=error, err_beta=0.5), 700, packing)
        without += unpacked(packed_of(source, packing), 700, packing)
    plain = (without / rounds - source).abs().max()
    with_feedback = (sent / rounds - source).abs().max()
    assert with_feedback < plain / 5


def test_the_kept_error_is_the_moving_average_of_the_losses() -> None:
    source = torch.randn(1, 300)
    error = torch.randn(1, 300) * 0.01
    before = error.clone()
    packed = packed_of(source, INT4, error=error, err_beta=0.8)
    lost = source + before - unpacked(packed, 300, INT4)
    torch.testing.assert_close(error, 0.8 * before + 0.2 * lost, rtol=0, atol=1e-6)


def test_an_overflow_leaves_no_error_behind() -> None:
    source = torch.randn(1, 600)
    source[0, 300] = math.inf
    error = torch.full((1, 600), 0.01)
    packed_of(source, INT4, error=error, err_beta=0.5)
    assert (error[0, 256:512] == 0).all()
    assert (error[0, :256] != 0).any()
    assert error.isfinite().all()


def test_wrong_arguments_say_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"bits=3; .* 4 or 8"):
        Packing(3)
    with pytest.raises(ValueError, match=r"block=100; .* power of two"):
        Packing(8, 100)
    with pytest.raises(ValueError, match=r"found torch.int64; float32, bfloat16 and float16"):
        packed_of(torch.zeros(1, 5, dtype=torch.int64), INT8)
    with pytest.raises(ValueError, match=r"uint8 tensor of shape \(1, 12\); found torch.uint8 of shape \(1, 13\)"):
        quantize(torch.zeros(13, dtype=torch.uint8), torch.zeros(7), INT8)
    with pytest.raises(ValueError, match="next to each other"):
        quantize(torch.zeros(12, dtype=torch.uint8), torch.zeros(14)[::2], INT8)
    with pytest.raises(ValueError, match=r"error must be .* shape \(1, 7\) .* found torch.float32 of shape \(1, 6\)"):
        packed_of(torch.zeros(1, 7), INT8, error=torch.zeros(1, 6))
    with pytest.raises(ValueError, match=r"the error must be contiguous; found strides \(14, 1\)"):
        packed_of(torch.zeros(2, 7), INT8, error=torch.zeros(2, 14)[:, :7])
    with pytest.raises(ValueError, match=r"^dequantize: 1 pieces of 7 elements, packed"):
        dequantize(torch.zeros(7), torch.zeros(13, dtype=torch.uint8), INT8)
    with pytest.raises(ValueError, match=r"^dequantize: found torch.int64"):
        dequantize(torch.zeros(7, dtype=torch.int64), torch.zeros(12, dtype=torch.uint8), INT8)
    packed = packed_of(torch.zeros(1, 7), INT8)[None]
    with pytest.raises(ValueError, match=r"own must be .* shape \(1, 7\) .* found torch.float32 of shape \(1, 8\)"):
        sum_packed(torch.zeros(1, 7), packed, INT8, own=torch.zeros(1, 8), own_place=0)
    with pytest.raises(ValueError, match=r"own must have the elements of a piece next to each other"):
        sum_packed(torch.zeros(1, 7), packed, INT8, own=torch.zeros(1, 14)[:, ::2], own_place=0)
