"""Hugging Face Trainer on two ranks: numbers of a plain loop, resuming, exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.clients import recipe

STEPS, RATE, WARMUP, DECAY = 6, 1e-3, 2, 0.01
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def arguments(folder: str, config: Any, dtype: str, **changes: Any) -> Any:
    from transformers import TrainingArguments

    settings: dict[str, Any] = {
        "output_dir": folder, "deepspeed": config, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "max_steps": STEPS, "learning_rate": RATE, "warmup_steps": WARMUP, "weight_decay": DECAY, "max_grad_norm": 1.0,
        "logging_steps": 1, "bf16": dtype == "bf16", "use_cpu": True, "report_to": [], "disable_tqdm": True,
        "save_strategy": "no", "logging_nan_inf_filter": False, "seed": 7,
    }  # fmt: skip
    return TrainingArguments(**{**settings, **changes})


def logged(trainer: Any, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def check_against_plain(trainer: Any, start: dict[str, torch.Tensor], seen: list[Any], make: Any, dtype: str) -> Any:
    model = make()
    model.load_state_dict(start, strict=False)
    exact = dtype == "fp32"
    rate = recipe.warmup_decay(RATE, WARMUP, STEPS)
    plain = recipe.plain_run(
        model, recipe.windows(seen, 2), rate, decay=DECAY, dtype=DTYPES[dtype], loss_of=recipe.trainer_loss
    )
    recipe.assert_numbers(logged(trainer, "loss"), plain.losses, 2e-5 if exact else 1e-2, "loss")
    recipe.assert_numbers(logged(trainer, "grad_norm"), plain.norms, 2e-4 if exact else 3e-2, "gradient norm")
    # Engine and schedule step inside backward, so what the Trainer logs is already the rate of the next update.
    rates = [rate(number + 1) for number in range(STEPS)]
    recipe.assert_numbers(logged(trainer, "learning_rate"), rates, 1e-6, "learning rate")
    recipe.assert_close(recipe.full_weights(trainer.model), plain.weights, *((2e-5,) if exact else (2 * RATE, 2**-7)))
    return plain


def train_and_resume(folder: str, stage: int, dtype: str, kind: str, extra: dict[str, Any]) -> None:
    from transformers import Trainer

    make = getattr(recipe, kind)
    model = make()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    seen = recipe.record(model)
    config = recipe.zero_config(stage, zero_optimization=extra)
    common: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3}
    common["activation_checkpointing"] = True
    args = arguments(f"{folder}/run", config, dtype, load_best_model_at_end=True, **common)
    trainer = Trainer(model=model, args=args, train_dataset=recipe.Tokens(), eval_dataset=recipe.Tokens(8, 1))
    trainer.train()
    check_against_plain(trainer, start, seen, make, dtype)
    unbroken = recipe.full_weights(trainer.model)
    losses = logged(trainer, "loss")
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-6")
    trainer.save_model(f"{folder}/export")
    dist.barrier()
    check_export(f"{folder}/export", unbroken, dtype, model)

    # A second Trainer in the same process takes up the run in its middle.
    again = make(seed=5)
    args = arguments(f"{folder}/run", config, dtype, **common)
    resumed = Trainer(model=again, args=args, train_dataset=recipe.Tokens(), eval_dataset=recipe.Tokens(8, 1))
    resumed.train(resume_from_checkpoint=f"{folder}/run/checkpoint-3")
    recipe.assert_numbers(logged(resumed, "loss"), losses, 0.0, "loss of the resumed run")
    recipe.assert_close(recipe.full_weights(resumed.model), unbroken, 0.0)


def check_export(folder: str, weights: dict[str, torch.Tensor], dtype: str, like: Any) -> None:
    """What plain transformers loads, in a process without DeepSpeed's config, is the trained model."""
    from safetensors.torch import load_file
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    if recipe.rank() == 0:
        stored = load_file(f"{folder}/model.safetensors")
        assert all(value.dtype == DTYPES[dtype] for value in stored.values())
        import transformers.integrations.deepspeed as integration

        kept = integration._hf_deepspeed_config_weak_ref
        unset_hf_deepspeed_config()
        loaded, info = type(like).from_pretrained(folder, output_loading_info=True)
        integration._hf_deepspeed_config_weak_ref = kept
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
        recipe.assert_close(recipe.full_weights(loaded), weights, 0.0)
    dist.barrier()


@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_training_resuming_exporting(ranks: Any, tmp_path: Path, stage: int, dtype: str) -> None:
    ranks(train_and_resume, str(tmp_path), stage, dtype, "llama", {})
