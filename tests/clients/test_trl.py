"""TRL's trainers on two ranks: each trains as it does under DDP, generates between steps, and exports whole weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients import recipe, trl_recipe


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models")
    trl_recipe.store_models(folder)
    return str(folder)


_PLAIN: dict[tuple[str, str], dict[str, Any]] = {}


@pytest.fixture
def plain(ranks: Any, models: str, tmp_path: Path) -> Callable[[str, str], dict[str, Any]]:
    """What a trainer gives without DeepSpeed, as DDP on as many ranks; run once."""

    def run(kind: str, dtype: str) -> dict[str, Any]:
        if (kind, dtype) not in _PLAIN:
            _PLAIN[kind, dtype] = ranks(trl_recipe.train, kind, models, str(tmp_path / "plain"), None, dtype)[0]
        return _PLAIN[kind, dtype]

    return run


def check(found: dict[str, Any], expected: dict[str, Any], dtype: str) -> None:
    exact = dtype == "fp32"
    numbers = [key for key in expected if key != "weights"]
    assert {"loss", "grad_norm"} <= set(numbers)
    for key in numbers:
        # A logged loss may be a difference near 0, so what counts is relative to 1 there.
        for step, (a, b) in enumerate(zip(found[key], expected[key], strict=True)):
            allowed = (2e-4 if exact else 5e-2) * max(abs(b), 1.0 if key != "grad_norm" else 1e-3)
            assert abs(a - b) <= allowed, f"{key} of step {step + 1}: {a!r}, under DDP {b!r}"
    recipe.assert_close(found["weights"], expected["weights"], *((2e-5,) if exact else (6e-3, 2**-7)))


ROWS = [
    *((kind, 3, "fp32") for kind in trl_recipe.KINDS),
    *((kind, 2, "fp32") for kind in trl_recipe.KINDS if kind not in trl_recipe.EXPERIMENTAL),
    *(("sft", stage, "fp32") for stage in (0, 1)),
    *((kind, 3, "bf16") for kind in ("sft", "dpo", "grpo")),
]


@pytest.mark.parametrize(("kind", "stage", "dtype"), ROWS)
def test_trains_as_under_ddp(
    ranks: Any, plain: Any, models: str, tmp_path: Path, kind: str, stage: int, dtype: str
) -> None:
    expected = plain(kind, dtype)
    found = ranks(trl_recipe.train, kind, models, str(tmp_path), stage, dtype)[0]
    check(found, expected, dtype)
    check_export(tmp_path / "export", found)


def check_export(folder: Path, found: dict[str, Any]) -> None:
    import transformers

    loaded, info = getattr(transformers, found["model"]).from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    weights = {name: param.detach().float() for name, param in loaded.named_parameters()}
    recipe.assert_close(weights, found["weights"], 0.0)


def generate_between_steps(models: str, folder: str, stage: int, gather: bool) -> list[float]:
    """After every step: TRL takes the engine's hooks off, generates on whole weights and puts the hooks back."""
    from transformers import TrainerCallback
    from trl.models import unwrap_model_for_generation

    trainer = trl_recipe.make("sft", models, folder, stage, "fp32")
    prompt = torch.arange(4 + recipe.rank()).unsqueeze(0) + 5
    told = []

    class Generate(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            plain = type(trainer.model)(trainer.model.config)
            plain.load_state_dict(recipe.full_weights(trainer.model), strict=False)
            expected = plain.eval().generate(prompt, max_new_tokens=4, do_sample=False)
            with unwrap_model_for_generation(
                trainer.model_wrapped, trainer.accelerator, gather_deepspeed3_params=gather
            ) as model:
                if stage == 3 and gather:
                    assert all(param.ds_status.name == "AVAILABLE" for param in model.parameters())
                # Where weights are gathered on use, every rank has to make as many forwards.
                found = model.eval().generate(prompt, max_new_tokens=4, do_sample=False, synced_gpus=not gather)
                model.train()
            told.append(torch.equal(found, expected))

    trainer.add_callback(Generate())
    trainer.train()
    assert told == [True] * trl_recipe.STEPS
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.flow(dtype="fp32")
@pytest.mark.parametrize(("stage", "gather"), ((2, True), (3, True), (3, False)))
def test_generation_between_steps(
    ranks: Any, plain: Any, models: str, tmp_path: Path, stage: int, gather: bool
) -> None:
    losses = ranks(generate_between_steps, models, str(tmp_path), stage, gather)[0]
    recipe.assert_numbers(losses, plain("sft", "fp32")["loss"], 2e-5, "loss")


def hook_surgery(models: str, folder: str) -> None:
    """`remove_hooks` and `add_hooks` on the training engine and on one without an optimizer; both compute as before."""
    from trl.models import prepare_deepspeed
    from trl.models.utils import add_hooks, remove_hooks

    import deepspeed

    trainer = trl_recipe.make("dpo", models, folder, 3, "fp32")
    trainer.train()
    policy, reference = trainer.model_wrapped, trainer.ref_model
    other = prepare_deepspeed(trl_recipe.loaded(Path(models) / "other"), trainer.accelerator)
    tokens = recipe.Tokens(2, seed=recipe.rank()).rows
    for engine in (policy, reference, other):
        engine.eval()
        plain = type(engine.module)(engine.module.config).eval()
        plain.load_state_dict(recipe.full_weights(engine.module), strict=False)
        with torch.no_grad():
            expected = plain(input_ids=tokens).logits
            with deepspeed.zero.GatheredParameters(engine.parameters()):
                remove_hooks(engine)
                gathered = engine.module(input_ids=tokens).logits
                add_hooks(engine)
            again = engine(input_ids=tokens).logits
        assert torch.equal(gathered, expected)
        assert torch.equal(again, expected)
    # The reference model is the other one, and training has left it alone.
    recipe.assert_close(recipe.full_weights(reference.module), recipe.full_weights(other.module), 0.0)


@pytest.mark.flow(stage="3", dtype="fp32")
def test_hooks_are_taken_off_and_put_back(ranks: Any, models: str, tmp_path: Path) -> None:
    ranks(hook_surgery, models, str(tmp_path))
