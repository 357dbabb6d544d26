"""From type and params of a config to an optimizer, and what is elementwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.runtime.config_problems import DeepSpeedConfigError
from deepspeed.runtime.optimizers import build_optimizer, is_elementwise
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
from tests.unit.optim.optim_cases import parameters


def build(name: str, params: dict[str, Any] | None = None, groups: Any = None, **kw: Any) -> torch.optim.Optimizer:
    return build_optimizer(name, params, groups or [{"params": parameters()}], **kw)


def tagged_groups(dtype: torch.dtype = torch.float32) -> list[dict[str, Any]]:
    params = parameters(dtype, shapes=((4, 4), (3,)))
    params[0].use_muon, params[1].use_muon = True, False
    return [{"params": params}]


CHOICES: tuple[tuple[str, dict[str, Any], bool, type], ...] = (
    ("Adam", {}, False, FusedAdam),
    ("adamw", {}, False, FusedAdam),
    ("AdamW", {}, True, DeepSpeedCPUAdam),
    ("Adam", {"torch_adam": True}, False, torch.optim.AdamW),
    ("Adam", {"torch_adam": True, "adam_w_mode": False}, False, torch.optim.Adam),
    ("AdamW", {"torch_adam": True, "adam_w_mode": False, "foreach": True}, True, torch.optim.AdamW),
    ("Adagrad", {}, False, torch.optim.Adagrad),
    ("Adagrad", {}, True, DeepSpeedCPUAdagrad),
    ("LAMB", {"max_coeff": 5}, False, FusedLamb),
    ("Lion", {}, False, FusedLion),
    ("lion", {"set_grad_none": True}, True, DeepSpeedCPULion),
    ("SGD", {"lr": 0.1, "momentum": 0.9}, False, torch.optim.SGD),
    ("RMSprop", {"alpha": 0.9}, False, torch.optim.RMSprop),
    ("Adafactor", {"lr": 0.1}, False, torch.optim.Adafactor),
)


@pytest.mark.parametrize(("name", "params", "host", "cls"), CHOICES)
def test_class_of_each_type(name: str, params: dict[str, Any], host: bool, cls: type) -> None:
    given = dict(params)
    assert type(build(name, given, host_states=host)) is cls
    assert given == params


def test_decay_is_decoupled_unless_adam_says_otherwise() -> None:
    modes = {
        (name, mode): build(name, {} if mode is None else {"adam_w_mode": mode}).adam_w_mode  # type: ignore[attr-defined]
        for name in ("Adam", "AdamW")
        for mode in (None, True, False)
    }
    assert {key for key, decoupled in modes.items() if not decoupled} == {("Adam", False)}


def test_parameters_and_defaults_reach_the_class() -> None:
    plain = build("Adam").param_groups[0]
    assert (plain["lr"], plain["betas"], plain["eps"], plain["weight_decay"]) == (1e-3, (0.9, 0.999), 1e-8, 0)
    assert plain["bias_correction"] is True
    full = build("AdamW", {"lr": 2e-4, "betas": [0.8, 0.9], "bias_correction": False, "max_grad_norm": 0})
    group = full.param_groups[0]
    assert (group["lr"], group["betas"], group["bias_correction"]) == (2e-4, (0.8, 0.9), False)
    assert build("Lamb").param_groups[0]["max_coeff"] == 10.0
    assert build("Lion").param_groups[0]["betas"] == (0.9, 0.999)


def test_values_of_a_group_win() -> None:
    a, b = parameters(shapes=((2,), (3,)))
    optimizer = build("AdamW", {"lr": 0.1}, [{"params": [a], "lr": 0.5}, {"params": b}])
    assert [g["lr"] for g in optimizer.param_groups] == [0.5, 0.1]


def test_moments_of_low_precision_masters() -> None:
    groups = lambda: [{"params": parameters(torch.bfloat16)}]  # noqa: E731
    for wanted, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        for host in (False, True):
            optimizer = build(
                "AdamW",
                {"fp32_optimizer_states": wanted},
                groups(),
                low_precision_masters=True,
                host_states=host,
            )
            assert optimizer.state_dtype(optimizer.param_groups[0]["params"][0]) == dtype  # type: ignore[attr-defined]
        for name, members in (("Lamb", groups()), ("Muon", tagged_groups(torch.bfloat16))):
            optimizer = build(name, {"fp32_optimizer_states": wanted}, members, low_precision_masters=True)
            assert optimizer.state_dtype(optimizer.param_groups[0]["params"][0]) == dtype  # type: ignore[attr-defined]
    assert type(build("SGD", {"fp32_optimizer_states": True}, groups(), low_precision_masters=True)) is torch.optim.SGD
    with pytest.raises(DeepSpeedConfigError, match=r"optimizer\.params\.fp32_optimizer_states.*low precision here"):
        build("AdamW", {"torch_adam": True, "fp32_optimizer_states": True}, groups(), low_precision_masters=True)


def test_muon_splits_groups_and_takes_its_rates() -> None:
    params = {"lr": 0.1, "muon_lr": 0.2, "ns_method": "standard", "weight_decay": 0.1}
    optimizer = build("Muon", params, tagged_groups())
    assert isinstance(optimizer, MuonWithAuxAdam)
    muon, adam = optimizer.param_groups
    assert (muon["lr"], muon["ns_method"], muon["momentum"], muon["name"]) == (0.2, "standard", 0.95, "muon-params")
    assert (adam["lr"], adam["betas"], adam["eps"], adam["weight_decay"]) == (0.1, (0.9, 0.95), 1e-10, 0.1)
    plain = build("Muon", {"torch_adam": True, "adam_w_mode": False}, tagged_groups())
    assert type(plain.adam_optimizer) is torch.optim.Adam  # type: ignore[attr-defined]


def test_mup_types_take_the_arguments_of_their_torch_class() -> None:
    class Flat:
        def ninf(self) -> int:
            return 1

        def width_mult(self) -> float:
            return 2.0

        def fanin_fanout_mult_ratio(self) -> float:
            return 1.0

    params = parameters()
    for p in params:
        p.infshape = Flat()
    for name, cls in (("MuAdam", torch.optim.Adam), ("muadamw", torch.optim.AdamW), ("MuSGD", torch.optim.SGD)):
        assert type(build(name, {"lr": 0.1, "weight_decay": 0.2}, [{"params": params}])) is cls
    with pytest.raises(DeepSpeedConfigError, match=r"optimizer\.params\.momentun.*did you mean `momentum`"):
        build("MuSGD", {"momentun": 0.9}, [{"params": params}])
    with pytest.raises(DeepSpeedConfigError, match=r"set_base_shapes"):
        build("MuAdam")


REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("sgd", {}, r"optimizer\.type: found \"sgd\".*did you mean 'SGD'"),
    ("AdamX", {}, r"optimizer\.type: found \"AdamX\".*did you mean 'Adam'"),
    ("Optimizer", {}, r"optimizer\.type: found \"Optimizer\""),
    ("lr_scheduler", {}, r"optimizer\.type"),
    ("OneBitAdam", {}, r"optimizer\.type: \"OneBitAdam\".*not built yet"),
    ("Adam", {"learning_rate": 0.1}, r"optimizer\.params\.learning_rate.*did you mean `lr`"),
    ("AdamW", {"weight_deca": 0.1}, r"optimizer\.params\.weight_deca.*did you mean `weight_decay`"),
    ("SGD", {"betas": [0.9, 0.9]}, r"optimizer\.params\.betas: found \[0\.9, 0\.9\].*SGD does not take"),
    ("AdamW", {"lr": "auto"}, r"optimizer\.params\.lr: found \"auto\""),
    ("AdamW", {"lr": -1}, r"AdamW refused.*lr = -1"),
    ("AdamW", {"max_grad_norm": 1.0}, r"optimizer\.params\.max_grad_norm.*gradient_clipping"),
    ("Lamb", {"max_grad_norm": 1.0}, r"optimizer\.params\.max_grad_norm.*gradient_clipping"),
    ("AdamW", {"amsgrad": True}, r"optimizer\.params\.amsgrad.*torch_adam"),
    ("AdamW", {"maximize": True}, r"optimizer\.params\.maximize.*torch_adam"),
    ("AdamW", {"torch_adam": True, "bias_correction": False}, r"optimizer\.params\.bias_correction"),
    ("Adagrad", {"amsgrad": True}, r"optimizer\.params\.amsgrad"),
    ("Muon", {"per_head_muon": True}, r"optimizer\.params\.per_head_muon.*not built yet"),
    ("Muon", {"ns_method": "cubic"}, r"ns_method = 'cubic'"),
)


@pytest.mark.parametrize(("name", "params", "text"), REFUSED)
def test_refusals_name_key_value_and_remedy(name: str, params: dict[str, Any], text: str) -> None:
    with pytest.raises(DeepSpeedConfigError, match=text):
        build(name, params, tagged_groups())


def test_all_unknown_parameters_are_reported_at_once() -> None:
    with pytest.raises(DeepSpeedConfigError) as caught:
        build("AdamW", {"learning_rate": 0.1, "epsilon": 1e-8})
    assert "learning_rate" in str(caught.value)
    assert "did you mean `eps`" in str(caught.value)


ELEMENTWISE = (
    *("Adam", "AdamW", "Adagrad", "Lion", "SGD", "RMSprop", "Adamax", "Adadelta", "NAdam", "RAdam", "ASGD", "Rprop"),
)


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("host", (False, True))
def test_elementwise_optimizers_give_a_parameter_in_pieces_the_update_of_the_whole(name: str, host: bool) -> None:
    whole = parameters(torch.float64, shapes=((6, 10),))
    pieces = [torch.nn.Parameter(t.clone()) for t in whole[0].detach().view(-1).split([23, 1, 36])]
    one = build(name, {"lr": 0.05}, [{"params": whole}], host_states=host)
    many = build(name, {"lr": 0.05}, [{"params": pieces}], host_states=host)
    assert is_elementwise(one)
    for step in range(3):
        whole[0].grad = torch.randn(6, 10, generator=torch.Generator().manual_seed(step)).double()
        for piece, g in zip(pieces, whole[0].grad.view(-1).split([23, 1, 36]), strict=True):
            piece.grad = g.clone()
        one.step()
        many.step()
    # fp64, so that only a wrong rule shows, not the rounding of vector and tail loops.
    joined = torch.cat([p.detach() for p in pieces])
    torch.testing.assert_close(joined, whole[0].detach().view(-1), rtol=1e-13, atol=1e-15)


def test_everything_else_is_not_elementwise() -> None:
    class Mine(torch.optim.AdamW):
        """Might do anything in step()."""

    params = parameters(shapes=((4, 4),))
    assert not is_elementwise(Mine(params))
    assert not is_elementwise(build("Lamb"))
    assert not is_elementwise(build("Adafactor", {"lr": 0.1}, [{"params": params}]))
    assert not is_elementwise(torch.optim.LBFGS(params))


def test_adam_groups_of_muon_are_elementwise_one_by_one() -> None:
    optimizer = build("Muon", {}, tagged_groups())
    assert not is_elementwise(optimizer)
    assert [is_elementwise(optimizer, group) for group in optimizer.param_groups] == [False, True]
