"""Keys inside checkpoint files: the only place that spells them. File names are in ``names.py``.

The first blocks are the historical keys, as they stand in files of every release; the last one is what this release
adds. A key that changes here changes the on-disk format.
"""

from __future__ import annotations

from typing import Any

# ---- model-states file: mp_rank_XX_model_states.pt -----------------------------------------------------------------
MODULE = "module"
BUFFER_NAMES = "buffer_names"
OPTIMIZER = "optimizer"
PARAM_SHAPES = "param_shapes"
FROZEN_PARAM_SHAPES = "frozen_param_shapes"
FROZEN_PARAM_FRAGMENTS = "frozen_param_fragments"
SHARED_PARAMS = "shared_params"
LR_SCHEDULER = "lr_scheduler"
DATA_SAMPLER = "data_sampler"
RANDOM_LTD = "random_ltd"
SKIPPED_STEPS = "skipped_steps"
GLOBAL_STEPS = "global_steps"
GLOBAL_SAMPLES = "global_samples"
DP_WORLD_SIZE = "dp_world_size"
MP_WORLD_SIZE = "mp_world_size"
CHECKPOINT_PARALLEL_DIMS = "checkpoint_parallel_dimensions"
CHECKPOINT_PP_DEGREE = "pp_degree"
CHECKPOINT_TP_DEGREE = "tp_degree"
DS_CONFIG = "ds_config"
DS_VERSION = "ds_version"

# ---- optimizer-states file: zero_pp_rank_D_mp_rank_XX_optim_states.pt ----------------------------------------------
OPTIMIZER_STATE_DICT = "optimizer_state_dict"
LOSS_SCALER = "loss_scaler"
DYNAMIC_LOSS_SCALE = "dynamic_loss_scale"
OVERFLOW = "overflow"
CLIP_GRAD = "clip_grad"
BASE_OPTIMIZER_STATE = "base_optimizer_state"
BASE_OPTIMIZER_STATE_STEP = "base_optimizer_state_step"
SINGLE_PARTITION_OF_FP32_GROUPS = "single_partition_of_fp32_groups"
FP32_GROUPS = "fp32_groups"
FP32_FLAT_GROUPS = "fp32_flat_groups"
PARAM_GROUPS = "param_groups"
GROUP_PADDINGS = "group_paddings"
PARAM_ALIGNMENT_PADDINGS = "param_alignment_paddings"
PARTITION_COUNT = "partition_count"
ZERO_STAGE = "zero_stage"
PARAM_SLICE_MAPPINGS = "param_slice_mappings"

# How a value of an optimizer state belongs to its parameter: see ``runtime/zero/state_dict.py``.
FLAT, SCALAR, TENSOR, PLAIN = "flat", "scalar", "tensor", "plain"


def masters_key(stage: int) -> str:
    """Where the flat masters of a shard are."""
    return FP32_FLAT_GROUPS if stage >= 3 else SINGLE_PARTITION_OF_FP32_GROUPS


def base_state_key(stage: int) -> str:
    """Where the base optimizer's state of a shard is."""
    return OPTIMIZER_STATE_DICT if stage >= 3 else BASE_OPTIMIZER_STATE


