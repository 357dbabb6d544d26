"""Models built under ``zero.Init``: the same values and the same training as built whole, and only shards held."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.runtime.zero.mics import MiCS_Init
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.sharded_parameter import block_of
from tests.harness.models import SPECS
from tests.harness.offload import apart, offload_sections
from tests.harness.pool import on_ranks


def config(stage: int = 3, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": stage},
        **more,
    }


def under_init(build: Callable[[], nn.Module], settings: dict[str, Any] | None = None, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    with deepspeed.zero.Init(config_dict_or_path=settings or config()):
        return build()


def whole(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole values of a model, sharded or not. Collective where it is."""
    with deepspeed.zero.GatheredParameters(model.parameters()):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def assert_equal(seen: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert list(seen) == list(right)
    for name, value in right.items():
        assert torch.equal(seen[name], value), name
        assert seen[name].dtype is value.dtype, name


def layers(depth: int = 3, width: int = 16) -> nn.Module:
    return nn.Sequential(*(part for _ in range(depth) for part in (nn.Linear(width, width), nn.Tanh())))


def train(model: nn.Module, settings: dict[str, Any], steps: int = 2) -> dict[str, torch.Tensor]:
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        x = torch.randn(2, 16, generator=generator).to(next(model.parameters()).dtype)
        loss = (engine(x).float() - 1).square().mean()
        engine.backward(loss)
        engine.step()
    result = weights(engine.module)
    engine.destroy()
    return result


class Initialised(nn.Module):
    """Writes to the parameters of inner modules in every common way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)
        self.apply(self.fill)
        self.late = nn.Parameter(torch.randn(3))
        self.second.weight.data.mul_(2)
        with torch.no_grad():
            self.first.bias.copy_(torch.randn(7))
            self.second.bias += self.late
        self.first.weight.data = torch.randn(7, 5)

    def fill(self, part: nn.Module) -> None:
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, 0.5)
            part.bias.data.uniform_()
            nn.init.constant_(part.bias, 0.25)


# ---- values ----------------------------------------------------------------------------------------------------------


@on_ranks(1, 2, 3)
def test_every_kind_of_model_has_the_values_it_has_when_built_whole() -> None:
    for name, spec in SPECS.items():
        model = under_init(spec.build_module)
        assert_equal(weights(model), weights(whole(spec.build_module))), name


@on_ranks(2)
def test_what_constructors_write_to_inner_modules_counts_as_rank_0_has_it() -> None:
    right = weights(whole(Initialised))
    assert_equal(weights(under_init(Initialised)), right)
    assert_equal(weights(under_init(Initialised, seed=7 * dist.get_rank())), right)


class Large(nn.Module):
    """Parameters whose values the native library draws and which travel as they are; some are drawn again, sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first = nn.Embedding(300, 300), nn.Linear(300, 500)
        self.second, self.plain = nn.Linear(500, 300), nn.Parameter(torch.empty(40_001).uniform_(-1, 1))
        self.noise = torch.randn(3)
        self.apply(self.fill)

    def fill(self, part: nn.Module) -> None:
        if part is self.embed or part is self.second:
            nn.init.normal_(part.weight, std=0.02)


@pytest.mark.parametrize("dtype", ("bf16", "fp32"))
@on_ranks(1, 2, 3)
def test_large_parameters_are_drawn_as_torch_draws_them(dtype: str) -> None:
    settings = config(bf16={"enabled": True}) if dtype == "bf16" else config()
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    try:
        torch.set_default_dtype(kind)
        model = whole(Large)
    finally:
        torch.set_default_dtype(torch.float32)
    state = torch.get_rng_state()
    found = under_init(Large, settings)
    assert torch.equal(torch.get_rng_state(), state)
    assert_equal(weights(found), weights(model))


@pytest.mark.parametrize("how", ("once", "nested", "twice", "built before", "no init at stage 3", "lower stage"))
@on_ranks(1, 2)
def test_training_is_that_of_a_model_built_whole(how: str) -> None:
    settings = config(2 if how == "lower stage" else 3)
    right = train(whole(layers), config(2))
    if how == "nested":
        torch.manual_seed(0)
        with deepspeed.zero.Init(config_dict_or_path=settings):
            model = under_init(layers)
    elif how == "built before":
        model = whole(layers)
        deepspeed.zero.Init(module=model, config_dict_or_path=settings)
    elif how == "no init at stage 3":
        model = whole(layers)
    else:
        model = under_init(layers, settings)
    if how == "twice":
        deepspeed.zero.Init(module=model, config_dict_or_path=settings)
    assert_equal(train(model, settings), right)


@on_ranks(2)
def test_a_sharded_model_can_be_trained_below_stage_3() -> None:
    assert_equal(train(under_init(layers), config(1)), train(whole(layers), config(1)))


@on_ranks(2)
def test_initialize_inside_the_context() -> None:
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config()):
        model = layers()
        seen = train(model, config())
        after = nn.Linear(3, 3)
    assert_equal(seen, train(whole(layers), config()))
    assert after.weight.ds_status is ZeroParamStatus.NOT_AVAILABLE


