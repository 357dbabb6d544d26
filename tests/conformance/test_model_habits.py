"""What client packages rely on about the model around the engine: tied weights, experts, `config`, `args`."""

from __future__ import annotations

import argparse
import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed

STAGES = (0, 1, 2, 3)


def settings(stage: int) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": zero,
    }


class TiedModel(nn.Module):
    """A language model in small: the head is the embedding; `config` is the model's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.config = SimpleNamespace(vocab_size=11, tie_word_embeddings=True)
        self.embed = nn.Embedding(11, 6)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embed(tokens))))


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class SparseBlock(nn.Module):
    """Each rank runs the experts its own tokens were routed to."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 3)
        self.experts = nn.ModuleList(Expert() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            rows = (chosen == number).nonzero().squeeze(1)
            out = out.index_add(0, rows, self.experts[number](x[rows]) * weights[rows].unsqueeze(1))
        return x + out


class SparseModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(SparseBlock() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def tied_loss(model: Any, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randint(11, (2, 5), generator=generator)
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def sparse_loss(model: Any, step: int, rank: int) -> Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(x).square().mean()


def plain(model: nn.Module, loss_of: Callable[..., Tensor], steps: int) -> dict[str, Tensor]:
    """Weights by torch alone: the mean over two ranks."""
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        made.zero_grad(set_to_none=False)
        for rank in range(2):
            (loss_of(model, step, rank) / 2).backward()
        made.step()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def trains_as_torch(stage: int, make: Callable[[], nn.Module], loss_of: Callable[..., Tensor], leaf: list[Any]) -> None:
    model = make()
    if leaf:
        deepspeed.utils.set_z3_leaf_modules(model, leaf)
    engine: Any = deepspeed.initialize(model=model, config=settings(stage))[0]
    for step in range(3):
        engine.backward(loss_of(engine, step, dist.get_rank()))
        engine.step()
    wanted = plain(make(), loss_of, 3)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        found = dict(model.named_parameters())
        assert list(found) == list(wanted)
        for name, value in wanted.items():
            torch.testing.assert_close(found[name].detach(), value, msg=lambda text, name=name: f"{name}: {text}")
    engine.destroy()


def tied_weights_stay_one(stage: int) -> None:
    trains_as_torch(stage, TiedModel, tied_loss, [])
    engine: Any = deepspeed.initialize(model=TiedModel(), config=settings(stage))[0]
    assert engine.module.head.weight is engine.module.embed.weight
    state = engine._zero3_consolidated_16bit_state_dict()
    if dist.get_rank() == 0:
        assert torch.equal(state["head.weight"], state["embed.weight"])
        assert state["embed.weight"].shape == (11, 6)
    engine.destroy()


def experts_by_class_and_by_name(stage: int) -> None:
    trains_as_torch(stage, SparseModel, sparse_loss, [SparseBlock])
    trains_as_torch(stage, SparseModel, sparse_loss, ["SparseBlock"])


def config_is_the_dict_and_the_model_keeps_its_own(stage: int) -> None:
    given = settings(stage)
    untouched = copy.deepcopy(given)
    engine: Any = deepspeed.initialize(model=TiedModel(), config=given)[0]
    assert engine.config is given
    assert given == untouched
    assert engine.config.get("zero_optimization", {}).get("stage") == stage
    assert engine.module.config.vocab_size == 11
    engine.destroy()


def args_come_back_as_they_went(stage: int) -> None:
    args = argparse.Namespace(local_rank=dist.get_rank(), deepspeed_config=settings(stage), deepspeed=True, lr=0.1)
    before = pickle.dumps(args)
    engine: Any = deepspeed.initialize(args=args, model=nn.Linear(6, 1))[0]
    assert engine.args is args
    engine.backward(engine(torch.ones(2, 6)).mean())
    engine.step()
    assert pickle.dumps(args) == before  # clients put it into checkpoints and send it to workers
    assert vars(pickle.loads(before)) == vars(args)
    with pytest.raises(TypeError, match=r"engine\.save_checkpoint"):
        pickle.dumps(engine)
    engine.destroy()


BODIES = (
    tied_weights_stay_one,
    experts_by_class_and_by_name,
    config_is_the_dict_and_the_model_keeps_its_own,
    args_come_back_as_they_went,
)


def at_every_stage(body: Callable[[int], None]) -> None:
    for stage in STAGES:
        body(stage)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_on_two_ranks(ranks: Callable[..., Any], body: Callable[[int], None]) -> None:
    ranks(at_every_stage, body)
