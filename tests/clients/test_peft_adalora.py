"""AdaLoRA: ranks of adapters are given out by gradients, which PEFT asks of `safe_get_full_grad`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.clients import recipe
from tests.clients.test_peft import ACCUMULATION, CLIP, RATE, STEPS, config, engine_of

ALL = ACCUMULATION * STEPS


def adalora() -> Any:
    from peft import AdaLoraConfig, get_peft_model

    base = recipe.llama()
    torch.manual_seed(3)
    settings = AdaLoraConfig(
        init_r=4, target_r=2, tinit=0, tfinal=1, deltaT=1, total_step=STEPS, target_modules=["q_proj", "v_proj"],
        task_type="CAUSAL_LM",
    )  # fmt: skip
    return get_peft_model(base, settings)


def plain(data: list[list[dict[str, torch.Tensor]]]) -> tuple[dict[str, torch.Tensor], list[float]]:
    model = adalora()
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0)
    norms = []
    for number, window in enumerate(data):
        for batch in window:
            (model(**batch).loss / len(window)).backward()
        model.base_model.update_and_allocate(number)
        norms.append(float(nn.utils.clip_grad_norm_(trained, CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return recipe.full_weights(model), norms


def rank_allocation(stage: int) -> None:
    from transformers.integrations import HfDeepSpeedConfig

    import deepspeed

    deepspeed.init_distributed()
    model = adalora()
    settings = config(stage)
    seen = recipe.record(model)
    kept = HfDeepSpeedConfig(settings)
    engine = engine_of(model, settings)
    rows = recipe.Tokens().rows
    norms, taken = [], 0
    for number in range(ALL):
        at = 4 * number + 2 * recipe.rank()
        engine.backward(engine(input_ids=rows[at : at + 2], labels=rows[at : at + 2]).loss)
        boundary = engine.is_gradient_accumulation_boundary()
        if boundary:
            engine.module.base_model.update_and_allocate(engine.global_steps)
            values = recipe.full_weights(engine.module)
            taken += sum(int((value == 0).sum()) for name, value in values.items() if "lora_E" in name)
        engine.step()
        if boundary:
            norms.append(float(engine.get_global_grad_norm()))
    del kept
    weights, expected = plain(recipe.windows(seen, ACCUMULATION))
    recipe.assert_numbers(norms, expected, 5e-4, "norm")
    recipe.assert_close(recipe.full_weights(engine.module), weights, 1e-4)
    assert taken >= 8, "no ranks have been taken away"


@pytest.mark.parametrize("stage", (0, 2, 3))
def test_ranks_given_out_by_gradients(ranks: Any, stage: int) -> None:
    ranks(rank_allocation, stage)
