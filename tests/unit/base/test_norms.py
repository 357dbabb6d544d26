"""Norms have one definition: float32, all elements, repeated parameters once, -1 for not finite."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.runtime import utils
from deepspeed.runtime.utils import norms
from deepspeed.utils import groups

INF = float("inf")


def parameters(*shapes: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    made = [nn.Parameter(torch.randn(*shape, generator=generator).to(dtype)) for shape in shapes]
    for param in made:
        param.grad = torch.randn(param.shape, generator=generator).to(dtype)
    return made


def copies(params: list[nn.Parameter]) -> list[nn.Parameter]:
    made = [nn.Parameter(param.detach().clone()) for param in params]
    for mine, theirs in zip(made, params, strict=True):
        mine.grad = None if theirs.grad is None else theirs.grad.clone()
    return made


@pytest.mark.parametrize("norm_type", (1, 2, 3, INF))
@pytest.mark.parametrize("max_norm", (0.5, 1e6))
def test_clipping_equals_torchs(norm_type: float, max_norm: float) -> None:
    mine = parameters((3, 4), (5,), (0,))
    mine.append(nn.Parameter(torch.ones(2)))  # no gradient
    theirs = copies(mine)
    norm = utils.clip_grad_norm_(mine, max_norm, norm_type)
    expected = torch.nn.utils.clip_grad_norm_([p for p in theirs if p.numel()], max_norm, norm_type)
    # torch multiplies the same way; the sums may be taken in another order.
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=0)
    assert norm.dtype == torch.float32


def test_clipping_one_tensor_and_none() -> None:
    (param,) = parameters((4,))
    expected = float(param.grad.norm())
    assert float(utils.clip_grad_norm_(param, 1e9)) == pytest.approx(expected, rel=1e-6)
    assert float(utils.clip_grad_norm_([], 1.0)) == 0.0


def test_low_precision_gradients_are_summed_in_float32() -> None:
    (param,) = parameters((4096,), dtype=torch.bfloat16)
    param.grad.fill_(0.01)
    exact = math.sqrt(4096) * float(torch.tensor(0.01, dtype=torch.bfloat16))
    assert float(utils.clip_grad_norm_([param], 1e9)) == pytest.approx(exact, rel=1e-6)


class Unit:
    """Model-parallel unit whose group is the world."""

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size()

    def get_model_parallel_group(self) -> Any:
        return dist.group.WORLD


def split_model() -> tuple[list[nn.Parameter], list[torch.Tensor]]:
    """This rank's parameters (one split, one repeated) and the gradients of the whole model."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole, repeated = parameters((6, 2), (3,), seed=1)
    assert whole.grad is not None
    assert repeated.grad is not None
    split = nn.Parameter(whole.detach().chunk(size)[rank].clone())
    split.grad = whole.grad.chunk(size)[rank].clone()
    split.model_parallel = True  # type: ignore[attr-defined]
    return [split, repeated], [whole.grad.clone(), repeated.grad.clone()]


def norms_of_a_split_model(norm_type: float) -> list[float]:
    params, grads = split_model()
    mpu = Unit()
    flat = torch.cat([grad.flatten() for grad in grads])
    exact = float(torch.linalg.vector_norm(flat, norm_type))
    found = float(utils.clip_grad_norm_(params, 0.5, norm_type, mpu=mpu))
    factor = 0.5 / (exact + 1e-6)
    rows = grads[0].chunk(dist.get_world_size())[dist.get_rank()]
    errors = [
        found / exact - 1,
        float((params[0].grad - rows * factor).abs().max()),
        float((params[1].grad - grads[1] * factor).abs().max()),
    ]
    return [abs(error) for error in errors]


@pytest.mark.parametrize("world", (2, 3))
def test_split_parameters_add_up_and_repeated_ones_count_once(pool: Any, world: int) -> None:
    for norm_type in (2.0, INF):
        for errors in pool.run(world, norms_of_a_split_model, norm_type):
            assert max(errors) < 1e-6


def counts_of_a_split_model() -> tuple[float, float, float, float]:
    params, _ = split_model()
    for param in params:
        assert param.grad is not None
        param.grad.zero_()
    mpu = Unit()
    zeros = utils.get_grad_zeros(params, mpu)
    weights = utils.get_weight_norm(params, mpu=mpu)
    exact = float(torch.cat([p.detach().flatten() for p in parameters((6, 2), (3,), seed=1)]).norm())
    tensors = utils.get_global_norm_of_tensors([torch.full((2,), float(dist.get_rank()))], mpu=mpu)
    clipped = [torch.ones(2)]
    utils.clip_tensors_by_global_norm(clipped, max_norm=1.0, mpu=mpu)
    return zeros, weights - exact, float(tensors), float(clipped[0][0])


