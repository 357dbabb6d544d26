"""Muon: the orthogonalisation, the update, groups, tags."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.runtime.config_problems import DeepSpeedConfigError
from deepspeed.runtime.zero.muon import original_muon
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
from deepspeed.runtime.zero.muon.newton_schulz import (
    ns_compute_dtype,
    zeropower_via_gram_newtonschulz,
    zeropower_via_newtonschulz5,
)
from deepspeed.runtime.zero.muon.original_muon import (
    SingleDeviceMuon,
    SingleDeviceMuonWithAuxAdam,
    adam_update,
    muon_update,
)
from deepspeed.runtime.zero.muon.tagging import set_optimizer_flags, split_muon_groups
from tests.unit.optim.optim_cases import assert_same_bits, parameters, train


def reference_polar(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """The quintic applied to singular values, in fp64."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / (matrix.double().norm() + 1e-7)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ vh


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", ((8, 12), (12, 8), (5, 5), (1, 9), (64, 3)))
@pytest.mark.parametrize("steps", (1, 5))
def test_gram_form_is_the_polynomial_of_the_singular_values(shape: tuple[int, int], steps: int) -> None:
    matrix = random(*shape)
    # Five fp32 steps of products of a matrix of norm about 1.
    torch.testing.assert_close(
        zeropower_via_gram_newtonschulz(matrix, steps).double(), reference_polar(matrix, steps), rtol=0, atol=2e-5
    )


@pytest.mark.parametrize("shape", ((8, 12), (12, 8)))
def test_standard_form_is_bf16_and_near_the_polynomial(shape: tuple[int, int]) -> None:
    matrix = random(*shape)
    result = zeropower_via_newtonschulz5(matrix, 5)
    assert result.dtype == torch.bfloat16 == ns_compute_dtype("standard")
    # bf16 has 8 bits; an error of 2^-8 in a singular value grows up to threefold a step while it is small.
    torch.testing.assert_close(result.double(), reference_polar(matrix, 5), rtol=0, atol=0.08)


def test_result_is_nearly_semi_orthogonal_even_from_a_badly_scaled_matrix() -> None:
    matrix = random(16, 40) * torch.logspace(-2, 2, 16)[:, None]
    values = torch.linalg.svdvals(zeropower_via_gram_newtonschulz(matrix, 10))
    assert float(values.min()) > 0.65
    assert float(values.max()) < 1.25


def test_zero_stays_zero_and_batches_are_independent() -> None:
    assert zeropower_via_gram_newtonschulz(torch.zeros(3, 4), 5).abs().max() == 0
    batch = torch.stack([random(6, 4, seed=1), 1e3 * random(6, 4, seed=2)])
    for many in (zeropower_via_gram_newtonschulz, zeropower_via_newtonschulz5):
        for one, alone in zip(many(batch, 5), batch, strict=True):
            # Batched products may add in another order than single ones.
            atol = 1e-4 if one.dtype == torch.float32 else 0.05
            torch.testing.assert_close(one.float(), many(alone, 5).float(), rtol=0, atol=atol)


@pytest.mark.parametrize("nesterov", (True, False))
def test_update_advances_momentum_and_scales_tall_matrices(nesterov: bool) -> None:
    grad, momentum = random(12, 3, seed=4), random(12, 3, seed=5)
    old_grad, old = grad.clone(), momentum.clone().double()
    direction = muon_update(grad, momentum, beta=0.9, nesterov=nesterov)
    expected_momentum = 0.9 * old + 0.1 * grad.double()
    torch.testing.assert_close(momentum.double(), expected_momentum, rtol=1e-6, atol=1e-7)  # fp32 against fp64
    ahead = 0.1 * grad.double() + 0.9 * expected_momentum if nesterov else expected_momentum
    torch.testing.assert_close(direction.double(), reference_polar(ahead, 5) * 2, rtol=0, atol=5e-5)
    assert torch.equal(grad, old_grad)


