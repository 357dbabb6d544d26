"""Hugging Face Trainer beyond the straight run: own optimizers, offload, zero.Init, exports without gathering."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.clients import recipe
from tests.clients.test_trainer import DECAY, RATE, STEPS, WARMUP, arguments, check_against_plain, check_export, logged


def own_optimizer(folder: str, stage: int, changes: dict[str, Any]) -> None:
    """No optimizer and no scheduler in the file: both are the Trainer's."""
    from transformers import Trainer

    path = f"{folder}/ds-{recipe.rank()}.json"
    Path(path).write_text(json.dumps(recipe.zero_config(stage, optimizer=None, scheduler=None, **changes)))
    model = recipe.gpt2()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    seen = recipe.record(model)
    args = arguments(f"{folder}/run", path, "fp32", lr_scheduler_type="linear", save_strategy="steps", save_steps=3)
    trainer = Trainer(model=model, args=args, train_dataset=recipe.Tokens())
    trainer.train()

    def rate(number: int) -> float:
        return RATE * (number / WARMUP if number < WARMUP else max(0.0, (STEPS - number) / (STEPS - WARMUP)))

    fresh = recipe.gpt2()
    fresh.load_state_dict(start)
    plain = recipe.plain_run(
        fresh, recipe.windows(seen, 2), rate, decay=DECAY, groups=recipe.matrices_decayed, loss_of=recipe.trainer_loss
    )
    recipe.assert_numbers(logged(trainer, "loss"), plain.losses, 2e-5, "loss")
    recipe.assert_numbers(logged(trainer, "grad_norm"), plain.norms, 2e-4, "gradient norm")
    recipe.assert_close(recipe.full_weights(trainer.model), plain.weights, 2e-5)
    unbroken = recipe.full_weights(trainer.model)

    args = arguments(f"{folder}/run", path, "fp32", lr_scheduler_type="linear")
    resumed = Trainer(model=recipe.gpt2(seed=5), args=args, train_dataset=recipe.Tokens())
    resumed.train(resume_from_checkpoint=f"{folder}/run/checkpoint-3")
    recipe.assert_close(recipe.full_weights(resumed.model), unbroken, 0.0)


@pytest.mark.flow(dtype="fp32")
@pytest.mark.parametrize("stage", (2, 3))
def test_optimizer_and_schedule_of_the_trainer(ranks: Any, tmp_path: Path, stage: int) -> None:
    ranks(own_optimizer, str(tmp_path), stage, {})


@pytest.mark.flow(dtype="fp32")
@pytest.mark.parametrize("stage", (2, 3))
def test_optimizer_of_the_trainer_with_offload(ranks: Any, tmp_path: Path, stage: int) -> None:
    offload = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
    ranks(own_optimizer, str(tmp_path), stage, {"zero_optimization": offload})


def offloaded(folder: str, stage: int, offload: dict[str, Any]) -> None:
    from transformers import Trainer

    model = recipe.llama()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    seen = recipe.record(model)
    args = arguments(f"{folder}/run", recipe.zero_config(stage, zero_optimization=offload), "fp32")
    trainer = Trainer(model=model, args=args, train_dataset=recipe.Tokens())
    trainer.train()
    check_against_plain(trainer, start, seen, recipe.llama, "fp32")


@pytest.mark.flow(dtype="fp32")
@pytest.mark.parametrize(
    ("stage", "parts"), ((1, ("optimizer",)), (2, ("optimizer",)), (3, ("optimizer",)), (3, ("optimizer", "param")))
)
def test_offload_in_the_file(ranks: Any, tmp_path: Path, stage: int, parts: tuple[str, ...]) -> None:
    offload = {f"offload_{part}": {"device": "cpu", "pin_memory": True} for part in parts}
    ranks(offloaded, str(tmp_path), stage, offload)


def build_under_init(folder: str, kind: str) -> None:
    """`from_pretrained` and `from_config` while the config says stage 3: sharded at birth, weights whole and right."""
    from transformers import Trainer

    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    make = getattr(recipe, kind)
    saved = make(seed=9)
    if recipe.rank() == 0:
        saved.save_pretrained(f"{folder}/start")
    args = arguments(f"{folder}/run", recipe.zero_config(3), "fp32")
    if not dist.is_initialized():
        deepspeed.init_distributed()
    dist.barrier()
    model = type(saved).from_pretrained(f"{folder}/start")
    assert all(param.ds_status == ZeroParamStatus.NOT_AVAILABLE for param in model.parameters())
    recipe.assert_close(recipe.full_weights(model), recipe.full_weights(saved), 0.0)

    model.resize_token_embeddings(recipe.VOCAB + 8, mean_resizing=False)
    weights = recipe.full_weights(model)
    name = "model.embed_tokens.weight" if kind == "llama" else "transformer.wte.weight"
    before = recipe.full_weights(saved)
    assert weights[name].shape[0] == recipe.VOCAB + 8
    assert torch.equal(weights[name][: recipe.VOCAB], before[name])
    if kind == "llama":
        assert torch.equal(weights["lm_head.weight"][: recipe.VOCAB], before["lm_head.weight"])
    else:
        assert model.lm_head.weight is model.transformer.wte.weight
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, weights)
    recipe.assert_close(everyone[0], everyone[1], 0.0)

    seen = recipe.record(model)
    trainer = Trainer(model=model, args=args, train_dataset=recipe.Tokens())
    trainer.train()

    def fresh() -> Any:
        return make(vocab_size=recipe.VOCAB + 8)

    check_against_plain(trainer, weights, seen, fresh, "fp32")
    trainer.save_model(f"{folder}/export")
    dist.barrier()
    check_export(f"{folder}/export", recipe.full_weights(model), "fp32", model)
    generate(trainer)


