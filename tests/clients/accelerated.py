"""How the tests drive Accelerate: plugins, an `Accelerator` for the CPU, preparing, and one training loop.

Owns: the client's side of a run and the learning rates it stands for. Does not own: the plain loop (`recipe.py`).
Invariant: `loop` is what Accelerate's documentation shows, so that nothing here hides what a user would meet.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.clients import recipe

RATE, STEPS, ACCUMULATION, DECAY, CLIP = 1e-3, 4, 2, 0.01, 0.5
MICRO_STEPS = ACCUMULATION * STEPS


def on_cpu() -> None:
    """Accelerate takes the CPU for a device of DeepSpeed only where its state says so before (the Trainer does it)."""
    from accelerate import PartialState

    PartialState(cpu=True)


def plugin(stage: int, how: str, folder: str, fields: dict[str, Any] | None = None, **changes: Any) -> Any:
    """``how``: "fields" of the plugin alone; or a file, with "dummy" optimizer and scheduler or with the "client"'s."""
    from accelerate import DeepSpeedPlugin

    if how == "fields":
        settings = {
            "zero_stage": stage, "gradient_accumulation_steps": ACCUMULATION, "gradient_clipping": CLIP,
            "offload_optimizer_device": "none", "offload_param_device": "none", "zero3_init_flag": False,
            "zero3_save_16bit_model": True,
        }  # fmt: skip
        return DeepSpeedPlugin(**{**settings, **(fields or {})})
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
    blocks: dict[str, Any] = {"optimizer": optimizer} if how == "dummy" else {"optimizer": None, "scheduler": None}
    config = recipe.zero_config(stage, **{**blocks, "gradient_clipping": CLIP, **changes})
    path = Path(folder, f"ds-{recipe.rank()}-{stage}.json")
    path.write_text(json.dumps(config))
    return DeepSpeedPlugin(hf_ds_config=str(path), **(fields or {}))


def accelerator(stage: int, how: str, folder: str, dtype: str = "fp32", **more: Any) -> Any:
    from accelerate import Accelerator, DistributedType

    on_cpu()
    own = {key: more.pop(key) for key in ("dynamo_backend", "project_config") if key in more}
    made = Accelerator(
        deepspeed_plugin=plugin(stage, how, folder, **more), gradient_accumulation_steps=ACCUMULATION,
        mixed_precision="no" if dtype == "fp32" else dtype, **own,
    )  # fmt: skip
    assert made.num_processes == 2
    assert made.distributed_type == DistributedType.DEEPSPEED
    return made


def prepare(made: Any, how: str, model: Any, groups: Any = None, count: int = 64) -> tuple[Any, Any, Any, Any]:
    """Engine, optimizer, loader, schedule."""
    from accelerate.utils import DummyOptim, DummyScheduler

    loader = torch.utils.data.DataLoader(recipe.Tokens(count), batch_size=2)
    params = [param for param in model.parameters() if param.requires_grad] if groups is None else groups
    if how == "dummy":
        optimizer: Any = DummyOptim(params, lr=RATE, weight_decay=DECAY)
        # Counted in updates of all processes, as Accelerate's own examples do.
        schedule: Any = DummyScheduler(optimizer, total_num_steps=2 * STEPS, warmup_num_steps=1)
    else:
        optimizer = torch.optim.AdamW(params, lr=RATE, weight_decay=DECAY)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0 - n / (4 * STEPS))
    return made.prepare(model, optimizer, loader, schedule)


def rates(how: str) -> Callable[[int], float]:
    if how == "dummy":
        return recipe.warmup_decay(RATE, 2, STEPS)  # a warm-up of one step is made two
    # Accelerate steps a client's schedule once per process.
    return lambda number: RATE * (1.0 - 2 * number / (4 * STEPS))


def loop(made: Any, parts: tuple[Any, ...], micro_steps: range, loss_of: Any = None) -> dict[str, list[float]]:
    """Losses and rates of each micro-step, norms of each update."""
    model, optimizer, loader, schedule = parts
    out: dict[str, list[float]] = {"losses": [], "norms": [], "rates": []}
    for number, batch in enumerate(loader):
        if number not in micro_steps:
            continue
        with made.accumulate(model):
            out["rates"].append(optimizer.param_groups[0]["lr"])
            loss = model(**batch).loss if loss_of is None else loss_of(model, batch)
            made.backward(loss)
            out["losses"].append(float(made.gather(loss.detach()).mean()))
            if made.sync_gradients:
                out["norms"].append(float(made.clip_grad_norm_(model.parameters(), CLIP)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return out


def joined(first: dict[str, list[float]], second: dict[str, list[float]]) -> dict[str, list[float]]:
    return {key: first[key] + second[key] for key in first}


def check_numbers(found: dict[str, list[float]], plain: recipe.Plain, exact: bool) -> None:
    """Losses, gradient norms and learning rates are those of the plain loop."""
    losses = found["losses"]
    means = [sum(losses[at : at + ACCUMULATION]) / ACCUMULATION for at in range(0, len(losses), ACCUMULATION)]
    recipe.assert_numbers(means, plain.losses, 2e-5 if exact else 1e-2, "loss")
    recipe.assert_numbers(found["norms"], plain.norms, 2e-4 if exact else 3e-2, "norm")
    recipe.assert_numbers(found["rates"][::ACCUMULATION], plain.rates, 1e-6, "learning rate")


def check_weights(found: dict[str, torch.Tensor], plain: recipe.Plain, exact: bool) -> None:
    """fp32: the plain loop's weights. bf16: the direction Adam takes where a gradient is nearly zero is a matter of
    rounding, so a few elements in a thousand may be as far off as all updates together carry them."""
    if exact:
        recipe.assert_close(found, plain.weights, 2e-5)
        return
    recipe.assert_close(found, plain.weights, 2 * sum(plain.rates), 2**-7)
    apart = torch.cat([(found[name] - value).abs().flatten() - 2**-7 * value.abs().flatten()
                       for name, value in plain.weights.items()])  # fmt: skip
    share = (apart > 0.5 * RATE).float().mean().item()
    assert share < 3e-3, f"{share:.2%} of the weights are more than half an update away from the plain loop's"


def fresh_like(make: Callable[[], nn.Module], start: dict[str, torch.Tensor]) -> nn.Module:
    model = make()
    model.load_state_dict(start)
    return model


def copied(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}
