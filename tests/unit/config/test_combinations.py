"""Rules between keys, settings without effect, and features that are not there."""

from __future__ import annotations

import pytest

from deepspeed.runtime.config import DeepSpeedConfigError
from deepspeed.runtime.config_schema import ConfigSections
from deepspeed.runtime.config_walk import field_at
from deepspeed.runtime.feature_status import MISSING_FEATURES
from deepspeed.runtime.optimizer_config import OPTIMIZER_PARAMS
from tests.unit.config.cases import parse, problems

CPU = {"device": "cpu"}


def zero(**section) -> dict:
    return {"zero_optimization": section}


@pytest.mark.parametrize(
    ("config", "path", "words"),
    (
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled", "bf16.enabled true"),
        (
            {"bf16": {"enabled": True, "bf16_optimizer_states": True}},
            "bf16.bf16_optimizer_states",
            "bf16.bf16_master_weights_and_grads false",
        ),
        (
            {"bf16": {"enabled": True}, "data_types": {"param_dtype": "fp16"}},
            "data_types.param_dtype",
            "bf16.enabled true; expected bf16",
        ),
        ({"data_types": {"param_dtype": "bf16"}}, "data_types.param_dtype", "expected fp32"),
        ({"fp16": {"enabled": True, "min_loss_scale": 0}}, "fp16.min_loss_scale", "dynamic loss scale"),
        ({"fp16": {"enabled": True, "loss_scale_window": 0}}, "fp16.loss_scale_window", "dynamic loss scale"),
        ({"gradient_allreduce_op": "sum", **zero(stage=3)}, "gradient_allreduce_op", "stage 3; expected mean"),
        (
            {"gradient_allreduce_op": "sum", "compile": {"deepcompile": True}},
            "gradient_allreduce_op",
            "compile.deepcompile",
        ),
        (
            {"gradient_allreduce_op": "sum", **zero(stage=1, zenflow={})},
            "gradient_allreduce_op",
            "zero_optimization.zenflow",
        ),
        (
            {"managed_gradient_accumulation": False, "compile": {"deepcompile": True}},
            "managed_gradient_accumulation",
            "compile.deepcompile true",
        ),
        (zero(stage=0, compute_grad_norm=False), "zero_optimization.compute_grad_norm", "zero_optimization.stage 0"),
        (zero(stage=3, compute_grad_norm=False), "zero_optimization.compute_grad_norm", "zero_optimization.stage 3"),
        (
            zero(stage=1, compute_grad_norm=False),
            "zero_optimization.compute_grad_norm",
            "gradient_clipping 1 (the default); expected gradient_clipping 0",
        ),
        (
            {"gradient_clipping": 0, **zero(stage=1, compute_grad_norm=False, offload_optimizer=CPU)},
            "zero_optimization.compute_grad_norm",
            "zero_optimization.offload_optimizer.device cpu",
        ),
        (
            zero(stage=2, offload_optimizer={"device": "cpu", "ratio": 0.5}),
            "zero_optimization.offload_optimizer.ratio",
            "zero_optimization.stage 2; expected stage 3",
        ),
        (
            zero(stage=2, offload_optimizer={"device": "nvme", "nvme_path": "/x"}),
            "zero_optimization.offload_optimizer.device",
            "zero_optimization.stage 2",
        ),
        (
            zero(stage=3, offload_optimizer={"device": "nvme"}),
            "zero_optimization.offload_optimizer.nvme_path",
            "missing",
        ),
        (zero(stage=3, offload_param={"device": "nvme"}), "zero_optimization.offload_param.nvme_path", "missing"),
        (
            zero(stage=3, offload_optimizer={"device": "nvme", "nvme_path": ""}),
            "zero_optimization.offload_optimizer.nvme_path",
            "missing",
        ),
        (
            zero(stage=3, offload_optimizer={"device": "nvme", "nvme_path": "/x", "buffer_count": 0}),
            "zero_optimization.offload_optimizer.buffer_count",
            "0 with zero_optimization.offload_optimizer.device nvme; expected at least 1",
        ),
        (zero(stage=1, legacy_stage1=True), "zero_optimization.legacy_stage1", "the old stage 1 was removed"),
        (
            zero(stage=3, zero_quantized_gradients=True, reduce_scatter=False),
            "zero_optimization.zero_quantized_gradients",
            "zero_optimization.reduce_scatter false",
        ),
        (zero(stage=2, zenflow={}), "zero_optimization.zenflow", "zero_optimization.offload_optimizer.device cpu"),
        (
            zero(stage=2, zenflow={}, offload_optimizer=CPU),
            "zero_optimization.zenflow",
            "overlap_comm false (the default at stage 2)",
        ),
        (
            zero(stage=3, zenflow={}, offload_optimizer=CPU, overlap_comm=False),
            "zero_optimization.zenflow",
            "overlap_comm false;",
        ),
        (
            zero(stage=3, zenflow={}, offload_optimizer={"device": "nvme", "nvme_path": "/tmp"}),
            "zero_optimization.zenflow",
            "found a section with zero_optimization.offload_optimizer.device nvme;",
        ),
        (
            zero(stage=2, zenflow={"select_interval": 3}),
            "zero_optimization.zenflow.select_interval",
            "select_strategy auto (the default); expected",
        ),
        (
            zero(stage=2, zenflow={"topk_ratio": 0.2, "select_interval": 3}),
            "zero_optimization.zenflow.select_interval",
            "set select_strategy to step or epoch",
        ),
        (
            zero(stage=2, zenflow={"select_strategy": "step"}),
            "zero_optimization.zenflow.select_interval",
            "set select_interval to an integer, or select_strategy to auto",
        ),
        (
            zero(stage=2, zenflow={"select_strategy": "step", "select_interval": 2, "update_interval": 4}),
            "zero_optimization.zenflow.update_interval",
            "zero_optimization.zenflow.select_interval 2",
        ),
        (
            {"optimizer": {"type": "SGD"}, **zero(stage=2, zenflow={}, offload_optimizer=CPU, overlap_comm=True)},
            "zero_optimization.zenflow",
            "optimizer.type SGD; expected optimizer.type Adam or AdamW",
        ),
        (
            zero(stage=2, zenflow={}, offload_optimizer={**CPU, "super_offload": True}, overlap_comm=True),
            "zero_optimization.zenflow",
            "super_offload",
        ),
        (
            zero(stage=2, zenflow={"full_warm_up_rounds": -1}, offload_optimizer=CPU, overlap_comm=True),
            "zero_optimization.zenflow.full_warm_up_rounds",
            "found -1; expected at least 0",
        ),
        (
            zero(stage=2, zenflow={"steps_per_epoch": 0}, offload_optimizer=CPU, overlap_comm=True),
            "zero_optimization.zenflow.steps_per_epoch",
            "found 0; expected at least 1",
        ),
        (
            {"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 4}}},
            "tensor_parallel.tp.tp_size",
            "tensor_parallel.autotp_size 2",
        ),
        ({"compile": {"passes": ["autotp", "z3"]}}, "compile.passes", "autotp together with z3"),
        ({"expert_parallel": {"comm_backend": "deepep"}}, "expert_parallel.comm_max_tokens_per_rank", "deepep"),
        (
            {"expert_parallel": {"gate_up_impl": "fused", "use_grouped_mm": False}},
            "expert_parallel.gate_up_impl",
            "use_grouped_mm true",
        ),
        ({"expert_parallel": {"num_expert_groups": 4}}, "expert_parallel.num_expert_groups", "num_limited_groups"),
        (
            {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}},
            "optimizer.params.max_grad_norm",
            "set gradient_clipping to 1.0",
        ),
        ({"optimizer": {"type": "AdamX"}}, "optimizer.type", "nearest known optimizer: Adam"),
        ({"scheduler": {"type": "WarmupLr"}}, "scheduler.type", "nearest known schedule: WarmupLR"),
        (
            {"scheduler": {"type": "WarmupDecayLR"}},
            "scheduler.params.total_num_steps",
            "missing; WarmupDecayLR needs it",
        ),
        (
            {"scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_step_size": 0}}},
            "scheduler.params.lr_range_test_step_size",
            "expected integer >= 1",
        ),
        (
            {"data_efficiency": {"data_sampling": {"curriculum_learning": {"enabled": True}}}},
            "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics",
            "missing",
        ),
        (
            {"data_efficiency": {"data_sampling": {"dynamic_batching": {"enabled": True}}}},
            "data_efficiency.data_sampling.dynamic_batching.max_tokens",
            "missing",
        ),
        ({"elasticity": {"enabled": True, "micro_batch_sizes": [2]}}, "elasticity.max_train_batch_size", "missing"),
        ({"elasticity": {"min_gpus": 4, "max_gpus": 2}}, "elasticity.min_gpus", "elasticity.max_gpus 2"),
        (
            {"compression_training": {"row_pruning": {"shared_parameters": {"enabled": True}}}},
            "compression_training.row_pruning.different_groups",
            "missing",
        ),
        ({"checkpoint": {"writer": {"type": "SLOW"}}}, "checkpoint.writer.type", "expected one of MOCK, PYTHON, FAST"),
    ),
)
def test_contradictions_name_both_keys(config: dict, path: str, words: str) -> None:
    lines = [line for line in problems(config) if line.startswith(path + ": ")]
    assert any(words in line for line in lines), problems(config)