def generate(trainer: Any) -> None:
    """The same greedy continuation as a plain copy of the model writes, whatever the ranks ask for."""
    engine = trainer.model_wrapped
    plain = type(trainer.model)(trainer.model.config)
    plain.load_state_dict(recipe.full_weights(trainer.model), strict=False)
    prompt = torch.arange(4 + recipe.rank()).unsqueeze(0) + 5
    for how in (engine, trainer.model):
        told = how.eval().generate(prompt, max_new_tokens=5, do_sample=False, synced_gpus=True)
        assert torch.equal(told, plain.eval().generate(prompt, max_new_tokens=5, do_sample=False)), told


@pytest.mark.flow(stage="3", dtype="fp32")
@pytest.mark.parametrize("kind", ("llama", "gpt2"))
def test_models_built_under_stage_3(ranks: Any, tmp_path: Path, kind: str) -> None:
    ranks(build_under_init, str(tmp_path), kind)


def without_gathering(folder: str) -> None:
    """16-bit gathering is off at stage 3: `save_model` writes a checkpoint that zero_to_fp32 makes whole."""
    import subprocess
    import sys

    from transformers import Trainer

    config = recipe.zero_config(3, zero_optimization={"stage3_gather_16bit_weights_on_model_save": False})
    args = arguments(f"{folder}/run", config, "bf16", max_steps=2)
    trainer = Trainer(model=recipe.llama(), args=args, train_dataset=recipe.Tokens())
    trainer.train()
    trainer.save_model(f"{folder}/export")
    dist.barrier()
    weights = recipe.full_weights(trainer.model)
    if recipe.rank() == 0:
        assert not list(Path(folder, "export").glob("*.safetensors"))
        done = subprocess.run(
            [sys.executable, "zero_to_fp32.py", ".", "whole", "--safe_serialization"],
            cwd=f"{folder}/export", capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        from safetensors.torch import load_file

        whole = load_file(f"{folder}/export/whole/model.safetensors")
        recipe.assert_close({key: value.bfloat16() for key, value in whole.items()}, weights, 0.0)
    dist.barrier()


@pytest.mark.flow(stage="3", dtype="bf16")
def test_export_without_gathering(ranks: Any, tmp_path: Path) -> None:
    ranks(without_gathering, str(tmp_path))


def evaluate_alone(folder: str) -> None:
    """`evaluate` and `predict` without training: an engine that has no optimizer."""
    from transformers import Trainer

    model = recipe.llama()
    plain = recipe.llama().eval()
    args = arguments(f"{folder}/run", recipe.zero_config(3), "fp32", max_steps=2)
    data = recipe.Tokens(8, 1)
    trainer = Trainer(model=model, args=args, train_dataset=recipe.Tokens(), eval_dataset=data)
    found = trainer.evaluate()["eval_loss"]
    with torch.no_grad():
        expected = float(plain(input_ids=data.rows, labels=data.rows).loss)
        logits = plain(input_ids=data.rows).logits
    assert abs(found - expected) < 1e-4, (found, expected)
    predicted = trainer.predict(data).predictions
    assert torch.allclose(torch.as_tensor(predicted), logits, atol=1e-4)


@pytest.mark.flow(stage="3", dtype="fp32")
def test_evaluating_before_training(ranks: Any, tmp_path: Path) -> None:
    ranks(evaluate_alone, str(tmp_path))


def train_twice(folder: str, stage: int) -> None:
    """One Trainer after another around the same model, the first of them still alive; the second trains on."""
    from transformers import Trainer

    model = recipe.llama()
    seen = recipe.record(model)
    kept = []
    for number in range(2):
        start = recipe.full_weights(model)
        seen.clear()
        args = arguments(f"{folder}/run{number}", recipe.zero_config(stage), "fp32")
        kept.append(Trainer(model=model, args=args, train_dataset=recipe.Tokens()))
        kept[-1].train()
        check_against_plain(kept[-1], start, seen, recipe.llama, "fp32")


@pytest.mark.flow(dtype="fp32")
@pytest.mark.parametrize("stage", (2, 3))
def test_training_again(ranks: Any, tmp_path: Path, stage: int) -> None:
    ranks(train_twice, str(tmp_path), stage)
