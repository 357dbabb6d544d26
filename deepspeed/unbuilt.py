"""Names of features that are not built yet, so that asking for one says so instead of "no such module".

Owns: the table of names, the error text, the finder behind ``import``, attribute lookup of packages without exports.
Does not own: settings of such features (``runtime/feature_status.py`` refuses those).
Invariant: nothing here makes a name appear to exist. ``hasattr`` stays False and ``import`` still fails with an
ImportError; only the text differs. A module that exists is found before the finder is asked, so a feature that gets
built needs no edit here to work (a test then asks for its row to be removed).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from deepspeed.git_version_info import version

_PREFIX = "deepspeed."
_PIPELINE = "pipeline parallelism"
_INFERENCE = "the inference engine"
_TENSOR = "tensor-parallel training"
_EXPERTS = "mixture of experts"
_ONEBIT = "1-bit optimizers"
_OBJECTS = "checkpoints as objects (see deepspeed.checkpoint.ds_to_universal and python -m deepspeed.checkpoint)"
_LINKS = "links from parameters to flat buffers (see deepspeed.utils.safe_get_full_fp32_param and its kin)"
_INJECTION = "kernel injection and automatic tensor parallelism"
_SEQUENCE = "sequence parallelism"
_SELECTED = "stepping selected columns by hand (zero_optimization.zenflow does it inside the engine)"
_FLOWS = "ZenFlow as optimizers and engine functions of its own (zero_optimization.zenflow needs none)"
_WRITERS = "the stand-alone file writers (checkpoints use checkpoint.writer of the config)"

# Dotted name below `deepspeed` -> the feature. A row covers everything below its name.
UNBUILT: dict[str, str] = {
    "init_inference": _INFERENCE,
    "default_inference_config": _INFERENCE,
    "InferenceEngine": _INFERENCE,
    "DeepSpeedInferenceConfig": _INFERENCE,
    "inference.build_engine_from_ds_checkpoint": _INFERENCE,
    "inference.build_hf_engine": _INFERENCE,
    "inference.InferenceEngineV2": _INFERENCE,
    "inference.RaggedInferenceEngineConfig": _INFERENCE,
    "inference.DeepSpeedTPConfig": _INFERENCE,
    "inference.engine": _INFERENCE,
    "inference.v2.engine_factory": _INFERENCE,
    "inference.v2.engine_v2": _INFERENCE,
    "inference.v2.build_engine_from_ds_checkpoint": _INFERENCE,
    "inference.v2.build_hf_engine": _INFERENCE,
    "inference.v2.InferenceEngineV2": _INFERENCE,
    "inference.v2.scheduling_utils": _INFERENCE,
    "inference.v2.model_implementations": _INFERENCE,
    "inference.v2.checkpoint": _INFERENCE,
    "inference.quantization": _INFERENCE,
    "model_implementations": _INFERENCE,
    "tp_model_init": _TENSOR,
    "runtime.tensor_parallel.tp_manager": _TENSOR,
    "load_ds_config": _TENSOR,
    "merge_tp_model_init_into_config": _TENSOR,
    "record_tp_model_init_args": _TENSOR,
    "set_autotp_mode": _TENSOR,
    "PipelineModule": _PIPELINE,
    "PipelineEngine": _PIPELINE,
    "DualPipeVModule": _PIPELINE,
    "DualPipeVEngine": _PIPELINE,
    "pipe": _PIPELINE,
    "runtime.pipe.PipelineModule": _PIPELINE,
    "runtime.pipe.LayerSpec": _PIPELINE,
    "runtime.pipe.TiedLayerSpec": _PIPELINE,
    "runtime.pipe.dualpipev": _PIPELINE,
    "runtime.pipe.engine": _PIPELINE,
    "runtime.pipe.module": _PIPELINE,
    "runtime.pipe.p2p": _PIPELINE,
    "runtime.pipe.schedule": _PIPELINE,
    "runtime.state_dict_factory": "merging and splitting Megatron checkpoints",
    "DeepSpeedHybridEngine": "the hybrid engine",
    "runtime.hybrid_engine": "the hybrid engine",
    "runtime.rollout": "the hybrid engine",
    "DeepSpeedTransformerLayer": "the fused transformer layer",
    "DeepSpeedTransformerConfig": "the fused transformer layer",
    "ops.DeepSpeedTransformerLayer": "the fused transformer layer",
    "ops.DeepSpeedTransformerConfig": "the fused transformer layer",
    "ops.transformer": "the fused transformer layer",
    "replace_transformer_layer": _INJECTION,
    "revert_transformer_layer": _INJECTION,
    "module_inject.replace_transformer_layer": _INJECTION,
    "module_inject.replace_module": _INJECTION,
    "module_inject.replace_policy": _INJECTION,
    "module_inject.layers": _INJECTION,
    "module_inject.auto_tp": _INJECTION,
    "module_inject.autotp_config": _INJECTION,
    "module_inject.fusedqkv_utils": _INJECTION,
    "module_inject.policy": _INJECTION,
    "module_inject.tp_plan_converter": _INJECTION,
    "module_inject.tp_shard": _INJECTION,
    "module_inject.containers": _INJECTION,
    "moe": _EXPERTS,
    "module_inject.auto_ep": _EXPERTS,
    "module_inject.auto_ep_comm": _EXPERTS,
    "module_inject.auto_ep_folding": _EXPERTS,
    "module_inject.auto_ep_layer": _EXPERTS,
    "module_inject.auto_ep_presets": _EXPERTS,
    "runtime.engine.MoE": _EXPERTS,
    "resolve_per_head_muon_after_sharding": "orthogonalization per attention head",
    "ops.adam.ZenFlowSelectiveAdamW": _SELECTED,
    "ops.adam.ZenFlowSelectiveAdamW_stage3": _SELECTED,
    "ops.adam.zenflow_torch_adam": _SELECTED,
    "runtime.zenflow.engine": _FLOWS,
    "runtime.zenflow.engine_stage3": _FLOWS,
    "runtime.zenflow.zenflow_stage_1_and_2": _FLOWS,
    "runtime.zenflow.zenflow_utils": _FLOWS,
    "checkpoint.DeepSpeedCheckpoint": _OBJECTS,
    "checkpoint.ZeROCheckpoint": _OBJECTS,
    "checkpoint.deepspeed_checkpoint": _OBJECTS,
    "checkpoint.zero_checkpoint": _OBJECTS,
    "checkpoint.model_3d_desc": _OBJECTS,
    "checkpoint.reshape_3d_utils": _OBJECTS,
    "checkpoint.reshape_meg_2d": _OBJECTS,
    "checkpoint.reshape_utils": _OBJECTS,
    "utils.link_hp_params": _LINKS,
    "utils.lazy_init_hp_params_optimizer_state": _LINKS,
    "utils.map_to_flat_opt_states": _LINKS,
    "utils.mixed_precision_linkage": _LINKS,
    "runtime.fp16.onebit": _ONEBIT,
    "runtime.comm.compressed": _ONEBIT,
    "runtime.comm.hccl": _ONEBIT,
    "runtime.comm.mpi": _ONEBIT,
    "runtime.comm.nccl": _ONEBIT,
    "runtime.compression": _ONEBIT,
    "runtime.config.ONEBIT_ADAM_OPTIMIZER": _ONEBIT,
    "runtime.config.ONEBIT_LAMB_OPTIMIZER": _ONEBIT,
    "runtime.config.ZERO_ONE_ADAM_OPTIMIZER": _ONEBIT,
    "sequence": _SEQUENCE,
    "runtime.sequence_parallel.ulysses_sp.UlyssesSPAttentionHF": _SEQUENCE,
    "runtime.sequence_parallel.ulysses_sp.UlyssesSPDataLoaderAdapter": _SEQUENCE,
    "runtime.sequence_parallel.ulysses_sp.UlyssesSPFwdLossBwdWithLogits": _SEQUENCE,
    "runtime.sequence_parallel.parallel_state_sp": _SEQUENCE,
    "runtime.domino": "Domino",
    "runtime.data_pipeline.curriculum_scheduler": "curriculum learning",
    "runtime.data_pipeline.data_routing": "random layerwise token dropping",
    "runtime.data_pipeline.data_sampling": "curriculum sampling and data analysis",
    "runtime.progressive_layer_drop": "progressive layer dropping",
    "runtime.eigenvalue": "eigenvalue estimation",
    "runtime.quantize": "quantized training",
    "runtime.weight_quantizer": "weight quantization",
    "compile.passes": "DeepCompile",
    "compile.backend": "DeepCompile",
    "compile.init_sp": "DeepCompile",
    "compile.init_tp": "DeepCompile",
    "compile.init_z1_and_2": "DeepCompile",
    "compile.init_z3": "DeepCompile",
    "compression.compress": "compression",
    "compression.helper": "compression",
    "compression.scheduler": "compression",
    "compression.basic_layer": "compression",
    "compression.utils": "compression",
    "elasticity.compute_elastic_config": "elastic batch sizes",
    "elasticity.ensure_immutable_elastic_config": "elastic batch sizes",
    "elasticity.elasticity": "elastic batch sizes",
    "elasticity.DSElasticAgent": "elastic training",
    "elasticity.elastic_agent": "elastic training",
    "autotuning.Autotuner": "autotuning",
    "autotuning.autotuner": "autotuning",
    "autotuning.scheduler": "autotuning",
    "autotuning.tuner": "autotuning",
    "autotuning.utils": "autotuning",
    "linear.OptimizedLinear": "the LoRA and quantized linear layers",
    "linear.LoRAOptimizedLinear": "the LoRA and quantized linear layers",
    "linear.LoRAConfig": "the LoRA and quantized linear layers",
    "linear.QuantizationConfig": "the LoRA and quantized linear layers",
    "linear.optimized_linear": "the LoRA and quantized linear layers",
    "linear.quantization": "the LoRA and quantized linear layers",
    "monitor.monitor": "the monitors",
    "monitor.comet": "the monitors",
    "monitor.csv_monitor": "the monitors",
    "monitor.tensorboard": "the monitors",
    "monitor.wandb": "the monitors",
    "profiling.flops_profiler": "the flops profiler",
    "ops.sparse_attention": "block-sparse attention",
    "ops.fp_quantizer": "quantization kernels",
    "ops.quantizer": "quantization kernels",
    "ops.random_ltd": "random layerwise token dropping",
    "ops.compile": "DeepCompile",
    "io": _WRITERS,
}

# Feature -> the members of the engine that belong to it and that clients use.
_MEMBERS = {
    _PIPELINE: """
        train_batch eval_batch set_dataiterator set_batch_fn reset_activation_shape set_has_attention_mask
        is_first_stage is_last_stage grid num_stages micro_batches is_pipe_parallel is_data_parallel _INSTRUCTION_MAP
        pipe_buffers pipe_recv_buf first_output_send grad_layer is_pipe_partitioned is_grad_partitioned
        pipe_partition_input_meta_cache pipe_partition_output_meta_cache pipe_partition_grad_meta_cache
        using_bf16_optimizer fwd_outputs _compute_loss get_additional_losses mem_status""",
    _EXPERTS: "_save_moe_checkpoint load_moe_state_dict print_forward_breakdown moe_layers gate_modules",
    "random layerwise token dropping": "random_ltd_scheduler random_ltd_initialize",
    "curriculum learning": """
        curriculum_scheduler set_custom_curriculum_learning_schedule set_data_post_process_func""",
    "DeepCompile": "get_compile_time",
    _INFERENCE: "profile_model_time model_times",
    "the flops profiler": "flops_profiler",
    "the DeeperSpeed fork of gpt-neox": "timer_values stored_gradients",
}
UNBUILT_MEMBERS: dict[str, str] = {name: feature for feature, names in _MEMBERS.items() for name in names.split()}


def feature_of(name: str) -> str | None:
    """The unbuilt feature that the dotted ``name`` (with or without the leading package) belongs to, or None."""
    parts = name.removeprefix(_PREFIX).split(".")
    for length in range(len(parts), 0, -1):
        feature = UNBUILT.get(".".join(parts[:length]))
        if feature is not None:
            return feature
    return None


def refusal(name: str) -> str | None:
    """What to tell somebody who asks for ``name``, or None when it belongs to no unbuilt feature."""
    feature = feature_of(name)
    return None if feature is None else f"{name} is not built yet in deepspeed {version}: it belongs to {feature}"


def refusal_of_member(name: str) -> str | None:
    """What to tell somebody who asks an engine for ``name``, or None when it belongs to no unbuilt feature."""
    feature = UNBUILT_MEMBERS.get(name)
    if feature is None:
        return None
    return f"DeepSpeedEngine.{name} is not built yet in deepspeed {version}: it belongs to {feature}"


def attribute_or_submodule(package: str, name: str) -> Any:
    """The body of ``__getattr__`` of a package that exports its sub-modules and nothing else.

    ``deepspeed.runtime.engine`` then works after a bare ``import deepspeed``, as clients write it. Raises
    AttributeError: no such module, or a feature that is not built.
    """
    full = f"{package}.{name}"
    unbuilt = refusal(full)
    if unbuilt is None and not name.startswith("_"):
        try:
            return importlib.import_module(full)
        except ModuleNotFoundError as error:
            if error.name != full:
                raise  # the module is there, and something that it needs is not
    raise AttributeError(unbuilt or f"module {package!r} has no attribute {name!r}")


class UnbuiltFinder:
    """The last finder of ``sys.meta_path``: what no other finds and the table names is refused with its text.

    ``from package import Name`` asks for the sub-module ``package.Name`` before it gives up, so it comes here too. The
    error carries no ``name``: Python would take it for the quiet "no such sub-module" and drop the text.
    """

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name.startswith(_PREFIX):
            text = refusal(name)
            if text is not None:
                raise ModuleNotFoundError(text)


def install_finder() -> None:
    """Append :class:`UnbuiltFinder` to the import system, once."""
    if not any(isinstance(finder, type) and finder.__name__ == UnbuiltFinder.__name__ for finder in sys.meta_path):
        sys.meta_path.append(UnbuiltFinder)