@pytest.mark.parametrize(
    "config",
    [
        {
            "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
            **zero(stage=stage),
        }
        for stage in (0, 1, 2)
    ]
    + [{"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}, **zero(stage=1)}]
    + [
        {"prescale_gradients": True, "gradient_predivide_factor": 2.0, **zero(stage=stage, reduce_scatter=True)}
        for stage in (0, 1, 2)
    ]
    + [{"gradient_allreduce_op": "sum", **zero(stage=2)}]
    + [{"managed_gradient_accumulation": False, **zero(stage=stage, overlap_comm=True)} for stage in (0, 1, 2)]
    + [{"gradient_clipping": 0, **zero(stage=2, compute_grad_norm=False)}]
    + [{"fp16": {"enabled": True, "loss_scale": 128, "min_loss_scale": 0}}],
)
def test_combinations_that_work(config: dict) -> None:
    assert problems(config) == []


@pytest.mark.parametrize(
    ("config", "line"),
    (
        (
            zero(stage=2, offload_param=CPU),
            "zero_optimization.offload_param has no effect: it needs"
            " zero_optimization.stage 3, the stage in force is 2",
        ),
        (
            zero(stage=0, offload_optimizer=CPU),
            "zero_optimization.offload_optimizer has no effect: it needs"
            " zero_optimization.stage 1 to 3, the stage in force is 0",
        ),
        (
            zero(stage=3, offload_optimizer={**CPU, "pipeline_read": True, "buffer_count": 4}),
            "zero_optimization.offload_optimizer.pipeline_read has no effect: it needs device nvme",
        ),
        (
            zero(stage=3, offload_param={"device": "nvme", "nvme_path": "/x", "max_in_cpu": 0}),
            "zero_optimization.offload_param.max_in_cpu has no effect: shards at device nvme are mapped files, of"
            " which the system keeps in memory what is free",
        ),
        (
            zero(stage=1, zero_hpz_partition_size=2),
            "zero_optimization.zero_hpz_partition_size has no effect: it needs"
            " zero_optimization.stage 3, the stage in force is 1",
        ),
        (
            zero(stage=2, stage3_max_live_parameters=10),
            "zero_optimization.stage3_max_live_parameters has no effect: it"
            " needs zero_optimization.stage 3, the stage in force is 2",
        ),
        (
            zero(stage=0, round_robin_gradients=True),
            "zero_optimization.round_robin_gradients has no effect: it needs"
            " zero_optimization.stage 1 to 2, the stage in force is 0",
        ),
        (
            zero(stage=3, memory_efficient_linear=False, sub_group_size=10**9),
            "zero_optimization.memory_efficient_linear has no effect: no layer keeps gathered weights for backward",
        ),
        (
            zero(stage=3, stage3_allgather_sequential=True),
            "zero_optimization.stage3_allgather_sequential has no effect: the parameters of a block are always gathered"
            " together",
        ),
        (
            zero(stage=3, zeropp_loco_param={"err_beta": 0.8}),
            "zero_optimization.zeropp_loco_param has no effect: it needs "
            "zero_optimization.zero_quantized_gradients true",
        ),
        (
            zero(stage=3, mics_hierarchical_params_gather=True),
            "zero_optimization.mics_hierarchical_params_gather has no effect: it needs "
            "zero_optimization.mics_shard_size",
        ),
        ({"gradient_predivide_factor": 2}, "gradient_predivide_factor has no effect: it needs prescale_gradients true"),
        (
            {"bf16": {"enabled": False, "bf16_master_weights_and_grads": True}},
            "bf16.bf16_master_weights_and_grads has no effect: it needs bf16.enabled true",
        ),
        (
            {"activation_checkpointing": {"contiguous_memory_optimization": True}},
            "activation_checkpointing.contiguous_memory_optimization has no effect: it needs"
            " activation_checkpointing.partition_activations true and activation_checkpointing.number_checkpoints",
        ),
        ({"aio": {"queue_depth": 4}}, "aio has no effect: no offload section of zero_optimization uses device nvme"),
        ({"disable_allgather": True}, "disable_allgather has no effect: it is kept for old configs"),
        (
            zero(stage=0, allgather_bucket_size=8),
            "zero_optimization.allgather_bucket_size has no effect: it needs zero_optimization.stage 1 to 2, the stage "
            "in force is 0",
        ),
        (
            zero(stage=2, reduce_scatter=False),
            "zero_optimization.reduce_scatter has no effect: sharded gradients always go to their owner alone",
        ),
        (
            zero(stage=1, contiguous_gradients=False),
            "zero_optimization.contiguous_gradients has no effect: gradients always travel in contiguous buckets",
        ),
        (
            {"bf16": {"enabled": True, "immediate_grad_update": True}},
            "bf16.immediate_grad_update has no effect: gradients are always taken up as backward produces them",
        ),
        (
            {"use_data_before_expert_parallelism": True},
            "use_data_before_expert_parallelism has no effect: it needs expert parallelism",
        ),
        ({"pipeline": {"partition": "uniform"}}, "pipeline has no effect: it needs a PipelineModule"),
        ({"hybrid_engine": {"max_out_tokens": 9}}, "hybrid_engine has no effect: it needs hybrid_engine.enabled true"),
        ({"bfloat16": {"immediate_grad_update": True}}, "bfloat16 has no effect: it needs bfloat16.enabled true"),
        (
            {"data_efficiency": {"data_sampling": {"enabled": True}}},
            "data_efficiency has no effect: it needs data_efficiency.enabled true",
        ),
        (
            {"tensor_parallel": {"preset_model": "llama"}},
            "tensor_parallel.preset_model has no effect: it needs tensor_parallel.autotp_size",
        ),
        (
            {"compile": {"double_buffer": False}},
            "compile.double_buffer has no effect: it needs compile.deepcompile",
        ),
        (
            {"checkpoint": {"parallel_write": {"pipeline_stage": True}}},
            "checkpoint.parallel_write.pipeline_stage has no effect: it needs a PipelineModule",
        ),
        (
            zero(stage=3, override_module_apply=False),
            "zero_optimization.override_module_apply has no effect: functions given to Module.apply always see whole"
            " parameters",
        ),
        ({"vocabulary_size": 50257}, "vocabulary_size: 50257 is no multiple of 8, which tensor cores prefer"),
    ),
)
def test_settings_without_effect_are_named(config: dict, line: str) -> None:
    parsed = parse(config)
    assert parsed.warnings == [line]
    assert line in parsed.notes()


@pytest.mark.parametrize(
    "config",
    (
        zero(stage=2, offload_param={"device": "none"}, offload_optimizer={"device": "none", "nvme_path": None}),
        zero(stage=2, stage3_max_live_parameters=1e9, memory_efficient_linear=True),
        zero(stage=2, stage3_prefetch_bucket_size="auto"),
        zero(stage=0, overlap_comm=True),
        {"fp16": {"loss_scale": 0, "min_loss_scale": 1}},  # no more than its defaults
        {"hybrid_engine": {"enabled": False, "max_out_tokens": 9}},  # switched off in so many words
        {"compile": {"deepcompile": False}},
    ),
)
def test_settings_at_their_defaults_are_not(config: dict) -> None:
    assert parse(config).warnings == []


# What asks for each row of the table; a row added without a case here fails the test below.
ASKS: dict[str, dict] = {
    "zero_optimization.stage": zero(stage=3),
    "pipeline.stages": {"pipeline": {"stages": 2}},
    "optimizer.type": {"optimizer": {"type": "OneBitAdam"}},
    "optimizer.params.per_head_muon": {"optimizer": {"type": "Muon", "params": {"lr": 1, "per_head_muon": True}}},
    "tensor_parallel.autotp_size": {"tensor_parallel": {"autotp_size": 2}},
    "expert_parallel.enabled": {"expert_parallel": {"enabled": True}},
    "compile.deepcompile": {"compile": {"deepcompile": True}},
    "compile.passes": {"compile": {"passes": ["autosp"]}},
    "compile.autoep_non_moe": {"compile": {"autoep_non_moe": True}},
    "graph_harvesting": {"graph_harvesting": True},
    "tensorboard.enabled": {"tensorboard": {"enabled": True}},
    "wandb.enabled": {"wandb": {"enabled": True}},
    "csv_monitor.enabled": {"csv_monitor": {"enabled": True}},
    "comet.enabled": {"comet": {"enabled": True}},
    "flops_profiler.enabled": {"flops_profiler": {"enabled": True}},
    "data_efficiency.enabled": {"data_efficiency": {"enabled": True}},
    "curriculum_learning.enabled": {
        "curriculum_learning": {
            "enabled": True,
            "min_difficulty": 8,
            "max_difficulty": 64,
            "schedule_type": "fixed_linear",
            "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8},
        }
    },
    "autotuning.enabled": {"autotuning": {"enabled": True}},
    "elasticity.enabled": {"elasticity": {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [2]}},
    "hybrid_engine.enabled": {"hybrid_engine": {"enabled": True}},
    "amp.enabled": {"amp": {"enabled": True}},
    "progressive_layer_drop.enabled": {"progressive_layer_drop": {"enabled": True}},
    "quantize_training.eigenvalue.enabled": {"quantize_training": {"eigenvalue": {"enabled": True}}},
    "eigenvalue": {"eigenvalue": {"enabled": True}},
    "sparse_attention": {"sparse_attention": {"mode": "fixed"}},
    "compression_training": {"compression_training": {"layer_reduction": {"enabled": True}}},
    "weight_quantization": {"weight_quantization": {"num_bits": 4}},
    "checkpoint.writer.type": {"checkpoint": {"writer": {"type": "MOCK"}}},
    "checkpoint.writer.data_parallel": {"checkpoint": {"writer": {"data_parallel": "REPLICA"}}},
    "nebula.enabled": {"nebula": {"enabled": True}},
    "datastates_ckpt": {"datastates_ckpt": None},
}


@pytest.mark.parametrize("row", MISSING_FEATURES, ids=lambda row: row.path)
def test_missing_features_are_refused_by_name(row) -> None:
    lines = problems(ASKS[row.path])
    (line,) = [line for line in lines if line.startswith(f"{row.path}: ") and row.what in line]
    assert "not available in this version" in line
    assert line.endswith(row.change)


@pytest.mark.parametrize(
    ("config", "path"),
    (
        ({"curriculum_learning": {"enabled": True}}, "curriculum_learning.enabled"),
        ({"elasticity": {"enabled": True, "micro_batch_sizes": [2]}}, "elasticity.enabled"),
        ({"tensorboard": {"enabled": True, "output_path": 3}}, "tensorboard.enabled"),
        (
            {"compression_training": {"row_pruning": {"shared_parameters": {"enabled": True}}}},
            "compression_training",
        ),
    ),
)
def test_missing_features_are_refused_whatever_else_is_wrong(config: dict, path: str) -> None:
    """Else whoever adds the missing key is told only then that the feature is not there."""
    (line,) = [line for line in problems(config) if line.startswith(f"{path}: ")]
    assert "not available in this version" in line


def test_sections_that_are_off_are_no_missing_features() -> None:
    config = {"curriculum_learning": {"enabled": False, "min_difficulty": "x"}, "compression_training": {}}
    assert [line.split(":")[0] for line in problems(config)] == ["curriculum_learning.min_difficulty"]


@pytest.mark.parametrize("row", MISSING_FEATURES, ids=lambda row: row.path)
def test_rows_of_the_table_are_known_keys(row) -> None:
    parameter = row.path.removeprefix("optimizer.params.")
    known = parameter in OPTIMIZER_PARAMS["muon"] or field_at(ConfigSections, row.path) is not None
    assert known


def test_nothing_asked_for_by_default() -> None:
    assert [row.path for row in MISSING_FEATURES if row.asked(ConfigSections())] == []


@pytest.mark.parametrize(
    "section",
    (
        "tensorboard",
        "wandb",
        "csv_monitor",
        "comet",
        "flops_profiler",
        "data_efficiency",
        "curriculum_learning",
        "autotuning",
        "elasticity",
        "hybrid_engine",
        "amp",
        "progressive_layer_drop",
        "nebula",
        "expert_parallel",
        "weight_quantization",
        "eigenvalue",
    ),
)
def test_features_that_are_off_are_accepted(section: str) -> None:
    assert problems({section: {"enabled": False}}) == []


def test_a_wrong_value_is_not_reported_twice() -> None:
    """Rules that rest on a wrong value stay silent: the value is reported once."""
    lines = problems({"bf16": {"enabled": "perhaps"}, "data_types": {"param_dtype": "fp32"}})
    assert [line.split(":")[0] for line in lines] == ["bf16.enabled"]


def test_problems_of_zenflow_come_at_once() -> None:
    flow = {"topk_ratio": 2, "select_interval": 20, "update_interval": 30, "full_warm_up_rounds": -1}
    lines = problems({"gradient_allreduce_op": "sum", **zero(stage=2, zenflow=flow)})
    assert [line.split(":")[0].removeprefix("zero_optimization.") for line in lines] == [
        "zenflow.topk_ratio",
        "gradient_allreduce_op",
        "zenflow",
        "zenflow",
        "zenflow.full_warm_up_rounds",
        "zenflow.select_interval",
        "zenflow.update_interval",
    ]
    assert "without zero_optimization.offload_optimizer;" in lines[2]
    assert "overlap_comm false (the default at stage 2)" in lines[3]
    wrong_stage = problems(zero(stage=9, zenflow={}, offload_optimizer=CPU))
    assert [line.split(":")[0] for line in wrong_stage] == ["zero_optimization.stage"]  # its default is not known


def test_overlap_of_communication_that_follows_the_stage_was_not_set() -> None:
    for stage in (0, 2, 3):
        for section in ({}, {"overlap_comm": None}):
            config = parse(zero(stage=stage, **section)).zero_config
            assert config.overlap_comm is (stage == 3)
            assert "overlap_comm" not in config.model_fields_set
    assert "overlap_comm" in parse(zero(stage=3, overlap_comm=False)).zero_config.model_fields_set


@pytest.mark.parametrize("kind", (DeepSpeedConfigError, ValueError, AssertionError))
def test_the_error_is_caught_as(kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"zero_optimization\.stage"):
        parse(zero(stage=9))