def test_update_of_heads_experts_and_filters() -> None:
    grad = random(8, 12)
    heads = muon_update(grad, torch.zeros(8, 12), num_heads=2)
    for block, rows in zip(heads.split(4), grad.split(4), strict=True):
        torch.testing.assert_close(block, muon_update(rows, torch.zeros(4, 12)), rtol=0, atol=1e-5)
    experts = random(3, 6, 4)
    for one, g in zip(muon_update(experts, torch.zeros(3, 6, 4), is_expert_group=True), experts, strict=True):
        torch.testing.assert_close(one, muon_update(g, torch.zeros(6, 4)), rtol=0, atol=1e-5)
    filters = random(8, 3, 2, 2)
    flat = muon_update(filters.view(8, 12), torch.zeros(8, 12))
    assert torch.equal(muon_update(filters, torch.zeros(8, 3, 2, 2)).view(8, 12), flat)


def test_update_refuses_what_has_no_direction() -> None:
    with pytest.raises(ValueError, match=r"shape \(6,\).*use_muon = False"):
        muon_update(torch.ones(6), torch.zeros(6))
    with pytest.raises(ValueError, match="8 rows do not split into num_heads = 3"):
        muon_update(random(8, 4), torch.zeros(8, 4), num_heads=3)
    with pytest.raises(ValueError, match=r"ns_method = 'cubic'.*gram.*standard"):
        muon_update(random(8, 4), torch.zeros(8, 4), ns_method="cubic")
    with pytest.raises(ValueError, match="experts, rows, cols"):
        muon_update(random(8, 4), torch.zeros(8, 4), is_expert_group=True)


def test_adam_direction_is_the_bias_corrected_one() -> None:
    buf1, buf2 = torch.zeros(2), torch.zeros(2)
    g = torch.tensor([0.5, -3.0])
    # fp32 rounding of (1 - beta) g / (1 - beta).
    torch.testing.assert_close(adam_update(g, buf1, buf2, 1, (0.9, 0.99), 0.0), torch.sign(g), rtol=1e-6, atol=0)
    adam_update(g * 2, buf1, buf2, 2, (0.9, 0.99), 0.0)
    torch.testing.assert_close(buf1, g * (0.1 * 0.9 + 0.2), rtol=1e-6, atol=0)


def groups(params: list[Any], **muon: Any) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in params if p.ndim == 2], "use_muon": True, "lr": 0.02, "weight_decay": 0.1, **muon},
        {"params": [p for p in params if p.ndim != 2], "use_muon": False, "lr": 0.01, "weight_decay": 0.1},
    ]


def test_step_follows_the_formula_and_skips_missing_gradients() -> None:
    params = parameters(shapes=((6, 4), (4, 6), (5,)))
    optimizer = SingleDeviceMuonWithAuxAdam(groups(params))
    params[0].grad = random(6, 4)
    before = [p.detach().clone() for p in params]
    optimizer.step()
    direction = muon_update(random(6, 4), torch.zeros(6, 4))
    assert torch.equal(params[0], before[0] * (1 - 0.02 * 0.1) - direction * 0.02)
    assert torch.equal(params[1], before[1])
    assert torch.equal(params[2], before[2])
    assert set(optimizer.state[params[0]]) == {"momentum_buffer"}


def test_low_precision_parameters_are_rounded_once_and_keep_fp32_momentum() -> None:
    p = nn.Parameter(random(6, 4).bfloat16())
    before = p.detach().float()
    p.grad = random(6, 4, seed=1).bfloat16()
    optimizer = SingleDeviceMuon([p], lr=0.02, weight_decay=0.1)
    optimizer.step()
    direction = muon_update(p.grad.float(), torch.zeros(6, 4))
    assert torch.equal(p.float(), (before * (1 - 0.02 * 0.1) - direction * 0.02).bfloat16().float())
    assert optimizer.state[p]["momentum_buffer"].dtype == torch.float32


