"""Accelerate on two ranks: every way to hand over an optimizer, at every stage; numbers, resuming, exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.clients import accelerated as acc
from tests.clients import recipe
from tests.clients.accelerated import ACCUMULATION, CLIP, DECAY, MICRO_STEPS


def train_save_load(folder: str, stage: int, how: str, dtype: str, more: dict[str, Any]) -> None:
    made = acc.accelerator(stage, how, folder, dtype, **more)
    model = recipe.llama()
    start = acc.copied(model)
    seen = recipe.record(model)
    parts = acc.prepare(made, how, model)
    half = MICRO_STEPS // 2
    first = acc.loop(made, parts, range(half))
    made.save_state(f"{folder}/state")
    second = acc.loop(made, parts, range(half, MICRO_STEPS))
    exact = dtype == "fp32"
    plain = recipe.plain_run(
        acc.fresh_like(recipe.llama, start), recipe.windows(seen, ACCUMULATION), acc.rates(how), clip=CLIP,
        decay=DECAY, dtype=torch.float32 if exact else torch.bfloat16,
    )  # fmt: skip
    acc.check_numbers(acc.joined(first, second), plain, exact)
    weights = recipe.full_weights(parts[0].module)
    acc.check_weights(weights, plain, exact)

    exported(made, parts[0], weights, dtype, folder)

    # Back to the middle, and on: the same numbers.
    made.load_state(f"{folder}/state")
    assert acc.loop(made, parts, range(half, MICRO_STEPS)) == second
    recipe.assert_close(recipe.full_weights(parts[0].module), weights, 0.0)

    # So does another model in the same process, after the first has been given up.
    made.free_memory(*parts)
    assert made.deepspeed_engine_wrapped is None
    parts = acc.prepare(made, how, recipe.llama(seed=5))
    made.load_state(f"{folder}/state")
    assert acc.loop(made, parts, range(half, MICRO_STEPS)) == second
    recipe.assert_close(recipe.full_weights(parts[0].module), weights, 0.0)


def exported(made: Any, engine: Any, weights: dict[str, torch.Tensor], dtype: str, folder: str) -> None:
    """`get_state_dict`, `save_pretrained` and `save_model` give the trained weights; plain transformers loads them."""
    stored = torch.float32 if dtype == "fp32" else torch.bfloat16
    state = made.get_state_dict(engine)
    if made.is_main_process:
        assert {value.dtype for value in state.values()} == {stored}
        recipe.assert_close(state, weights, 0.0)
    whole = made.unwrap_model(engine)
    assert whole is engine.module
    whole.save_pretrained(
        f"{folder}/export", is_main_process=made.is_main_process, save_function=made.save, state_dict=state
    )
    made.save_model(engine, f"{folder}/model", max_shard_size="100KB")
    made.wait_for_everyone()
    if made.is_main_process:
        from safetensors.torch import load_file
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()
        loaded, info = type(whole).from_pretrained(f"{folder}/export", output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
        recipe.assert_close(recipe.full_weights(loaded), weights, 0.0)
        files = sorted(Path(folder, "model").glob("model-*.safetensors"))
        assert len(files) > 1
        recipe.assert_close({key: value for file in files for key, value in load_file(file).items()}, weights, 0.0)
    made.wait_for_everyone()


@pytest.mark.parametrize(
    ("stage", "how", "dtype"),
    (
        *((stage, "dummy", "fp32") for stage in (0, 1, 2, 3)), *((stage, "dummy", "bf16") for stage in (0, 1, 2, 3)),
        (0, "fields", "fp32"), (2, "fields", "fp32"), (3, "fields", "fp32"), (3, "fields", "bf16"),
        (1, "client", "fp32"), (3, "client", "fp32"),
    ),
)  # fmt: skip
def test_train_save_load(ranks: Any, tmp_path: Path, stage: int, how: str, dtype: str) -> None:
    ranks(train_save_load, str(tmp_path), stage, how, dtype, {})


@pytest.mark.parametrize(("stage", "devices"), ((2, ("cpu", "none")), (3, ("cpu", "cpu")), (3, ("nvme", "nvme"))))
def test_offload_by_fields(ranks: Any, tmp_path: Path, stage: int, devices: tuple[str, str]) -> None:
    """The client's AdamW becomes the CPU optimizer; its schedule still holds the groups."""
    fields = {"offload_optimizer_device": devices[0], "offload_param_device": devices[1]}
    if "nvme" in devices:
        fields |= {"offload_optimizer_nvme_path": str(tmp_path), "offload_param_nvme_path": str(tmp_path)}
    ranks(train_save_load, str(tmp_path), stage, "fields", "fp32", {"fields": fields})


def uneven_end(folder: str, stage: int) -> None:
    """The loader ends inside a window: Accelerate forces the boundary there, and the next epoch starts a new one."""
    made = acc.accelerator(stage, "dummy", folder)
    model = recipe.llama()
    start = acc.copied(model)
    seen = recipe.record(model)
    parts = acc.prepare(made, "dummy", model, count=12)  # 3 batches a rank
    for _ in range(2):
        acc.loop(made, parts, range(3))
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, seen)
    data = [[b for own in everyone for b in own[at]] for at in (slice(0, 2), slice(2, 3), slice(3, 5), slice(5, 6))]

    def weighed(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        # A short window is divided by the full number of micro-steps, as without the library's help.
        short = any(batch is one for window in (data[1], data[3]) for one in window)
        return model(**batch).loss / (2 if short else 1)

    plain = recipe.plain_run(
        acc.fresh_like(recipe.llama, start), data, acc.rates("dummy"), clip=CLIP, decay=DECAY, loss_of=weighed
    )
    recipe.assert_close(recipe.full_weights(parts[0].module), plain.weights, 2e-5)


@pytest.mark.parametrize("stage", (1, 3))
def test_a_loader_that_ends_inside_a_window(ranks: Any, tmp_path: Path, stage: int) -> None:
    ranks(uneven_end, str(tmp_path), stage)
