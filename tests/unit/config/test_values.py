"""Which values are taken, converted or refused, and how a refusal reads."""

from __future__ import annotations

import math

import pytest

from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from tests.unit.config.cases import BATCH, only_problem, parse, problems


def zero(**section) -> dict:
    return {"zero_optimization": section}


@pytest.mark.parametrize(
    ("config", "read", "value"),
    (
        (zero(reduce_bucket_size=5e8), lambda c: c.zero_config.reduce_bucket_size, 500_000_000),
        (zero(stage3_prefetch_bucket_size=943718.4), lambda c: c.zero_config.prefetch_bucket_size, 943718),
        (zero(sub_group_size=0), lambda c: c.zero_config.sub_group_size, 0),
        (zero(stage="2"), lambda c: c.zero_config.stage, 2),
        ({"train_batch_size": 4.0}, lambda c: c.train_batch_size, 4),
        ({"steps_per_print": math.inf}, lambda c: c.steps_per_print, None),
        ({"steps_per_print": False}, lambda c: c.steps_per_print, None),
        ({"steps_per_print": 0}, lambda c: c.steps_per_print, None),
        ({"steps_per_print": 10.0}, lambda c: c.steps_per_print, 10),
        ({}, lambda c: c.gradient_clipping, 1.0),
        ({"gradient_clipping": True}, lambda c: c.gradient_clipping, 1.0),
        ({"gradient_clipping": 0}, lambda c: c.gradient_clipping, 0.0),
        ({"gradient_clipping": None}, lambda c: c.gradient_clipping, 0.0),
        ({"bf16": {"enabled": "true"}}, lambda c: c.bfloat16_config.enabled, True),
        ({"bf16": {"enabled": 1}}, lambda c: c.bfloat16_config.enabled, True),
        ({"log_level": "INFO"}, lambda c: c.log_level, "info"),
        ({"communication_data_type": "FP32"}, lambda c: str(c.communication_data_type), "torch.float32"),
        ({"data_types": {"grad_accum_dtype": "torch.bfloat16"}}, lambda c: c.grad_accum_dtype, "bf16"),
        ({"data_types": {"grad_accum_dtype": None}}, lambda c: c.grad_accum_dtype, None),
        ({"torch_autocast": {"dtype": "half"}}, lambda c: str(c.torch_autocast_dtype), "torch.float16"),
        ({"checkpoint": {"tag_validation": "fail"}}, lambda c: c.checkpoint_tag_validation_fail, True),
        ({"checkpoint": {"tag_validation": "Ignore"}}, lambda c: c.checkpoint_tag_validation_enabled, False),
        ({"checkpoint": {"keep_last": 3}}, lambda c: c.sections.checkpoint.keep_last, 3),
        ({"optimizer": {"type": "ADAMW"}}, lambda c: c.optimizer_name, "adamw"),
        ({"optimizer": {"type": "SGD"}}, lambda c: c.optimizer_name, "SGD"),
        ({"data_types": {"keep_in_fp32_modules": ["norm"]}}, lambda c: c.keep_in_fp32_modules, ["norm"]),
        (zero(leaf_module={"names": "a"}), lambda c: c.zero_config.leaf_module.names, ["a"]),
        (zero(leaf_module={"names": ["a", "b", "a"]}), lambda c: c.zero_config.leaf_module.names, ["a", "b"]),
        (zero(stage=2), lambda c: c.zero_config.overlap_comm, False),
        (zero(stage=2, overlap_comm=None), lambda c: c.zero_config.overlap_comm, False),
        (zero(stage=2, overlap_comm=True), lambda c: c.zero_config.overlap_comm, True),
    ),
)
def test_taken(config: dict, read, value) -> None:
    assert read(parse(config)) == value