@pytest.mark.parametrize("dtype", ("bf16", "fp16"))
@on_ranks(1, 2)
def test_parameters_are_made_in_the_dtype_of_the_config(dtype: str) -> None:
    wanted = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(16, 16)
            self.drawn = nn.Parameter(torch.Tensor(16).fill_(0.5))
            self.register_buffer("rates", 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8)))
            self.register_buffer("exact", torch.zeros(2, dtype=torch.float32))
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.line(x) * self.drawn

    model = under_init(Mixed, config(**{dtype: {"enabled": True}}))
    assert {param.dtype for param in model.parameters()} == {wanted}
    assert {name: buffer.dtype for name, buffer in model.named_buffers()} == {
        "rates": torch.float32, "exact": torch.float32, "steps": torch.long
    }  # fmt: skip
    settings = config(**{dtype: {"enabled": True}})
    seen = train(model, settings)
    assert all(value.dtype is wanted for value in seen.values())


@on_ranks(2)
def test_initialize_casts_shards_without_gathering() -> None:
    model = under_init(layers)  # fp32
    right = {name: value.bfloat16() for name, value in weights(whole(layers)).items()}
    settings = config(bf16={"enabled": True}, data_types={"keep_in_fp32_modules": ["2.bias"]})
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    seen = weights(engine.module)
    assert seen["2.bias"].dtype is torch.float32
    assert torch.equal(seen.pop("2.bias"), weights(whole(layers))["2.bias"])
    right.pop("2.bias")
    assert_equal(seen, right)
    engine.destroy()


# ---- what is held ----------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_only_shards_are_held_and_given_up_with_the_model() -> None:
    model = under_init(lambda: layers(4, 64))
    params = list(model.parameters())
    assert {param.ds_status for param in params} == {ZeroParamStatus.NOT_AVAILABLE}
    held = sum(block.shard.numel() for block in {id(b): b for b in (param._ds_keeper for param in params)}.values())
    total = sum(param.numel() for param in params)
    assert total // 2 <= held <= total // 2 + 32 * len(params)
    blocks = [weakref.ref(param._ds_keeper) for param in params]
    del model, params, held
    gc.collect()
    assert [block for block in blocks if block() is not None] == []


@on_ranks(2)
def test_meta_models_cost_their_shards_and_hold_nan_until_they_are_loaded() -> None:
    with torch.device("meta"):
        model = under_init(layers)
    assert all(not param.is_meta and param.shape for param in model.parameters())
    assert all(value.isnan().all() for value in weights(model).values())
    right = weights(whole(layers))
    model.load_state_dict(right)
    assert_equal(weights(model), right)
    assert_equal(train(model, config()), train(whole(layers), config()))


# ---- life of a sharded model before an engine ------------------------------------------------------------------------


@on_ranks(2)
def test_loading_as_client_libraries_do() -> None:
    """Per module, on rank 0 only, inside a gather; and as a whole, each rank its shard."""
    source = whole(layers, seed=5).state_dict()
    model = under_init(layers)

    def load(module: nn.Module, prefix: str = "") -> None:
        own = list(module.parameters(recurse=False))
        with deepspeed.zero.GatheredParameters(own, modifier_rank=0):
            if dist.get_rank() == 0:
                args = (source, prefix, {}, True, [], [], [])
                module._load_from_state_dict(*args)
        for name, child in module.named_children():
            load(child, prefix + name + ".")

    load(model)
    assert_equal(weights(model), source)
    other = under_init(layers)
    other.load_state_dict(source)
    assert_equal(weights(other), source)


