"""Every call of the client packages, made as they make it: the effect is there, or the refusal names the feature.

By client, on two ranks; the calls are in `calls/`, a file per family of clients.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import deepspeed
from tests.conformance.calls import arctic, examples, forms, huggingface, megatron, mii, trainers  # noqa: F401
from tests.conformance.calls.table import CALLS, REFUSED, backward, start


def make_calls(client: str, folder: str) -> None:
    """All calls of one client; an error names those it comes from."""
    for number, (shapes, body) in enumerate(CALLS[client]):
        place = Path(folder) / str(number)
        place.mkdir(exist_ok=True)
        dist.barrier()
        try:
            body(place)
        except Exception as error:
            raise AssertionError(f"{client}: {'; '.join(shapes)}") from error


def refuse(client: str) -> list[str]:
    """Expressions that did not say which feature they belong to."""
    engine = start(1)
    found = []
    for expression, feature in REFUSED[client].items():
        try:
            eval(expression, {"deepspeed": deepspeed, "engine": engine})
            found.append(f"{expression}: works: enter a call that shows it")
        except Exception as error:
            if feature not in str(error) or "not built yet in deepspeed" not in str(error):
                found.append(f"{expression}: {type(error).__name__}: {error}")
    engine.destroy()
    return found


@pytest.mark.parametrize("client", CALLS)
def test_calls(ranks: Callable[..., Any], tmp_path: Path, client: str) -> None:
    ranks(make_calls, client, str(tmp_path))


@pytest.mark.world(1)
@pytest.mark.parametrize("client", REFUSED)
def test_refusals(ranks: Callable[..., Any], client: str) -> None:
    assert ranks(refuse, client) == [[]]


def links_of_one_rank() -> list[tuple[int, ...]]:
    """Shapes of the gradients behind `param._hp_mapping`; none in a pickled model."""
    engine = start(1)
    backward(engine)
    copied = pickle.loads(pickle.dumps(engine.module))
    assert [param._hp_mapping for param in copied.parameters()] == [None] * 4
    params = list(engine.module.parameters())
    shapes = [tuple(p._hp_mapping.get_lp_grad_fragment(p._index_in_param_group).shape) for p in params]
    engine.destroy()
    return shapes


@pytest.mark.world(1)
def test_gradients_of_one_rank_have_the_shape_of_the_parameter(ranks: Callable[..., Any]) -> None:
    assert ranks(links_of_one_rank) == [[(8, 4), (8,), (2, 8), (2,)]]


def test_the_table_is_complete() -> None:
    """Each client is there, and no call twice; prints how many there are."""
    shapes = [shape for rows in CALLS.values() for found, _ in rows for shape in found]
    functions = sum(map(len, CALLS.values()))
    refusals = sum(map(len, REFUSED.values()))
    print(f"{len(shapes)} calls made by {functions} functions, {refusals} refusals, {len(CALLS)} groups")
    assert set(CALLS) >= {
        "accelerate", "transformers", "trl", "peft", "lightning", "axolotl", "llamafactory", "ms-swift", "openrlhf",
        "mii", "examples", "Megatron-DeepSpeed", "gpt-neox", "ArcticTraining", "ray",
    }  # fmt: skip
    for client, rows in CALLS.items():
        named = [shape for found, _ in rows for shape in found]
        assert sorted(named) == sorted(set(named)), client