CLASSES = {
    "single": SingleDeviceMuonWithAuxAdam,
    "shared on one rank": original_muon.MuonWithAuxAdam,
    "built in": MuonWithAuxAdam,
    "built in, plain Adam": lambda g: MuonWithAuxAdam(g, adam_optimizer=torch.optim.AdamW),
}


@pytest.mark.parametrize("name", CLASSES)
def test_adam_half_equals_torch(name: str) -> None:
    ours, theirs = parameters(shapes=((6, 4), (7,), (3,))), parameters(shapes=((6, 4), (7,), (3,)))
    train(lambda p: CLASSES[name](groups(p)), ours, skip=lambda step, index: step == index)
    theirs_optimizer = torch.optim.AdamW(theirs[1:], lr=0.01, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.1)
    train(lambda p: theirs_optimizer, theirs, skip=lambda step, index: step == index)
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        # The fused kernel against torch's plain loop: a unit in the last place per step.
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("via", ("state_dict", "deepcopy"))
def test_interrupted_run_continues_to_the_last_bit(name: str, via: str) -> None:
    shapes = ((6, 4), (7,), (4, 4))
    build = lambda p: CLASSES[name](groups(p))  # noqa: E731
    unbroken, first = parameters(shapes=shapes), parameters(shapes=shapes)
    train(build, unbroken, steps=6)
    optimizer = train(build, first, steps=3)
    if via == "deepcopy":
        second, resumed = copy.deepcopy((first, optimizer))
    else:
        second = [nn.Parameter(p.detach().clone()) for p in first]
        resumed = build(second)
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(build, second, steps=3, optimizer=resumed, first=3)
    assert_same_bits(unbroken, second)


def test_rates_set_on_the_groups_reach_the_given_adam() -> None:
    params = parameters(shapes=((6, 4), (7,)))
    optimizer = MuonWithAuxAdam(groups(params), adam_optimizer=torch.optim.AdamW)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = [p.detach().clone() for p in params]
    train(lambda p: optimizer, params, steps=1, optimizer=optimizer)
    assert_same_bits(params, before)  # type: ignore[arg-type]


def test_group_added_later_is_filled_in_and_updated() -> None:
    params = parameters(shapes=((6, 4), (7,), (5,)))
    optimizer = MuonWithAuxAdam(groups(params[:2]), adam_optimizer=torch.optim.AdamW)
    optimizer.add_param_group({"params": [params[2]], "use_muon": False})
    before = params[2].detach().clone()
    train(lambda p: optimizer, params, steps=2, optimizer=optimizer)
    assert not torch.equal(params[2], before)
    assert optimizer.param_groups[2]["lr"] == 3e-4


def test_adam_that_cannot_be_made_is_an_error_or_replaced_as_told() -> None:
    def unavailable(groups: Any, **kwargs: Any) -> torch.optim.Optimizer:
        raise RuntimeError("no such device")

    params = parameters(shapes=((6, 4), (7,)))
    with pytest.raises(RuntimeError, match="no such device"):
        MuonWithAuxAdam(groups(params), adam_optimizer=unavailable)
    optimizer = MuonWithAuxAdam(groups(params), adam_optimizer=unavailable, fallback_to_inline=True)
    assert optimizer.adam_optimizer is None
    train(lambda p: optimizer, params, steps=1, optimizer=optimizer)
    assert optimizer.state[params[1]]["step"] == 1


def test_groups_without_a_mark_or_with_a_wrong_method_are_refused() -> None:
    with pytest.raises(ValueError, match=r"group 0 has no `use_muon` \(found \['lr', 'params'\]\)"):
        MuonWithAuxAdam([{"params": parameters(shapes=((2, 2),)), "lr": 1}])
    with pytest.raises(ValueError, match="ns_method = 'x'"):
        MuonWithAuxAdam([{"params": parameters(shapes=((2, 2),)), "use_muon": True, "ns_method": "x"}])
    with pytest.raises(ValueError, match="ns_method = 'x'"):
        SingleDeviceMuon(parameters(shapes=((2, 2),)), ns_method="x")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(8, 6)
        self.layer = nn.Linear(6, 4)
        self.conv = nn.Conv2d(2, 2, 3)
        self.norm = nn.LayerNorm(4)
        self.lm_head = nn.Linear(4, 8)