@on_ranks(2)
def test_use_without_an_engine() -> None:
    model, twin = under_init(layers), whole(layers)
    x = torch.ones(2, 16)
    y = model(x)  # grad mode: every rank is sure to do the same
    assert torch.equal(y, twin(x))
    y.sum().backward()
    with deepspeed.zero.GatheredParameters(model.parameters()), torch.no_grad():
        assert torch.equal(model(x), twin(x))
    model = under_init(layers)
    with torch.no_grad(), pytest.raises(RuntimeError, match="GatheredParameters"):
        model(x)
    # What is known of a parameter before its model is whole.
    texts = []
    for part in [part for part in model.modules() if isinstance(part, nn.Linear)]:
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"'Linear\.weight \(\d+, \d+\) \(sharded as") as caught:
            part.weight.norm()
        texts.append(str(caught.value))
    assert len(set(texts)) == len(texts)


@on_ranks(2)
def test_copies_are_copies_of_shards() -> None:
    model = under_init(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2))
    right = weights(whole(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)))
    assert_equal(weights(model), right)
    twin = copy.deepcopy(model)
    for param in model.parameters():
        param.data.zero_()
    assert_equal(weights(twin), right)
    assert all(not value.any() for value in weights(model).values())


@on_ranks(2)
def test_ties_and_plain_parts_attached_later() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 4)
            self.head = nn.Linear(4, 9, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(x))

    def build() -> nn.Module:
        return nn.Sequential(Tied())

    def finish(model: nn.Module) -> nn.Module:
        torch.manual_seed(3)
        model.add_module("late", nn.Linear(9, 2))
        return model

    ids = torch.tensor([[1, 2], [3, 4]])
    results = []
    for model in (finish(under_init(build)), finish(whole(build))):
        assert model[0].head.weight is model[0].embed.weight
        engine, *_ = deepspeed.initialize(model=model, config=config())
        engine.backward(engine(ids).square().mean())
        engine.step()
        results.append(weights(engine.module))
        engine.destroy()
    assert_equal(*results)


# ---- contexts --------------------------------------------------------------------------------------------------------


class Unlucky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(3, 3)
        raise KeyError("in the constructor")


@on_ranks(1, 2)
def test_constructors_come_back_on_every_path() -> None:
    before = (nn.Linear.__init__, nn.Module.__init__, torch.empty, "__init_subclass__" in nn.Module.__dict__)
    for _ in range(2):
        with pytest.raises(KeyError), deepspeed.zero.Init(config_dict_or_path=config()):
            Unlucky()
        with pytest.raises(TypeError), deepspeed.zero.Init(config_dict_or_path=config()):
            nn.Sequential(nn.Linear(3, 3), "no module")
        with deepspeed.zero.Init(config_dict_or_path=config()), deepspeed.zero.Init(config_dict_or_path=config()):
            assert nn.Linear.__init__ is not before[0]
        now = (nn.Linear.__init__, nn.Module.__init__, torch.empty, "__init_subclass__" in nn.Module.__dict__)
        assert now == before
    assert not hasattr(nn.Linear(3, 3).weight, "ds_id")


@on_ranks(2)
def test_classes_defined_inside_and_past_init_subclass() -> None:
    with deepspeed.zero.Init(config_dict_or_path=config()):

        class Inside(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(6))

        @dataclass(eq=False)
        class Decorated(nn.Module):
            width: int

            def __post_init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(self.width))

        models = [Inside(), Decorated(5), Decorated(4)]
    for model in models:
        assert model.weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
        assert weights(model)["weight"].tolist() == [1.0] * model.weight.numel()


@on_ranks(2)
def test_modules_of_other_threads_are_left_alone() -> None:
    found: list[Any] = []
    with deepspeed.zero.Init(config_dict_or_path=config(bf16={"enabled": True})):
        thread = threading.Thread(target=lambda: found.append(nn.Linear(4, 4).weight))
        thread.start()
        thread.join()
        ours = nn.Linear(4, 4).weight
    assert not hasattr(found[0], "ds_id")
    assert found[0].dtype is torch.float32
    assert ours.dtype is torch.bfloat16
    assert hasattr(ours, "ds_id")


