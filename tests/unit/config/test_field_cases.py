"""Config mistakes that users have met in public, and what each must come to."""

from __future__ import annotations

import pytest

from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.config_batch import accumulation_note


@pytest.mark.parametrize(
    ("extra", "path", "meant"),
    (
        ({"zero_optimisation": {"stage": 2}}, "zero_optimisation", "zero_optimization"),
        ({"gradient_accumulation_step": 4}, "gradient_accumulation_step", "gradient_accumulation_steps"),
        (
            {"zero_optimization": {"stage": 2, "reduce_bucket_sise": 1000}},
            "zero_optimization.reduce_bucket_sise",
            "zero_optimization.reduce_bucket_size",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"learning_rate": 0.1}}},
            "optimizer.params.learning_rate",
            "optimizer.params.lr",
        ),
        ({"bf16": {"enable": True}}, "bf16.enable", "bf16.enabled"),
    ),
)
def test_a_typo_never_starts_training(extra: dict, path: str, meant: str) -> None:
    with pytest.raises(DeepSpeedConfigError) as caught:
        DeepSpeedConfig({"train_batch_size": 1, **extra})
    assert [problem.path for problem in caught.value.problems] == [path]
    assert f"nearest known key: {meant}" in str(caught.value)


def test_sizes_computed_as_floats_are_taken() -> None:
    config = DeepSpeedConfig(
        {
            "train_micro_batch_size_per_gpu": 2.0,
            "zero_optimization": {"reduce_bucket_size": 5e8, "stage3_prefetch_bucket_size": 943718.4},
        }
    )
    assert config.train_micro_batch_size_per_gpu == 2
    assert config.zero_config.reduce_bucket_size == 500_000_000
    assert config.zero_config.prefetch_bucket_size == 943_718
    assert config.adjustments == ["zero_optimization.stage3_prefetch_bucket_size: 943718.4 is taken as 943718"]


@pytest.mark.parametrize(("value", "kind"), (("2", "string"), (2.5, "number")))
def test_counts_that_are_none_are_refused(value, kind: str) -> None:
    with pytest.raises(DeepSpeedConfigError) as caught:
        DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": value})
    (line,) = str(caught.value).splitlines()[1:]
    assert line.strip().startswith("gradient_accumulation_steps: found")
    assert f"({kind}); expected integer > 0" in line


def test_a_placeholder_with_a_sensible_value_is_logged() -> None:
    config = DeepSpeedConfig({"train_batch_size": 1, "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}})
    assert config.zero_config.reduce_bucket_size == 500_000_000
    assert 'config keys left "auto" take their defaults: zero_optimization.reduce_bucket_size' in config.notes()


def test_other_placeholders_are_listed_with_who_fills_them() -> None:
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "optimizer": {"type": "Adam", "params": {"lr": "auto"}},
    }
    with pytest.raises(DeepSpeedConfigError) as caught:
        DeepSpeedConfig(config)
    (line,) = str(caught.value).splitlines()[1:]
    assert line.strip().startswith(
        'train_micro_batch_size_per_gpu, train_batch_size, optimizer.params.lr: found "auto"'
    )
    assert "the Hugging Face integration (Trainer, accelerate) normally fills it" in line


@pytest.mark.parametrize(
    ("stage", "section", "key", "needs"),
    (
        (2, {"offload_param": {"device": "cpu"}}, "zero_optimization.offload_param", "zero_optimization.stage 3"),
        (0, {"offload_optimizer": {"device": "cpu"}}, "zero_optimization.offload_optimizer", "stage 1 to 3"),
        (1, {"zero_hpz_partition_size": 2}, "zero_optimization.zero_hpz_partition_size", "zero_optimization.stage 3"),
    ),
)
def test_an_unusable_key_is_named_with_the_stage_it_needs(stage: int, section: dict, key: str, needs: str) -> None:
    config = DeepSpeedConfig({"train_batch_size": 1, "zero_optimization": {"stage": stage, **section}})
    (line,) = config.warnings
    assert line.startswith(key)
    assert needs in line
    assert line.endswith(f"the stage in force is {stage}")


def test_a_silent_config_beside_an_accumulating_wrapper() -> None:
    config = DeepSpeedConfig({"train_micro_batch_size_per_gpu": 2})
    note = accumulation_note(config.sections.gradient_accumulation_steps, 8, "the wrapper")
    assert note is not None
    assert "accumulates 8" in note
    assert "does not set it (1 is taken)" in note
    assert "gradient_accumulation_steps 1" in str(config.batch_triple)


# Whole configs as client libraries ship them, at the stages this version has.
CLIENT_CONFIGS = {
    "accelerate": {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 16,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "none", "nvme_path": None},
            "offload_param": {"device": "none", "nvme_path": None},
            "stage3_gather_16bit_weights_on_model_save": False,
        },
        "gradient_clipping": 1.0,
        "steps_per_print": float("inf"),
        "fp16": {"enabled": False},
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
    },
    "trainer": {
        "fp16": {"enabled": False, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16,
                 "hysteresis": 2, "min_loss_scale": 1, "auto_cast": True},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 100, "warmup_min_lr": 0,
                      "warmup_max_lr": 5e-5, "warmup_num_steps": 0}},
        "zero_optimization": {"stage": 2, "allgather_partitions": True, "allgather_bucket_size": 2e8,
                              "overlap_comm": True, "reduce_scatter": True, "reduce_bucket_size": 2e8,
                              "contiguous_gradients": True},
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "steps_per_print": 2000,
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 8,
        "wall_clock_breakdown": False,
    },
    "trl": {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 0},
        "zero_optimization.reduce_bucket_size": 16777216,
        "zero_optimization.stage3_param_persistence_threshold": 40960,
        "zero_optimization.stage3_prefetch_bucket_size": 0.9 * 4096 * 4096,
    },
    "megatron": {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 8,
        "steps_per_print": 10,
        "zero_optimization": {"stage": 1, "elastic_checkpoint": True},
        "gradient_clipping": 1.0,
        "prescale_gradients": True,
        "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1,
                 "initial_scale_power": 11},
        "data_types": {"grad_accum_dtype": "fp32"},
        "wall_clock_breakdown": False,
        "curriculum_learning": {"enabled": False},
        "flops_profiler": {"enabled": False, "profile_step": 5},
    },
    "ray": {"train_micro_batch_size_per_gpu": 16, "gradient_clipping": True, "bf16": {"enabled": True}},
}  # fmt: skip


@pytest.mark.parametrize("client", sorted(CLIENT_CONFIGS))
def test_configs_that_clients_ship(client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_CONFIG_STRICT", "0")  # as users run
    config = DeepSpeedConfig(CLIENT_CONFIGS[client])
    assert config.batch_triple is not None
    assert config.unknown_keys == [key for key in CLIENT_CONFIGS[client] if "." in key]