def tagged() -> Net:
    model = Net()
    set_optimizer_flags(SimpleNamespace(optimizer_name="muon"), model)  # type: ignore[arg-type]
    return model


def test_tags_follow_shape_and_name_and_keep_what_is_there() -> None:
    model = tagged()
    chosen = {name for name, p in model.named_parameters() if p.use_muon}
    assert chosen == {"layer.weight", "conv.weight"}
    model.layer.weight.use_muon = False
    set_optimizer_flags(SimpleNamespace(optimizer_name="muon"), model)  # type: ignore[arg-type]
    assert model.layer.weight.use_muon is False
    other = Net()
    set_optimizer_flags(SimpleNamespace(optimizer_name="adam"), other)  # type: ignore[arg-type]
    assert not any(hasattr(p, "use_muon") for p in other.parameters())


def test_groups_split_into_named_halves_with_their_own_values() -> None:
    model = tagged()
    config = {"lr": 0.01, "muon_lr": 0.02, "adam_lr": 0.003, "momentum": 0.9, "betas": (0.8, 0.9), "weight_decay": 0.1}
    client = [
        {"params": [model.layer.weight, model.layer.bias], "name": "body", "lr": 0.5, "momentum": 0.7, "tag": 7},
        {"params": [model.norm.weight]},
        {"params": [model.conv.weight], "muon_lr": 0.4},
    ]
    muon, adam, norm, conv = split_muon_groups(client, config)
    assert (muon["name"], muon["lr"], muon["momentum"], muon["weight_decay"], muon["tag"]) == (
        "body-muon-params",
        0.5,
        0.7,
        0.1,
        7,
    )
    assert (adam["name"], adam["lr"], adam["betas"], adam["use_muon"]) == ("body-adam-params", 0.5, (0.8, 0.9), False)
    assert "momentum" not in adam
    assert "betas" not in muon
    assert (norm["name"], norm["lr"]) == ("adam-params", 0.003)
    assert (conv["name"], conv["lr"], conv["use_muon"]) == ("muon-params", 0.4, True)
    assert [p.shape for p in muon["params"]] == [model.layer.weight.shape]


def test_untagged_parameters_are_refused_with_the_remedy() -> None:
    with pytest.raises(DeepSpeedConfigError, match=r"2 of 2 have none.*use_muon = True or False"):
        split_muon_groups([{"params": list(Net().layer.parameters())}], {})


def shared_run(params_shapes: tuple[tuple[int, ...], ...], name: str) -> tuple[list[list[float]], int]:
    """Train on one rank of several; returns the weights and how many matrices this rank holds momentum of."""
    params = parameters(shapes=params_shapes)
    build: Any = original_muon.Muon if name == "Muon" else lambda p: original_muon.MuonWithAuxAdam(groups(p))
    optimizer = train(build, params, steps=3)
    return [p.flatten().tolist() for p in params], sum("momentum_buffer" in s for s in optimizer.state.values())


@pytest.mark.world(2)
@pytest.mark.parametrize("name", ("Muon", "MuonWithAuxAdam"))
def test_shared_work_gives_the_numbers_of_one_rank(ranks: Any, name: str) -> None:
    shapes: tuple[tuple[int, ...], ...] = ((6, 4), (3, 3), (8, 2))
    if name == "MuonWithAuxAdam":
        shapes = (*shapes, (5,))
    alone, held = shared_run(shapes, name)
    assert held == 3
    both = ranks(shared_run, shapes, name)
    assert [weights for weights, _ in both] == [alone, alone]
    assert sorted(count for _, count in both) == [1, 2]