def dtype_name(dtype: Any) -> str:
    """How files spell a dtype: ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


# ---- file name parts -----------------------------------------------------------------------------------------------
ZERO_FILE_PREFIX = "zero_pp_rank_"
BF16_ZERO_FILE_PREFIX = "bf16_zero_pp_rank_"
FP16_ZERO_FILE_PREFIX = "fp16_zero_pp_rank_"
MODEL_FILE_PREFIX = "mp_rank_"
LAYER_FILE_PREFIX = "layer_"
MODEL_FILE_SUFFIX = "_model_states.pt"
OPTIM_FILE_SUFFIX = "_optim_states.pt"

# ---- universal checkpoint ------------------------------------------------------------------------------------------
UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"
UNIVERSAL_CHECKPOINT_VERSION_KEY = "universal_checkpoint_version"
UNIVERSAL_CHECKPOINT_VERSION_VALUE = 0.4
FP32_WEIGHT_KEY = "fp32"
ZENFLOW_KEY = "zenflow"  # optimizer state: which columns were important, and how far both parts had come
ZENFLOW_TENSORS = ("zenflow_pending", "zenflow_weight")  # beside it, while there are such
PARAM = "param"
CAT_DIM = "cat_dim"
PARAM_N_SUB_PARAMS = "param_n_sub_params"
SUB_PARAM_SHAPE = "sub_param_shape"
SUB_PARAMS_SHAPE = "sub_params_shape"
SUB_PARAM_SHARD_WIDTHS = "sub_param_shard_widths"
VOCAB_TENSOR = "vocab_tensor"
ORIGINAL_VOCAB_SIZE = "original_vocab_size"
PADDED_VOCAB_SIZE = "padded_vocab_size"
VOCABULARY_PARAMETER_PATTERNS = "vocabulary_parameter_patterns"
TP_REPLICATED_PARAMETER_PATTERNS = "tp_replicated_parameter_patterns"
PIPELINE_REPLICATED_PARAMETER_PATTERNS = "pipeline_replicated_parameter_patterns"
PARAMETER_TO_AVERAGE_PATTERNS = "parameter_to_average_patterns"
PARAMETER_WITH_ROW_PARALLELISM_PATTERNS = "parameter_with_row_parallelism_patterns"
PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0 = "parameter_with_2_sub_params_cat_dim_0"
PARAMETER_WITH_SUB_PARAMS = "parameter_with_sub_params"
AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS = "autotp_unsupported_parameter_patterns"
EXPERT_PARAMETER_PATTERNS = "expert_parameter_patterns"
DS_AUTOTP_UC_META = "ds_autotp_universal_checkpoint_meta"
DS_AUTOEP_UC_META = "ds_autoep_uc_meta"
AFFINE_MAP = "affine_map"
AFFINE_MAP_VERSION = "version"
AFFINE_MAP_PARAMS = "params"

# ---- experts -------------------------------------------------------------------------------------------------------
EP_IS_EXPERT_PARAM = "is_expert_param"
EP_NUM_EXPERTS = "ep_num_experts"
AUTOEP_LAYERS_KEY = "ds_autoep_layers"
AUTOEP_LAYERS_KEY_LEGACY = "autoep_layers"
AUTOEP_AFFINE_MAPS = "affine_maps"
AUTOEP_EP_SIZE = "ep_size"
AUTOEP_EXPERT_KEY_PREFIX = "expert_key_prefix"
AUTOEP_EXPERT_PLACEMENT = "expert_placement"
AUTOEP_NUM_EXPERTS = "num_experts"
AUTOEP_NUM_LOCAL_EXPERTS = "num_local_experts"
AUTOEP_PARAM_EP_RANK = "ep_rank"
AUTOEP_PARAM_LOCAL_EXPERTS = "local_experts"
AUTOEP_PARAM_LOGICAL_SHAPE = "logical_shape"
AUTOEP_PLACEMENT_EP_SIZE = "ep_size"
AUTOEP_PLACEMENT_EXPERTS = "experts"
AUTOEP_PLACEMENT_NUM_EXPERTS = "num_experts"
AUTOEP_PLACEMENT_RANK = "rank"
AUTOEP_PLACEMENT_RANKS = "ranks"
AUTOEP_PLACEMENT_VERSION = 1
AUTOEP_PLACEMENT_VERSION_KEY = "version"
AUTOEP_ZERO12_REQUIRED_FIELDS = ("expert_key_prefix", "num_experts", "num_local_experts", "ep_size")
AUTOEP_ZERO3_EXPERT_STATE_FORMAT_KEY = "checkpoint_format"
AUTOEP_ZERO3_EXPERT_STATE_FORMAT_VERSION = 1
AUTOEP_ZERO3_EXPERT_STATE_FORMAT_VERSION_KEY = "checkpoint_format_version"
AUTOEP_ZERO3_PARTITIONED_EXPERT_STATE_FORMAT = "zero3_partitioned"

# ---- tensor and expert parallelism folded together -----------------------------------------------------------------
FOLDING_METADATA_KEY = "folding"
FOLDING_METADATA_VERSION = 1
FOLDING_DISPATCH_STRATEGY = "dispatch_strategy"
FOLDING_EP_RANK = "ep_rank"
FOLDING_EP_SIZE = "ep_size"
FOLDING_ETP_RANK = "etp_rank"
FOLDING_ETP_SIZE = "etp_size"
FOLDING_FAMILY = "family"
FOLDING_PARAM_FAMILIES = "param_families"
FOLDING_SHARED_EXPERT_PLACEMENT = "shared_expert_placement"
FOLDING_TP_RANK = "tp_rank"
FOLDING_TP_SIZE = "tp_size"
FOLDING_ZERO_PARTITION_COUNT = "zero_partition_count"
FOLDING_ZERO_PARTITION_GROUP = "zero_partition_group"
FOLDING_ZERO_PARTITION_RANK = "zero_partition_rank"

# ---- added by this release (see docs/checkpoints.md) ---------------------------------------------------------------
# In model-states and optimizer-states files: how the flat tensors are laid out, see ``runtime/zero/state_dict.py``.
LAYOUT_RECORD = "ds_layout"
LAYOUT_RECORD_VERSION = 1
# In optimizer-states files: which fragment holds which state, per shard group.
STATE_TABLES = "state_tables"
# In ``optimizer.state_dict()`` alone: names of the optimizer's class and its bases; files have them in the record.
OPTIMIZER_FAMILIES = "ds_optimizer"
SHARD_RANK = "shard_rank"
# In zero/optimizer_state.pt of universal folders: what each parameter has there, see ``universal/record.py``.
UNIVERSAL_RECORD = "ds_universal"
UNIVERSAL_RECORD_VERSION = 1
# In model-states files: what the engine needs to go on exactly, beside the historical keys.
ENGINE_STATE = "ds_engine_state"
ENGINE_STATE_VERSION = 1

# Keys of the model-states file that belong to the library.
LIBRARY_KEYS = frozenset(
    {
        MODULE, BUFFER_NAMES, OPTIMIZER, PARAM_SHAPES, FROZEN_PARAM_SHAPES, FROZEN_PARAM_FRAGMENTS, SHARED_PARAMS,
        LR_SCHEDULER, DATA_SAMPLER, RANDOM_LTD, SKIPPED_STEPS, GLOBAL_STEPS, GLOBAL_SAMPLES, DP_WORLD_SIZE,
        MP_WORLD_SIZE, CHECKPOINT_PARALLEL_DIMS, DS_CONFIG, DS_VERSION, LAYOUT_RECORD, ENGINE_STATE,
    }
)  # fmt: skip
# Those that a load of everything leaves out of the client state: when a save is given one, it is the user's own.
NEVER_HANDED_OUT = frozenset(
    {
        MODULE, OPTIMIZER, LR_SCHEDULER, DATA_SAMPLER, RANDOM_LTD, SKIPPED_STEPS, GLOBAL_STEPS, DP_WORLD_SIZE,
        MP_WORLD_SIZE, LAYOUT_RECORD, ENGINE_STATE,
    }
)  # fmt: skip