@pytest.mark.parametrize(
    ("config", "line"),
    (
        ({"gradient_accumulation_steps": "2"}, 'gradient_accumulation_steps: found "2" (string); expected integer > 0'),
        ({"gradient_accumulation_steps": 2.5}, "gradient_accumulation_steps: found 2.5 (number); expected integer > 0"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps: found 0 (integer); expected integer > 0"),
        ({"gradient_accumulation_steps": True}, "gradient_accumulation_steps: found true (boolean); expected integer"),
        ({"train_batch_size": -8}, "train_batch_size: found -8 (integer); expected integer > 0"),
        (zero(stage=4), "zero_optimization.stage: found 4 (integer); expected 0, 1, 2 or 3"),
        (zero(stage="two"), 'zero_optimization.stage: found "two" (string); expected 0, 1, 2 or 3'),
        (zero(stage=None), "zero_optimization.stage: found null; expected 0, 1, 2 or 3"),
        (zero(reduce_bucket_size=0), "zero_optimization.reduce_bucket_size: found 0 (integer); expected integer > 0"),
        (
            zero(reduce_bucket_size="5e8"),
            'zero_optimization.reduce_bucket_size: found "5e8" (string); expected integer',
        ),
        (
            zero(reduce_bucket_size=math.inf),
            "zero_optimization.reduce_bucket_size: found Infinity (number); expected int",
        ),
        (
            zero(max_live_parameters=math.nan),
            "zero_optimization.max_live_parameters: found NaN (number); expected integer",
        ),
        (
            zero(stage3_max_live_parameters=-1),
            "zero_optimization.stage3_max_live_parameters: found -1 (integer); expected",
        ),
        (zero(overlap_comm="yes"), 'zero_optimization.overlap_comm: found "yes" (string); expected true or false'),
        (
            zero(offload_param={"device": "disk"}),
            'zero_optimization.offload_param.device: found "disk" (string); expected one of none, cpu, nvme',
        ),
        (
            zero(zenflow={"update_interval": 0}, offload_optimizer={"device": "cpu"}, overlap_comm=True),
            "zero_optimization.zenflow.update_interval: found 0 (integer); expected",
        ),
        (
            zero(zenflow={"topk_ratio": 1}, offload_optimizer={"device": "cpu"}, overlap_comm=True),
            "zero_optimization.zenflow.topk_ratio: found 1 (integer); expected number above 0 and below 1;",
        ),
        (
            zero(stage=3, offload_optimizer={"ratio": 1.5}),
            "zero_optimization.offload_optimizer.ratio: found 1.5 (number); expected number from 0 to 1;",
        ),
        ({"fp16": {"loss_scale": "128"}}, 'fp16.loss_scale: found "128" (string); expected number >= 0'),
        ({"fp16": {"loss_scale": True}}, "fp16.loss_scale: found true (boolean); expected number >= 0"),
        ({"fp16": {"loss_scale": math.inf}}, "fp16.loss_scale: found Infinity (number); expected"),
        ({"gradient_clipping": -1}, "gradient_clipping: found -1 (integer); expected number >= 0"),
        ({"gradient_clipping": "1.0"}, 'gradient_clipping: found "1.0" (string); expected number >= 0'),
        (
            {"communication_data_type": "fp8"},
            'communication_data_type: found "fp8" (string); expected fp32, fp16 or bf16',
        ),
        ({"gradient_allreduce_op": "max"}, 'gradient_allreduce_op: found "max" (string); expected one of mean, sum'),
        ({"torch_autocast": {"dtype": "fp8"}}, 'torch_autocast.dtype: found "fp8" (string); expected fp32, fp16, bf16'),
        (
            {"torch_autocast": {"lower_precision_safe_modules": [1]}},
            "torch_autocast.lower_precision_safe_modules: found",
        ),
        (
            {"data_types": {"keep_in_fp32_modules": "norm"}},
            'data_types.keep_in_fp32_modules: found "norm" (string); expected "auto" or a list',
        ),
        ({"data_types": {"grad_accum_dtype": "int8"}}, "data_types.grad_accum_dtype: found"),
        (
            {"checkpoint": {"tag_validation": "perhaps"}},
            'checkpoint.tag_validation: found "perhaps" (string); expected one of IGNORE, WARN, FAIL',
        ),
        (
            {"checkpoint": {"parallel_write": {"pipeline_stage": "x"}}},
            "checkpoint.parallel_write.pipeline_stage: found",
        ),
        (
            {"log_level": "loud"},
            'log_level: found "loud" (string); expected one of debug, info, warning, error, critical',
        ),
        ({"vocabulary_size": 0}, "vocabulary_size: found 0"),
        ({"steps_per_print": -1}, "steps_per_print: found -1 (integer); expected integer >= 0, inf or null"),
        ({"autotuning": {"results_dir": ""}}, 'autotuning.results_dir: found "" (string); expected non-empty string'),
        ({"expert_parallel": {"load_balance_coeff": 0.1}}, "expert_parallel.load_balance_coeff: found 0.1"),
        (
            {"expert_parallel": {"preset_model": "gpt"}},
            'expert_parallel.preset_model: found "gpt" (string); expected one',
        ),
        ({"zero_optimization": 2}, "zero_optimization: found 2 (integer); expected a mapping with keys stage,"),
        ({"optimizer": "Adam"}, 'optimizer: found "Adam" (string); expected a mapping with keys type, params'),
        (
            {"optimizer": {"type": "Adam", "params": {"lr": "1e-3"}}},
            'optimizer.params.lr: found "1e-3" (string); expected',
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1.5}}},
            "scheduler.params.warmup_num_steps: f",
        ),
        (
            {"tensor_parallel": {"partition_config": {"layer_specs": [{"patterns": ["("]}]}}},
            "tensor_parallel.partition_config.layer_specs.0.patterns: found",
        ),
        (
            {"tensor_parallel": {"partition_config": {"layer_specs": [{}]}}},
            "tensor_parallel.partition_config.layer_specs.0.patterns: missing; expected list of regular expressions",
        ),
    ),
)
def test_refused(config: dict, line: str) -> None:
    found = only_problem(config)
    assert found.startswith(line)
    assert found.count("; ") >= 1


