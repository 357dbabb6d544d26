"""Imported once by the server that forks the pool's workers: what a first training step of a process would import.

A worker then starts in milliseconds, which matters most where a test kills its ranks. `gc.freeze` keeps a collection
inside a worker from touching, and so copying, the pages of what is imported here.
"""

# ruff: noqa: F401
import gc

import numpy
import pydantic
import torch
import torch._dynamo  # the first optimizer step of a process imports it, which takes longer than torch itself
import torch.distributed

import deepspeed.checkpoint.manager
import deepspeed.comm.comm
import deepspeed.initialization
import deepspeed.runtime.build
import deepspeed.runtime.zero.optimizer
import deepspeed.runtime.zero.partition_parameters
import deepspeed.runtime.zero.sharded_module
import deepspeed.utils.torch_archive.load
import tests.harness.parity

gc.freeze()