@on_ranks(1, create_group=False)
def test_the_process_group_is_made_when_there_is_none() -> None:
    with deepspeed.zero.Init(config_dict_or_path=config()):
        model = layers()
    assert dist.is_initialized()
    param = model[0].weight
    assert (param.ds_status, param.ds_numel, param.ds_shape) == (ZeroParamStatus.AVAILABLE, 256, (16, 16))
    assert torch.equal(param.ds_tensor, param)
    assert not param.ds_persist
    assert param.partition_numel() == 256
    dist.destroy_process_group()


@on_ranks(1)
def test_what_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"needs a config with zero_optimization.offload_param.nvme_path"):
        deepspeed.zero.Init(remote_device="nvme")
    with pytest.raises(ValueError, match="remote_device='gpu'"):
        deepspeed.zero.Init(remote_device="gpu")
    for arguments, said in (
        ({"enabled": "no"}, r"zero\.Init\(enabled\): expected True or False, found 'no'"),
        ({"pin_memory": "no"}, r"zero\.Init\(pin_memory\)"),
        ({"dtype": "bf16"}, r"zero\.Init\(dtype\): expected a floating torch dtype such as .*, found 'bf16'"),
        ({"dtype": torch.int8}, "found torch.int8"),
        ({"module": config()}, r"expected a torch\.nn\.Module, found dict; a config is passed as config_dict_or_path"),
    ):
        with pytest.raises(TypeError, match=said):
            deepspeed.zero.Init(**arguments)
        with pytest.raises(TypeError, match=said):
            MiCS_Init(**arguments)
    deepspeed.zero.Init(zero_quantized_weights=True)  # gathers are exact until the engine takes over
    deepspeed.zero.Init(remote_device="cpu", config_dict_or_path=config())  # the device itself
    deepspeed.zero.Init(enabled=False, config_dict_or_path={"no": "config"})
    partial = {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}
    deepspeed.zero.Init(config_dict_or_path=partial)


def _built_away(kind: str) -> None:
    settings = config(zero_optimization={"stage": 3, "stage3_max_live_parameters": 0, **offload_sections(kind)})
    with apart(), deepspeed.zero.Init(config_dict_or_path=settings):
        model = layers()
    block = block_of(model[0].weight)
    assert block.offloaded
    assert model[0].weight.ds_tensor.data_ptr() == block.shard.data_ptr()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        built = [param.detach().clone() for param in model.parameters()]
    plain = layers()
    for param, value in zip(plain.parameters(), built, strict=True):
        param.data.copy_(value)
    with apart():
        engine, *_ = deepspeed.initialize(model=model, config=settings)
    x = torch.ones(2, plain[0].in_features)
    assert torch.equal(engine(x), plain(x))
    engine.destroy()


@pytest.mark.parametrize("kind", ("param", "disk_param"))
@pytest.mark.parametrize("world", (1, 2))
def test_shards_are_built_where_the_config_keeps_them(pool, world: int, kind: str) -> None:
    pool.run(world, _built_away, kind)


@on_ranks(2)
def test_clients_replace_the_constructor_wrapper() -> None:
    from deepspeed.runtime.zero import partition_parameters as home

    seen = []
    original = home.zero_wrapper_for_fp_tensor_constructor

    def replacement(fn: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(fn)
        return original(fn, *args, **kwargs)

    home.zero_wrapper_for_fp_tensor_constructor = replacement
    try:
        with deepspeed.zero.Init(config_dict_or_path=config()):
            pass
    finally:
        home.zero_wrapper_for_fp_tensor_constructor = original
    assert home._orig_torch_arange in seen
    assert torch.arange is home._orig_torch_arange


def build_on_one_rank() -> str:
    try:
        if dist.get_rank() == 0:
            under_init(layers)
        else:
            deepspeed.comm.barrier()
    except RuntimeError as error:
        return str(error)
    return "nothing noticed"


def test_building_on_one_rank_alone_is_an_error_that_says_so(pool: Any) -> None:
    texts = pool.run(2, build_on_one_rank, timeout=60)
    assert all("barrier" in text and "scatter" in text for text in texts), texts
    assert any("zero.Init" in text for text in texts)
