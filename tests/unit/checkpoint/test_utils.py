"""The public helpers: copies that hold their own elements alone, and names of other releases."""

from __future__ import annotations

import collections
from typing import NamedTuple

import torch

from deepspeed import checkpoint
from deepspeed.checkpoint.utils import (
    clone_tensors_for_torch_save,
    get_layer_ckpt_name_for_rank,
    get_model_ckpt_name_for_rank,
    get_zero_ckpt_name_for_rank,
)


class Pair(NamedTuple):
    left: torch.Tensor
    right: int


def test_copies_are_tight_and_keep_containers() -> None:
    flat = torch.randn(1000)
    item = collections.OrderedDict(
        view=flat[:3], pair=Pair(flat[3:5], 1), nested=[(flat[5:6],), {"k": flat[6:7]}], other="text",
        parameter=torch.nn.Parameter(flat[:2]), default=collections.defaultdict(list, a=[flat[7:8]]),
    )  # fmt: skip
    copy = clone_tensors_for_torch_save(item)
    assert type(copy) is collections.OrderedDict
    assert type(copy["pair"]) is Pair
    assert torch.equal(copy["view"], flat[:3])
    assert copy["view"].untyped_storage().nbytes() == 12
    assert copy["nested"][0][0].data_ptr() != flat[5:6].data_ptr()
    assert torch.equal(copy["default"]["a"][0], flat[7:8])
    assert not copy["parameter"].requires_grad
    assert copy["other"] == "text"


def test_tied_tensors_stay_tied() -> None:
    weight = torch.randn(4)
    copy = clone_tensors_for_torch_save({"a": weight, "b": weight})
    assert copy["a"] is copy["b"]


def test_attributes_of_state_dicts_stay() -> None:
    state = torch.nn.BatchNorm1d(2).state_dict()
    assert clone_tensors_for_torch_save(state)._metadata == state._metadata


def test_file_names() -> None:
    assert get_model_ckpt_name_for_rank("d", "00") == "d/mp_rank_00_model_states.pt"
    assert get_zero_ckpt_name_for_rank("d", 2, 1) == "d/zero_pp_rank_2_mp_rank_01_optim_states.pt"
    assert get_layer_ckpt_name_for_rank("d", "layer_03", 1) == "d/layer_03-model_01_model_states.pt"


def test_constants_are_names_of_the_package() -> None:
    assert checkpoint.UNIVERSAL_CHECKPOINT_VERSION_VALUE == 0.4
    assert checkpoint.OPTIM_FILE_SUFFIX == "_optim_states.pt"
    assert "ZERO_STAGE" in dir(checkpoint)
