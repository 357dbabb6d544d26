"""PEFT on two ranks: LoRA by `deepspeed.initialize`, Trainer and Accelerate trains as a plain loop does."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.clients import accelerated as acc
from tests.clients import recipe
from tests.clients.test_examples import example
from tests.clients.test_trainer import arguments, check_against_plain, logged

RATE, STEPS, ACCUMULATION, CLIP = 1e-2, 4, 2, 0.5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def lora(base: Any, seed: int = 3, **changes: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    return get_peft_model(base, LoraConfig(**{**settings, **changes}))


def config(stage: int, dtype: str = "fp32") -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.0}},
        # Base matrices are sharded at stage 3, adapters are below the threshold, as they are in real models.
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 300},
    }


def engine_of(model: Any, settings: dict[str, Any]) -> Any:
    import deepspeed

    trained = [param for param in model.parameters() if param.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=trained, config=settings)[0]


def train(engine: Any, micro_steps: range) -> tuple[list[float], list[float]]:
    """Losses of each micro-step and norms of each update, of data that depend on the rank."""
    rows = recipe.Tokens().rows
    losses, norms = [], []
    for number in micro_steps:
        at = 4 * number + 2 * recipe.rank()
        batch = rows[at : at + 2]
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        if (number + 1) % ACCUMULATION == 0:
            norms.append(float(engine.get_global_grad_norm()))
    return losses, norms


def only_adapters(folder: str, weights: dict[str, torch.Tensor], more: tuple[str, ...] = ()) -> None:
    """The folder holds every trained weight and nothing of the base; plain PEFT puts it on a plain base."""
    if recipe.rank() == 0:
        from peft import PeftModel
        from safetensors.torch import load_file

        stored = load_file(f"{folder}/adapter_model.safetensors")
        assert stored
        assert all("lora_" in name or any(part in name for part in more) for name in stored), sorted(stored)
        loaded = PeftModel.from_pretrained(recipe.llama(), folder)
        found = {name: value.detach() for name, value in loaded.named_parameters()}
        kept = {name for name in weights if "lora_" in name or "modules_to_save" in name}
        assert len(kept) == len(stored)
        recipe.assert_close({name: found[name] for name in kept}, {name: weights[name] for name in kept}, 0.0)
    dist.barrier()


def initialize(folder: str, stage: int, dtype: str) -> None:
    import deepspeed

    deepspeed.init_distributed()
    more = {"modules_to_save": ["lm_head"]}
    model = lora(recipe.llama(), **more)
    plain_model = lora(recipe.llama(), **more)
    recipe.assert_close(recipe.full_weights(model), recipe.full_weights(plain_model), 0.0)
    before = recipe.full_weights(model)
    seen = recipe.record(model)
    engine = engine_of(model, config(stage, dtype))
    half = ACCUMULATION * STEPS // 2
    _, first = train(engine, range(half))
    engine.save_checkpoint(f"{folder}/state", exclude_frozen_parameters=True)
    losses, second = train(engine, range(half, 2 * half))
    plain = recipe.plain_run(
        plain_model, recipe.windows(seen, ACCUMULATION), lambda _: RATE, clip=CLIP, dtype=DTYPES[dtype]
    )
    exact = dtype == "fp32"
    recipe.assert_numbers(first + second, plain.norms, 5e-4 if exact else 5e-2, "norm")
    weights = recipe.full_weights(engine.module)
    recipe.assert_close(weights, plain.weights, *((1e-4,) if exact else (2 * RATE * STEPS, 2**-7)))
    for name, value in weights.items():
        if not ("lora_" in name or "modules_to_save" in name):
            assert torch.equal(value, before[name].to(DTYPES[dtype]).float()), f"{name} is frozen"

    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        if recipe.rank() == 0:
            engine.module.save_pretrained(f"{folder}/adapter")
    dist.barrier()
    only_adapters(f"{folder}/adapter", weights, ("lm_head",))

    # A run taken up in the middle by a fresh process would do this.
    engine.destroy()
    again = engine_of(lora(recipe.llama(), seed=9, **more), config(stage, dtype))
    again.load_checkpoint(f"{folder}/state", load_module_strict=False)
    assert train(again, range(half, 2 * half)) == (losses, second)
    recipe.assert_close(recipe.full_weights(again.module), weights, 0.0)
    merged(again, weights)


def merged(engine: Any, weights: dict[str, torch.Tensor]) -> None:
    """`merge_and_unload` of the trained model gives what plain PEFT merges."""
    import deepspeed

    dtype = next(engine.module.parameters()).dtype
    told = lora(recipe.llama(), modules_to_save=["lm_head"]).to(dtype)
    with torch.no_grad():
        for name, param in told.named_parameters():
            param.copy_(weights[name])
    told = told.merge_and_unload()
    model = engine.module
    engine.destroy()
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        model = model.merge_and_unload()
    recipe.assert_close(recipe.full_weights(model), recipe.full_weights(told), 0.0)


@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_lora(ranks: Any, tmp_path: Path, stage: int, dtype: str) -> None:
    ranks(initialize, str(tmp_path), stage, dtype)


def mixed_dtypes(folder: str, stage: int) -> None:
    """A frozen base in bf16 under adapters in fp32, as PEFT makes them for a base that is stored small."""
    import deepspeed

    deepspeed.init_distributed()
    model = lora(recipe.llama().to(torch.bfloat16))
    assert {param.dtype for param in model.parameters() if param.requires_grad} == {torch.float32}
    plain_model = lora(recipe.llama().to(torch.bfloat16))
    seen = recipe.record(model)
    engine = engine_of(model, config(stage))
    _, norms = train(engine, range(ACCUMULATION * STEPS))
    assert {param.dtype for name, param in engine.module.named_parameters() if "lora_" in name} == {torch.float32}
    assert engine.module.get_input_embeddings().weight.dtype == torch.bfloat16
    plain = recipe.plain_run(plain_model, recipe.windows(seen, ACCUMULATION), lambda _: RATE, clip=CLIP)
    # Forward and backward of the base round to bf16; adapters that differ in the last bit round differently.
    recipe.assert_numbers(norms, plain.norms, 5e-2, "norm")
    weights = recipe.full_weights(engine.module)
    recipe.assert_close(weights, plain.weights, 2 * RATE * STEPS)
    apart = torch.cat([(weights[name] - value).abs().flatten() for name, value in plain.weights.items()])
    assert (apart > RATE / 10).float().mean() < 0.01
    engine.save_checkpoint(f"{folder}/state")
    again = engine_of(lora(recipe.llama().to(torch.bfloat16), seed=9), config(stage))
    again.load_checkpoint(f"{folder}/state")
    recipe.assert_close(recipe.full_weights(again.module), weights, 0.0)


@pytest.mark.parametrize("stage", (0, 2, 3))
def test_adapters_in_fp32_on_a_base_in_bf16(ranks: Any, tmp_path: Path, stage: int) -> None:
    ranks(mixed_dtypes, str(tmp_path), stage)


def born_sharded(folder: str, changes: dict[str, Any]) -> None:
    """The base is sharded before adapters are put on it; initialisations that read its weights gather them."""
    from transformers.integrations import HfDeepSpeedConfig

    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    deepspeed.init_distributed()
    saved = recipe.llama()
    if recipe.rank() == 0:
        saved.save_pretrained(f"{folder}/base")
    dist.barrier()
    plain_model = lora(saved, **changes)
    kept = HfDeepSpeedConfig(config(3))
    base = type(saved).from_pretrained(f"{folder}/base")
    assert all(param.ds_status == ZeroParamStatus.NOT_AVAILABLE for param in base.parameters())
    model = lora(base, **changes)
    assert model.get_nb_trainable_parameters() == plain_model.get_nb_trainable_parameters()
    recipe.assert_close(recipe.full_weights(model), recipe.full_weights(plain_model), 1e-6)
    seen = recipe.record(model)
    engine = engine_of(model, config(3))
    engine.train()
    _, norms = train(engine, range(ACCUMULATION * STEPS))
    del kept
    plain = recipe.plain_run(plain_model, recipe.windows(seen, ACCUMULATION), lambda _: RATE, clip=CLIP)
    recipe.assert_numbers(norms, plain.norms, 5e-4, "norm")
    recipe.assert_close(recipe.full_weights(engine.module), plain.weights, 1e-4)


@pytest.mark.parametrize(
    "changes", ({"modules_to_save": ["lm_head"]}, {"use_dora": True}, {"init_lora_weights": "pissa"}),
    ids=("modules to save", "DoRA", "PiSSA"),
)  # fmt: skip
def test_a_base_that_is_born_sharded(ranks: Any, tmp_path: Path, changes: dict[str, Any]) -> None:
    ranks(born_sharded, str(tmp_path), changes)


def trainer(folder: str, stage: int, dtype: str) -> None:
    """Through the Trainer: numbers, adapters in every save, a run resumed, the best adapter loaded at the end."""
    from transformers import Trainer

    def make(seed: int = 3) -> Any:
        return lora(recipe.llama(), seed)

    model = make()
    start = acc.copied(model)
    seen = recipe.record(model)
    common = {"save_strategy": "steps", "save_steps": 3}
    args = arguments(f"{folder}/run", recipe.zero_config(stage), dtype, **common)
    run = Trainer(model=model, args=args, train_dataset=recipe.Tokens())
    run.train()
    check_against_plain(run, start, seen, make, dtype)
    weights = recipe.full_weights(run.model)
    run.save_model(f"{folder}/export")
    dist.barrier()
    only_adapters(f"{folder}/export", weights)
    only_adapters(f"{folder}/run/checkpoint-6", weights)
    args = arguments(f"{folder}/run", recipe.zero_config(stage), dtype, **common)
    resumed = Trainer(model=make(9), args=args, train_dataset=recipe.Tokens())
    resumed.train(resume_from_checkpoint=f"{folder}/run/checkpoint-3")
    recipe.assert_numbers(logged(resumed, "loss"), logged(run, "loss"), 0.0, "loss of the resumed run")
    recipe.assert_close(recipe.full_weights(resumed.model), weights, 0.0)


@pytest.mark.parametrize(("stage", "dtype"), ((0, "fp32"), (2, "fp32"), (3, "fp32"), (3, "bf16")))
def test_lora_by_the_trainer(ranks: Any, tmp_path: Path, stage: int, dtype: str) -> None:
    ranks(trainer, str(tmp_path), stage, dtype)


def accelerate(folder: str, stage: int) -> None:
    made = acc.accelerator(stage, "dummy", folder)
    model = lora(recipe.llama())
    plain_model = copy.deepcopy(model)
    seen = recipe.record(model)
    parts = acc.prepare(made, "dummy", model)
    half = acc.MICRO_STEPS // 2
    first = acc.loop(made, parts, range(half))
    made.save_state(f"{folder}/state")
    second = acc.loop(made, parts, range(half, acc.MICRO_STEPS))
    plain = recipe.plain_run(
        plain_model, recipe.windows(seen, ACCUMULATION), acc.rates("dummy"), clip=acc.CLIP, decay=acc.DECAY
    )
    acc.check_numbers(acc.joined(first, second), plain, exact=True)
    weights = recipe.full_weights(parts[0].module)
    acc.check_weights(weights, plain, exact=True)
    made.unwrap_model(parts[0]).save_pretrained(
        f"{folder}/export", is_main_process=made.is_main_process, state_dict=made.get_state_dict(parts[0])
    )
    made.wait_for_everyone()
    only_adapters(f"{folder}/export", weights)
    made.load_state(f"{folder}/state")
    assert acc.loop(made, parts, range(half, acc.MICRO_STEPS)) == second
    recipe.assert_close(recipe.full_weights(parts[0].module), weights, 0.0)


@pytest.mark.parametrize("stage", (0, 2, 3))
def test_lora_by_accelerate(ranks: Any, tmp_path: Path, stage: int) -> None:
    ranks(accelerate, str(tmp_path), stage)


@pytest.mark.flow(stage="3", dtype="fp32")
def test_the_example(ranks: Any, tmp_path: Path) -> None:
    found = ranks(example, "lora", str(tmp_path))[0]
    assert 5.0 < found["before"] < 6.5  # ln 256 is 5.5
    assert found["after"] < 4.0
    assert len(found["saved"]) == 2 * 2 * 7 + 1  # A and B of 7 matrices in 2 layers, and the head
    assert all("lora_" in name or "lm_head" in name for name in found["saved"])
