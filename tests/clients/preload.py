"""Imported once, before the ranks of a test are forked: what takes seconds to import."""

# ruff: noqa: F401
import os

# A fork inherits these. The hub is never asked, and progress bars are no output of a test.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_DISABLED", "true")

import gc

import accelerate
import datasets
import lightning.pytorch.strategies
import peft
import transformers
import transformers.integrations.deepspeed
import trl
from accelerate.utils import deepspeed as _accelerate_deepspeed
from transformers import (
    AutoModelForCausalLM,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Trainer,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from trl import DPOTrainer, GRPOTrainer, RewardTrainer, SFTTrainer

import deepspeed.initialization
import deepspeed.runtime.zero.sharded_module
import deepspeed.utils.zero_to_fp32

get_checkpoint_conversion_mapping("llama")  # built once, on the first save
gc.freeze()  # what was imported is neither collected nor copied into a rank by a collection
