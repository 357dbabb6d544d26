"""Accelerate beyond the straight run: several models, groups, schedules by callable, zero.Init, unfinished windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients import accelerated as acc
from tests.clients import recipe
from tests.clients.accelerated import ACCUMULATION, CLIP, DECAY, MICRO_STEPS, RATE


def two_models(folder: str) -> None:
    """A trained student at stage 2 and a teacher at stage 3 that is only asked, each with its plugin."""
    from accelerate import Accelerator

    acc.on_cpu()
    plugins = {"student": acc.plugin(2, "dummy", folder), "teacher": acc.plugin(3, "client", folder)}
    plugins["teacher"].deepspeed_config["train_micro_batch_size_per_gpu"] = 2
    made = Accelerator(deepspeed_plugins=plugins, gradient_accumulation_steps=ACCUMULATION)
    student, teacher = recipe.llama(seed=1), recipe.llama(seed=2)
    start = acc.copied(student)
    told = recipe.llama(seed=2)
    seen = recipe.record(student)
    parts = acc.prepare(made, "dummy", student)
    made.state.select_deepspeed_plugin("teacher")
    teacher = made.prepare(teacher)
    made.state.select_deepspeed_plugin("student")
    teacher.eval()

    def distil(model: Any, batch: dict[str, torch.Tensor], asked: Any) -> torch.Tensor:
        with torch.no_grad():
            wanted = asked(input_ids=batch["input_ids"]).logits
        return (model(input_ids=batch["input_ids"]).logits - wanted).square().mean() * 10

    acc.loop(made, parts, range(MICRO_STEPS), lambda model, batch: distil(model, batch, teacher))
    plain = recipe.plain_run(
        acc.fresh_like(recipe.llama, start), recipe.windows(seen, ACCUMULATION), acc.rates("dummy"), clip=CLIP,
        decay=DECAY, loss_of=lambda model, batch: distil(model, batch, told),
    )  # fmt: skip
    recipe.assert_close(recipe.full_weights(parts[0].module), plain.weights, 2e-5)
    recipe.assert_close(recipe.full_weights(teacher.module), recipe.full_weights(told), 0.0)
    made.free_memory()


def two_trained_models(folder: str) -> None:
    """Both train, each with an Accelerator of its own that shares the process state; a checkpoint for each."""
    from accelerate import Accelerator

    acc.on_cpu()
    plugins = {"first": acc.plugin(2, "dummy", folder), "second": acc.plugin(3, "dummy", folder)}
    made = Accelerator(deepspeed_plugins=plugins, gradient_accumulation_steps=ACCUMULATION)
    other = Accelerator(gradient_accumulation_steps=ACCUMULATION)
    models = [recipe.llama(seed=1), recipe.gpt2(seed=2)]
    seen = [recipe.record(model) for model in models]
    users = (made, other)
    parts = []
    for number, one in enumerate(users):
        one.state.select_deepspeed_plugin(("first", "second")[number])
        parts.append(acc.prepare(one, "dummy", models[number]))
    half = MICRO_STEPS // 2
    for number, one in enumerate(users):
        acc.loop(one, parts[number], range(half))
        one.save_state(f"{folder}/state{number}")
    ends = [acc.loop(one, its, range(half, MICRO_STEPS)) for one, its in zip(users, parts, strict=True)]
    for number, make in enumerate((recipe.llama, recipe.gpt2)):
        data = recipe.windows(seen[number], ACCUMULATION)
        plain = recipe.plain_run(make(seed=number + 1), data, acc.rates("dummy"), clip=CLIP, decay=DECAY)
        recipe.assert_close(recipe.full_weights(parts[number][0].module), plain.weights, 2e-5)
    for number in (1, 0):
        users[number].load_state(f"{folder}/state{number}")
        assert acc.loop(users[number], parts[number], range(half, MICRO_STEPS)) == ends[number]
    made.free_memory()
    other.free_memory()


@pytest.mark.parametrize("flow", (two_models, two_trained_models))
def test_several_models_with_a_plugin_each(ranks: Any, tmp_path: Path, flow: Any) -> None:
    ranks(flow, str(tmp_path))


def own_groups(folder: str, stage: int, how: str) -> None:
    """Groups of the client; a schedule by callable and leaf modules, or neither and a model that is compiled."""
    from accelerate.utils import DummyOptim, DummyScheduler

    blocks = {"scheduler": None} if how == "dummy" else {}
    fields = {"transformer_moe_cls_names": "LlamaMLP"} if blocks and stage == 3 else {}
    backend = "no" if blocks else "eager"
    made = acc.accelerator(stage, how, folder, fields=fields, dynamo_backend=backend, **blocks)
    model = recipe.llama()
    start = acc.copied(model)
    seen = recipe.record(model)
    groups = recipe.matrices_decayed(model, DECAY)
    loader = torch.utils.data.DataLoader(recipe.Tokens(), batch_size=2)

    def schedule(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1.0 / (1 + number))

    if how == "dummy":
        given: Any = DummyOptim(groups, lr=RATE, weight_decay=DECAY)
        parts = made.prepare(model, given, loader, DummyScheduler(given, lr_scheduler_callable=schedule))
    else:
        loader, optimizer, engine = made.prepare(loader, torch.optim.AdamW(groups, lr=RATE), model)
        parts = (engine, optimizer, loader, NoSchedule())
    found = acc.loop(made, parts, range(MICRO_STEPS))
    rate = (lambda number: RATE / (1 + number)) if how == "dummy" else (lambda number: RATE)
    plain = recipe.plain_run(
        acc.fresh_like(recipe.llama, start), recipe.windows(seen, ACCUMULATION), rate, clip=CLIP, decay=DECAY,
        groups=recipe.matrices_decayed,
    )  # fmt: skip
    acc.check_numbers(found, plain, exact=True)
    acc.check_weights(recipe.full_weights(made.unwrap_model(parts[0])), plain, exact=True)


class NoSchedule:
    def step(self) -> None:
        """The client has no schedule."""


@pytest.mark.parametrize(("stage", "how"), ((2, "dummy"), (3, "dummy"), (3, "client")))
def test_groups_and_schedules_of_the_client(ranks: Any, tmp_path: Path, stage: int, how: str) -> None:
    ranks(own_groups, str(tmp_path), stage, how)


def unfinished_window(folder: str, stage: int) -> None:
    """What is saved between two micro-steps of a window says so; loading gives up what has been accumulated."""
    made = acc.accelerator(stage, "dummy", folder)
    model = recipe.llama()
    parts = acc.prepare(made, "dummy", model)
    acc.loop(made, parts, range(ACCUMULATION))
    said: list[str] = []
    parts[0].checkpoint._say = said.append
    made.save_state(f"{folder}/whole")
    assert not said
    expected = acc.loop(made, parts, range(ACCUMULATION, MICRO_STEPS))
    weights = recipe.full_weights(parts[0].module)
    made.load_state(f"{folder}/whole")
    acc.loop(made, parts, range(ACCUMULATION, ACCUMULATION + 1))
    made.save_state(f"{folder}/part")
    assert len([line for line in said if "gradients" in line and "not saved" in line]) == 1, said
    made.load_state(f"{folder}/whole")  # the gradients of one micro-step are given up
    assert acc.loop(made, parts, range(ACCUMULATION, MICRO_STEPS)) == expected
    recipe.assert_close(recipe.full_weights(parts[0].module), weights, 0.0)


@pytest.mark.parametrize("stage", (0, 2, 3))
def test_saving_inside_a_window(ranks: Any, tmp_path: Path, stage: int) -> None:
    ranks(unfinished_window, str(tmp_path), stage)


def build_under_init(folder: str) -> None:
    """`from_pretrained` after the Accelerator says stage 3: sharded at birth; a frozen part; saved and loaded."""

    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    saved = recipe.llama(seed=9)
    if recipe.rank() == 0:
        saved.save_pretrained(f"{folder}/start")
    made = acc.accelerator(3, "dummy", folder, fields={"zero3_init_flag": True})
    made.wait_for_everyone()
    model = type(saved).from_pretrained(f"{folder}/start")
    assert all(param.ds_status == ZeroParamStatus.NOT_AVAILABLE for param in model.parameters())
    recipe.assert_close(recipe.full_weights(model), recipe.full_weights(saved), 0.0)

    for net in (model, saved):
        net.get_input_embeddings().requires_grad_(False)
    seen = recipe.record(model)
    parts = acc.prepare(made, "dummy", model)
    parts[0].train()  # `from_pretrained` leaves a model in evaluation
    found = acc.loop(made, parts, range(MICRO_STEPS))
    plain = recipe.plain_run(saved, recipe.windows(seen, ACCUMULATION), acc.rates("dummy"), clip=CLIP, decay=DECAY)
    acc.check_numbers(found, plain, exact=True)
    weights = recipe.full_weights(parts[0].module)
    acc.check_weights(weights, plain, exact=True)
    made.save_state(f"{folder}/state", exclude_frozen_parameters=True)
    assert made.load_state(f"{folder}/state", load_module_strict=False) is None
    recipe.assert_close(recipe.full_weights(parts[0].module), weights, 0.0)
    state = made.get_state_dict(parts[0])
    if made.is_main_process:
        recipe.assert_close(state, weights, 0.0)


def test_models_built_under_stage_3(ranks: Any, tmp_path: Path) -> None:
    ranks(build_under_init, str(tmp_path))


def only_asked(folder: str, stage: int) -> None:
    """A model alone is prepared, for evaluation: no optimizer anywhere."""
    made = acc.accelerator(stage, "client", folder)
    model, plain = recipe.llama(), recipe.llama().eval()
    loader = torch.utils.data.DataLoader(recipe.Tokens(16, 1), batch_size=2)
    engine, loader = made.prepare(model, loader)
    engine.eval()
    losses = []
    with torch.no_grad():
        for batch in loader:
            losses.append(made.gather_for_metrics(engine(**batch).loss.repeat(2)))
        data = recipe.Tokens(16, 1).rows
        expected = float(plain(input_ids=data, labels=data).loss)
    assert abs(float(torch.cat(losses).mean()) - expected) < 1e-4
    recipe.assert_close(recipe.full_weights(made.unwrap_model(engine)), recipe.full_weights(plain), 0.0)
    made.free_memory()


def only_asked_sharded_states(folder: str) -> None:
    made = acc.accelerator(2, "client", folder)
    loader = torch.utils.data.DataLoader(recipe.Tokens(16, 1), batch_size=2)
    with pytest.raises(ValueError, match=r"zero_optimization\.stage=2 shards optimizer state, .*no optimizer"):
        made.prepare(recipe.llama(), loader)


def test_states_to_shard_need_an_optimizer(ranks: Any, tmp_path: Path) -> None:
    ranks(only_asked_sharded_states, str(tmp_path))


@pytest.mark.parametrize("stage", (0, 3))
def test_evaluating_alone(ranks: Any, tmp_path: Path, stage: int) -> None:
    ranks(only_asked, str(tmp_path), stage)