@pytest.mark.world(3)
def test_zeros_weights_and_lists_over_model_parallel_ranks(ranks: Any) -> None:
    for zeros, weight_error, tensors, clipped in ranks(counts_of_a_split_model):
        assert zeros == 15
        assert abs(weight_error) < 1e-5
        assert tensors == pytest.approx(math.sqrt(2 * 1 + 2 * 4), rel=1e-6)
        assert clipped == pytest.approx(1 / math.sqrt(6), rel=1e-5)


def test_flat_gradients_with_masked_ranges() -> None:
    flat = nn.Parameter(torch.zeros(6))
    flat.grad = torch.tensor([3.0, 100.0, 100.0, 4.0, 100.0, 0.0])
    other = nn.Parameter(torch.zeros(1))
    other.grad = torch.tensor([12.0])
    masks = [torch.tensor([[1, 3], [4, 5]]), []]
    assert utils.get_flattened_grad_norm([flat, other], grad_norm_mask=masks) == pytest.approx(13.0)
    assert flat.grad.tolist() == [3.0, 100.0, 100.0, 4.0, 100.0, 0.0]
    assert utils.get_flattened_grad_norm(other) == pytest.approx(12.0)


@pytest.mark.parametrize("bad", (INF, float("nan")))
def test_not_finite_is_marked(bad: float) -> None:
    param = nn.Parameter(torch.tensor([1.0, bad]))
    param.grad = param.detach().clone()
    assert utils.get_weight_norm([param]) == utils.get_flattened_grad_norm([param]) == -1
    assert utils.get_global_norm_of_tensors([param.detach()]) == -1
    assert utils.has_inf_or_nan(param.grad)
    assert not utils.has_inf_or_nan(torch.ones(3))
    assert [utils.is_invalid_grad_norm(n) for n in (bad, -1.0, torch.tensor(bad), 0.0, 5.0)] == [True] * 3 + [False] * 2
    tensor = torch.tensor([1.0, bad, 2.0])
    utils.mask_nan_or_inf_with_val_inplace(tensor)
    assert tensor.tolist() == [1.0, -1.0, 2.0]
    single = torch.tensor(bad)
    utils.mask_nan_or_inf_with_val_inplace(single, device="cpu", val=7.0)
    assert single.item() == 7.0
    clipped = [torch.ones(2)]
    assert utils.clip_tensors_by_global_norm(clipped, global_norm=bad) is bad
    assert clipped[0].tolist() == [1.0, 1.0]


def test_lists_of_tensors() -> None:
    tensors = [torch.ones(4) * 3]
    assert utils.clip_tensors_by_global_norm(tensors, max_norm=1.0) == pytest.approx(6.0)
    assert tensors[0].tolist() == pytest.approx([0.5] * 4, rel=1e-5)
    assert utils.clip_tensors_by_global_norm(tensors, max_norm=1.0, global_norm=0.5) == 0.5
    assert tensors[0].tolist() == pytest.approx([0.5] * 4, rel=1e-5)
    assert utils.get_global_norm_of_tensors([torch.ones(2) * -7], norm_type=INF) == 7
    assert utils.get_global_norm_of_tensors([]) == 0
    assert utils.get_global_norm([3.0, torch.tensor(4.0)]) == 5.0


def test_combining_groups() -> None:
    assert utils.combine_grad_norm_groups([torch.tensor(3.0), torch.tensor(4.0)]) == 5
    assert utils.combine_grad_norm_groups([torch.tensor(3.0), torch.tensor(4.0)], norm_type=INF) == 4
    assert utils.combine_grad_norm_groups([torch.tensor(3.0), torch.tensor(-1.0)]) == INF
    assert utils.combine_grad_norm_groups([]) == 0


def moe_norms() -> tuple[float, float]:
    groups._get_expert_parallel_group = lambda name: dist.group.WORLD  # the group of every expert
    experts = {"ep_size_2": [torch.full((2,), 1.0 + dist.get_rank())]}
    whole = float(utils.get_norm_with_moe_layers(2.0, None, experts))
    return whole, utils.get_norm_with_moe_layers_fast(torch.tensor(1.0 + dist.get_rank()), None)


def test_experts_add_up_over_their_group(ranks: Any) -> None:
    for whole, mean in ranks(moe_norms):
        assert whole == pytest.approx(math.sqrt(4 + 2 * 1 + 2 * 4), rel=1e-6)
        assert mean == pytest.approx(1.5)


def test_model_parallel_mark() -> None:
    param = nn.Parameter(torch.ones(1))
    assert not utils.is_model_parallel_parameter(param)
    for name in ("model_parallel", "tensor_model_parallel"):
        marked = nn.Parameter(torch.ones(1))
        setattr(marked, name, True)
        assert utils.is_model_parallel_parameter(marked)
    assert norms.NOT_FINITE == -1