@pytest.mark.parametrize(
    "section", ("zero_optimization", "fp16", "bf16", "optimizer", "aio", "tensorboard", "checkpoint")
)
def test_a_null_section_is_absent(section: str) -> None:
    config = parse({section: None})
    assert problems({section: None}) == []
    assert config.adjustments == ([f"{section}: null is taken as absent"] if section != "optimizer" else [])


def test_null_in_an_open_section_is_absent() -> None:
    config = parse({"activation_checkpointing": {"profile": None}})
    assert config.adjustments == ["activation_checkpointing.profile: null is taken as absent"]


def test_floored_sizes_are_noted() -> None:
    config = parse(zero(stage3_prefetch_bucket_size=943718.4))
    assert config.adjustments == ["zero_optimization.stage3_prefetch_bucket_size: 943718.4 is taken as 943718"]


@pytest.mark.parametrize(
    "key", ("reduce_bucket_size", "allgather_bucket_size", "sub_group_size", "stage3_param_persistence_threshold")
)
def test_auto_with_a_sensible_default(key: str) -> None:
    config = parse(zero(**{key: "auto"}))
    assert config.auto_keys == [f"zero_optimization.{key}"]
    assert any(f"zero_optimization.{key}" in line for line in config.notes())


def test_auto_that_only_a_wrapper_can_fill() -> None:
    config = {
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_min_lr": "auto"}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    }
    with pytest.raises(TypeError) as caught:
        parse(config)
    (line,) = str(caught.value).splitlines()[1:]
    for key in ("train_batch_size", "gradient_accumulation_steps", "optimizer.params.lr"):
        assert key in line
    assert "scheduler.params.total_num_steps" in line
    assert "Hugging Face" in line
    for key in ("betas", "weight_decay", "warmup_min_lr", "reduce_bucket_size"):
        assert key not in line


def test_a_config_seen_before_the_wrapper_filled_it() -> None:
    config = DeepSpeedConfig.parse(
        {**BATCH, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "gradient_clipping": "auto"}, partial=True
    )
    assert config.auto_keys == ["gradient_clipping", "optimizer.params.lr"]
    assert config.optimizer_params == {}


def test_rules_wait_for_what_the_wrapper_fills_in_later() -> None:
    late = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}
    config = {**BATCH, "scheduler": {"type": "WarmupDecayLR", "params": late}}
    assert "scheduler.params.total_num_steps" in DeepSpeedConfig.parse(config, partial=True).auto_keys
    with pytest.raises(DeepSpeedConfigError, match="total_num_steps"):
        DeepSpeedConfig.parse(config)
    del late["total_num_steps"]  # never given by anybody: wrong at once
    with pytest.raises(DeepSpeedConfigError, match="total_num_steps: missing"):
        DeepSpeedConfig.parse(config, partial=True)


def test_auto_that_is_a_value() -> None:
    config = parse({"data_types": {"keep_in_fp32_modules": "auto"}, "pipeline": {"stages": "auto"}})
    assert config.auto_keys == []
    assert config.keep_in_fp32_modules == "auto"


@pytest.mark.parametrize("section", ("tensorboard", "wandb", "csv_monitor", "comet", "timers"))
def test_sections_that_may_be_auto(section: str) -> None:
    assert parse({section: "auto"}).auto_keys == [section]


@pytest.mark.parametrize("section", ("fp16", "zero_optimization", "optimizer", "data_efficiency"))
def test_other_sections_may_not(section: str) -> None:
    with pytest.raises(TypeError, match=f'{section}: found "auto" .string.; expected a mapping'):
        parse({section: "auto"})


def test_the_error_names_the_file(tmp_path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": "8"}')
    with pytest.raises(DeepSpeedConfigError, match=f"DeepSpeed config .{path}. has 1 problem"):
        DeepSpeedConfig(path)
