"""Blocks follow layers, merge small neighbours, and never tear what is an atom."""

from __future__ import annotations

import torch
from torch import nn

from deepspeed.runtime.zero.block_cut import CutOptions, cut, number_atoms, persistent_params
from deepspeed.runtime.zero.fetch_trace import NEVER, FetchTrace
from deepspeed.utils import set_z3_leaf_modules


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 8, bias=False)  # 16 + 32


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 2, bias=False)
        self.experts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.sparse = Experts()
        self.head = nn.Linear(4, 5)  # 20 + 5


def sizes(model: nn.Module, options: CutOptions) -> list[list[int]]:
    params = list(model.parameters())
    kept = persistent_params(params, options)
    return [[param.numel() for param in block] for block in cut(params, number_atoms(model), kept, options)]


def test_a_layer_of_a_list_is_one_atom_and_its_experts_are_several() -> None:
    expected = [[20], [16, 32], [16, 32], [16, 32], [8], [16], [16], [20, 5]]
    assert sizes(Model(), CutOptions()) == expected


def test_neighbours_merge_up_to_the_target_and_atoms_stay_whole() -> None:
    expected = [[20], [16, 32], [16, 32], [16, 32], [8, 16, 16], [20, 5]]
    assert sizes(Model(), CutOptions(target=40)) == expected


def test_atoms_are_cut_where_it_is_asked_or_where_they_are_too_large() -> None:
    expected = [[20, 16], [32], [16], [32], [16], [32, 8], [16, 16], [20, 5]]
    assert sizes(Model(), CutOptions(target=40, split_atoms=True)) == expected
    assert sizes(Model(), CutOptions(max_block=40))[1:4] == [[16], [32], [16]]


def test_a_leaf_module_is_one_atom() -> None:
    model = Model()
    set_z3_leaf_modules(model, [Experts])
    assert [8, 16, 16] in sizes(model, CutOptions())


def test_small_parameters_stay_together_up_to_a_sum() -> None:
    assert sizes(Model(), CutOptions(persistent=17))[-1] == [16, 16, 16, 8, 16, 16, 5]
    assert sizes(Model(), CutOptions(persistent=17, max_persistent=33))[-1] == [16, 16]


def test_fine_modules_are_atoms() -> None:
    model = Model()
    atoms = number_atoms(model, granularity=1000)
    assert {atoms[id(param)] for param in model.parameters()} == {0}


def test_a_tied_parameter_belongs_to_its_first_module() -> None:
    model = Model()
    model.head = nn.Linear(4, 5, bias=False)
    model.head.weight = model.embed.weight
    assert sizes(model, CutOptions())[0] == [20]
    assert torch.equal(model.head.weight, model.embed.weight)


def trace(order: list[int], count: int = 4) -> FetchTrace:
    made = FetchTrace([10] * count)
    for block in order:
        made.use(block)
    made.end_window()
    return made


def test_what_follows_is_what_followed_in_the_last_window() -> None:
    made = trace([0, 1, 2, 1, 0])
    made.use(0)
    assert list(made.upcoming()) == [1, 2, 1, 0]
    assert made.distance(1) == 0
    assert made.distance(0) == 30
    made.use(1)
    made.use(2)
    assert made.distance(2) == NEVER


def test_another_order_loses_the_forecast_and_finds_it_again() -> None:
    made = trace([0, 1, 2, 3, 2, 1, 0])
    made.use(0)
    made.use(3)  # a branch: 1 and 2 are left out
    assert list(made.upcoming()) == [2, 1, 0]
    made.use(0)
    made.use(1)  # nothing like it comes any more
    assert list(made.upcoming()) == []
    assert made.misses >= 2
    made.end_window()
    made.use(0)
    assert list(made.upcoming()) == [3, 0, 1]
