"""The import lines of client packages, as they stand there: each runs, or says which feature the name belongs to.

By client, so that whoever asks "does X start?" finds the answer. A line that raises anything but an ImportError with
the feature's name fails; so does one that is listed as refused and runs.
"""

from __future__ import annotations

import importlib
import operator
from typing import Any

import pytest

import deepspeed

# Client -> import lines. A line that begins with "-" is refused by feature.
LINES = {
    "accelerate": """
        import deepspeed
        import deepspeed.comm as dist
        from deepspeed import DeepSpeedEngine
        from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
        from deepspeed.launcher.runner import DEEPSPEED_ENVIRONMENT_NAME
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
        from deepspeed.ops.lion import DeepSpeedCPULion
        from deepspeed.utils import groups, set_z3_leaf_modules
        from deepspeed.runtime.utils import move_to_device
        -from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
    """,
    "transformers": """
        from deepspeed.accelerator import get_accelerator
        from deepspeed.runtime.zero import partition_parameters
        from deepspeed.utils import logger, groups
        from deepspeed.utils import is_initialized
    """,
    "trl": """
        from deepspeed.runtime.engine import DeepSpeedEngine
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
    """,
    "peft": "from deepspeed.utils import safe_get_full_grad",
    "lightning": """
        from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint, get_model_state_file
        from deepspeed.utils.zero_to_fp32 import get_optim_files
        import deepspeed.utils.logging
    """,
    "axolotl": """
        from deepspeed.utils import set_z3_leaf_modules
        from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP
    """,
    "llamafactory": "from deepspeed.utils import set_z3_leaf_modules",
    "ms-swift": """
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
        from deepspeed.git_version_info import version
        -from deepspeed.elasticity import compute_elastic_config
    """,
    "openrlhf": """
        from deepspeed import DeepSpeedEngine
        from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
        from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
        -from deepspeed.module_inject.layers import GatherReplacedLayerParams
    """,
    "mii": """
        from deepspeed.inference.config import DtypeEnum
        from deepspeed.runtime.config_utils import DeepSpeedConfigModel
        from deepspeed.runtime.config import DeepSpeedConfig
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.launcher.runner import DLTS_HOSTFILE, fetch_hostfile
        from deepspeed.utils.timer import SynchronizedWallClockTimer
        from deepspeed.accelerator import get_accelerator
        -from deepspeed.inference import build_hf_engine, InferenceEngineV2, RaggedInferenceEngineConfig
        -from deepspeed.inference.engine import InferenceEngine
    """,
    "examples": """
        from deepspeed.accelerator import get_accelerator
        from deepspeed.ops.op_builder import AsyncIOBuilder, GDSBuilder
        from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
        from deepspeed.constants import CROSS_RANK, CROSS_SIZE, TORCH_DISTRIBUTED_DEFAULT_PORT
        from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
        from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
        from deepspeed.runtime.utils import see_memory_usage, set_random_seed
        from deepspeed.utils import RepeatingLoader
        from deepspeed.inference.v2.ragged import DSStateManagerConfig
        from deepspeed.comm import TorchBackend
        -from deepspeed import OnDevice, init_inference
        -from deepspeed.io import FastFileWriter, FastFileWriterConfig, PyFileWriter, MockFileWriter
        -from deepspeed.pipe import PipelineModule
        -from deepspeed.moe.layer import MoE
        -from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
        -from deepspeed.runtime.data_pipeline.data_routing.helper import convert_to_random_ltd, save_without_random_ltd
        -from deepspeed.runtime.data_pipeline.data_sampling.data_analyzer import DataAnalyzer
        -from deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import MMapIndexedDataset
        -from deepspeed.runtime.domino.transformer import DominoTransformer
        -from deepspeed.sequence.layer import DistributedAttention
        -from deepspeed.compile.passes.zero3_compile import add_z3_gather_release
        -from deepspeed.compile.passes.prefetch import schedule_prefetch
        -from deepspeed.compile.passes.selective_gather import selective_gather
        -from deepspeed.compile.passes.offload_adam_states import move_opt_states, move_opt_states_sync
        -from deepspeed.compile.passes.sp_compile import prepare_autosp_inputs
        -from deepspeed.inference import DeepSpeedTPConfig
        -from deepspeed.module_inject.replace_policy import HFGPT2LayerPolicy
        -from deepspeed.compression.compress import init_compression, redundancy_clean
        -from deepspeed.compression.helper import convert_conv1d_to_linear
        -from deepspeed import DeepSpeedTransformerLayer, DeepSpeedTransformerConfig
    """,
    "Megatron-DeepSpeed": """
        import deepspeed.comm as dist
        from deepspeed import comm as dist
        from deepspeed.accelerator.real_accelerator import get_accelerator
        from deepspeed import get_accelerator
        from deepspeed.checkpoint import ORIGINAL_VOCAB_SIZE, PADDED_VOCAB_SIZE, UNIVERSAL_CHECKPOINT_INFO
        from deepspeed.checkpoint import UNIVERSAL_CHECKPOINT_VERSION_KEY, UNIVERSAL_CHECKPOINT_VERSION_VALUE
        from deepspeed.checkpoint import VOCABULARY_PARAMETER_PATTERNS, PIPELINE_REPLICATED_PARAMETER_PATTERNS
        from deepspeed.checkpoint import TP_REPLICATED_PARAMETER_PATTERNS, PARAMETER_WITH_ROW_PARALLELISM_PATTERNS
        from deepspeed.checkpoint import PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0
        from deepspeed.env_report import main
        from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
        from deepspeed.ops.op_builder.builder import OpBuilder
        from deepspeed.runtime.activation_checkpointing.checkpointing import checkpoint
        from deepspeed.runtime.dataloader import RepeatingLoader
        from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
        from deepspeed.runtime.utils import PartitionedTensor, see_memory_usage
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_get_full_fp32_param
        from deepspeed.utils.timer import BACKWARD_GLOBAL_TIMER, BACKWARD_MICRO_TIMER
        from deepspeed.utils.timer import BACKWARD_INNER_GLOBAL_TIMER, BACKWARD_INNER_MICRO_TIMER
        -from deepspeed.compression.compress import init_compression, redundancy_clean
        -from deepspeed.moe.layer import MoE
        -from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
        -from deepspeed.pipe import PipelineModule, LayerSpec, TiedLayerSpec
        -from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler
        -from deepspeed.runtime.data_pipeline.data_routing.helper import remove_random_ltd_state_dict
        -from deepspeed.runtime.pipe.schedule import PipeSchedule, PipeInstruction, BufferOpInstruction, LoadMicroBatch
        -from deepspeed.runtime.pipe import schedule
        -from deepspeed.runtime.pipe.engine import PipelineEngine
        -from deepspeed.runtime.state_dict_factory import MegatronSDLoader
        -from deepspeed.sequence.layer import DistributedAttention
        -from deepspeed.sequence.fpdt_layer import FPDT_Attention, FPDT_FFN, FPDT_LogitsLoss, FPDT_InputConstruct
        -from deepspeed import init_inference
        -from deepspeed import PipelineEngine
    """,
    "gpt-neox": """
        from deepspeed.launcher.runner import main, EXPORT_ENVS, DLTS_HOSTFILE
        from deepspeed.launcher.runner import fetch_hostfile, parse_inclusion_exclusion
        from deepspeed.comm import mpi_discovery
        from deepspeed.runtime.activation_checkpointing import checkpointing
        from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
        from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
        from deepspeed.ops.adam import FusedAdam, DeepSpeedCPUAdam
        from deepspeed.ops.lion import FusedLion
        -from deepspeed.pipe import PipelineModule, LayerSpec, TiedLayerSpec
        -from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler
        -from deepspeed.ops.sparse_attention import SparseSelfAttention, VariableSparsityConfig
        -from deepspeed.ops.sparse_attention.sparsity_config import LocalSlidingWindowSparsityConfig
        -from deepspeed.runtime.config import ONEBIT_LAMB_OPTIMIZER
        -from deepspeed.runtime.fp16.onebit import OnebitAdam
    """,
    "ArcticTraining": """
        from deepspeed.runtime.engine import DeepSpeedEngine, autocast_if_enabled
        from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
        from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
        from deepspeed.utils.groups import _create_expert_data_and_model_parallel, _get_expert_parallel_group
        from deepspeed.utils.groups import _get_expert_parallel_rank
        from deepspeed.utils.logging import print_dist
        from deepspeed.utils.timer import SynchronizedWallClockTimer
        from deepspeed.git_version_info import installed_ops, torch_info, accelerator_name
        from deepspeed.launcher.runner import main
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
        -from deepspeed.runtime.engine import MoE
        -from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
        from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP, TiledFusedLogitsLoss
    """,
}
ROWS = [(client, line.strip()) for client, text in LINES.items() for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("client", LINES)
def test_import_lines(client: str) -> None:
    for name, line in ROWS:
        if name != client:
            continue
        if line.startswith("-"):
            with pytest.raises(ImportError, match="is not built yet in deepspeed"):
                exec(line[1:], {})
        else:
            exec(line, {})


# What clients write after `import deepspeed`, without importing the module; "-" as above.
ATTRIBUTES = """
    zero.Init zero.GatheredParameters zero.register_external_parameter comm.get_rank utils.logging.logger
    utils.safe_get_full_grad utils.set_z3_leaf_modules checkpointing.configure runtime.lr_schedules.VALID_LR_SCHEDULES
    runtime.utils.see_memory_usage runtime.config.DeepSpeedConfig runtime.zero.partition_parameters.ZeroParamStatus
    runtime.engine.DeepSpeedEngine accelerator.get_accelerator OnDevice DeepSpeedEngine DeepSpeedConfig get_accelerator
    init_distributed initialize add_config_arguments __version__ version ops.adam.FusedAdam launcher.runner.EXPORT_ENVS
    git_version_info.version checkpoint.utils.clone_tensors_for_torch_save runtime.dataloader.RepeatingLoader
    -runtime.pipe.schedule.TrainSchedule -runtime.pipe.engine.PipelineEngine -runtime.engine.MoE -moe.layer.MoE
    -runtime.state_dict_factory.MegatronSDLoader -module_inject.layers -module_inject.replace_policy
    -module_inject.replace_transformer_layer -PipelineEngine -PipelineModule -DeepSpeedTransformerLayer
    -DeepSpeedTransformerConfig -init_inference -tp_model_init -ops.sparse_attention -elasticity.compute_elastic_config
"""


@pytest.mark.parametrize("path", ATTRIBUTES.split())
def test_attributes_after_a_bare_import(path: str) -> None:
    if path.startswith("-"):
        with pytest.raises(AttributeError, match="is not built yet in deepspeed"):
            operator.attrgetter(path[1:])(deepspeed)
    else:
        operator.attrgetter(path)(deepspeed)


def test_refused_names_do_not_seem_to_exist() -> None:
    """Clients ask `hasattr` and `find_spec` before they use a feature; the answer is no, and no error."""
    engine: Any = importlib.import_module("deepspeed.runtime.engine")
    assert not hasattr(engine, "MoE")
    assert not hasattr(deepspeed, "tp_model_init")
    assert not hasattr(engine.DeepSpeedEngine, "train_batch")
