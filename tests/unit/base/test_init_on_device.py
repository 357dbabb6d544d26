"""Models built on another device or in another dtype."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepspeed.utils import OnDevice


def test_meta_model_takes_no_memory() -> None:
    with OnDevice(dtype=torch.bfloat16, device="meta"):
        model = nn.TransformerEncoderLayer(8, 2, 16)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}


def test_dtype_on_the_same_device_keeps_values_usable() -> None:
    torch.manual_seed(0)
    with OnDevice(dtype=torch.bfloat16, device="cpu"):
        model = nn.Linear(3, 2)
        norm = nn.BatchNorm1d(3)
    assert model.weight.dtype == norm.running_mean.dtype == torch.bfloat16
    assert norm.num_batches_tracked.dtype == torch.int64
    assert torch.isfinite(model.weight.float()).all()


def test_which_constructors_are_changed() -> None:
    with OnDevice(dtype=torch.float16, device="meta"):
        made = {
            "empty": torch.empty(2),
            "zeros": torch.zeros(2, dtype=torch.float64),
            "ones": torch.ones(2),
            "full": torch.full((2,), 1.5),
            "new_zeros": torch.ones(2).new_zeros(3),
        }
        integers = torch.zeros(2, dtype=torch.int64)
        given = torch.empty(2, device="cpu")
        rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
        values = torch.tensor([1.0, 2.0])
    for name, tensor in made.items():
        assert (tensor.device.type, tensor.dtype) == ("meta", torch.float16), name
    assert (integers.device.type, integers.dtype) == ("meta", torch.int64)
    assert (given.device.type, given.dtype) == ("cpu", torch.float16)
    assert rates == [0.0, 0.5, 1.0]
    assert values.tolist() == [1.0, 2.0]


class Handmade(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sized = nn.Parameter(torch.Tensor(3, 2))
        self.drawn = nn.Parameter(torch.randn(4), requires_grad=False)
        tied = nn.Parameter(torch.randn(2))
        tied.mark = "kept"  # type: ignore[attr-defined]
        self.first, self.second = tied, tied
        self.missing = None
        self.register_parameter("none", None)


def test_parameters_from_other_constructors_are_moved_and_stay_tied() -> None:
    with OnDevice(dtype=torch.bfloat16, device="meta"):
        model = Handmade()
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}
    assert model.sized.requires_grad
    assert not model.drawn.requires_grad
    assert model.first is model.second
    assert model.first.mark == "kept"
    assert model.none is None


def test_nothing_remains_after_leaving_even_by_an_error() -> None:
    def build() -> None:
        with OnDevice(dtype=torch.float16, device="meta"), OnDevice(dtype=torch.bfloat16, device="meta"):
            assert torch.zeros(1).dtype == torch.bfloat16
            raise KeyError

    with pytest.raises(KeyError):
        build()
    layer = Handmade()
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("cpu", torch.float32)}
    assert torch.zeros(1).dtype == torch.float32


def test_context_can_be_entered_again() -> None:
    context = OnDevice(dtype=torch.float16, device="meta")
    for _ in range(2):
        with context, context:
            assert nn.Linear(1, 1).weight.dtype == torch.float16
    assert nn.Linear(1, 1).weight.dtype == torch.float32


def test_disabled_does_nothing() -> None:
    with OnDevice(dtype=torch.float16, device="meta", enabled=False):
        assert nn.Linear(1, 1).weight.dtype == torch.float32


def test_without_dtype_only_the_device_changes() -> None:
    with OnDevice(dtype=None, device="meta"):
        layer = nn.Linear(1, 1, dtype=torch.float64)
    assert (layer.weight.device.type, layer.weight.dtype) == ("meta", torch.float64)


@pytest.mark.parametrize("dtype", ("half", torch.int32))
def test_wrong_dtype_is_refused(dtype: object) -> None:
    with pytest.raises(ValueError, match=r"must be a floating point torch\.dtype or None"):
        OnDevice(dtype=dtype)  # type: ignore[arg-type]
