"""How many bytes the model states take, before anything is allocated.

Owns: the arithmetic. Does not own activations, buckets (two of ``reduce_bucket_size`` elements) and what torch itself
keeps. Per parameter and rank, with P parameters of p bytes in the model dtype, N data-parallel ranks and Adam:

=====  ===========  ==========================  ===========================================
stage  parameters   gradients                   fp32 master copy + two moments
=====  ===========  ==========================  ===========================================
0      p·P          p·P                         12·P (8·P when the model itself is fp32)
1      p·P          p·P                         12·P/N (8·P/N)
2      p·P          p·P/N                       12·P/N (8·P/N)
3      p·P/N        p·P/N                       12·P/N (8·P/N)
=====  ===========  ==========================  ===========================================

An fp32 model is its own master copy. A stage-1 step of a single micro-step sends each gradient as soon as it is
complete and keeps the owned part only, so it holds p·P/N like stage 2. Sizes are bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

__all__ = [
    "ModelStateBytes",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "model_state_bytes",
    "model_to_params",
]

_GIB = 2**30


@dataclass(frozen=True)
class ModelStateBytes:
    """Bytes of the model states of one rank."""

    parameters: int
    gradients: int
    optimizer: int
    """Master copy and optimizer states."""
    optimizer_on_host: bool = False
    """Gradients (the owned part) and optimizer states live in host memory."""

    @property
    def device(self) -> int:
        """Bytes on the device."""
        return self.parameters + (0 if self.optimizer_on_host else self.gradients + self.optimizer)

    @property
    def host(self) -> int:
        """Bytes in host memory."""
        return self.gradients + self.optimizer if self.optimizer_on_host else 0


def model_state_bytes(
    total_params: int,
    data_parallel_size: int = 1,
    stage: int = 2,
    *,
    model_dtype: torch.dtype = torch.bfloat16,
    grad_dtype: torch.dtype | None = None,
    master_dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    states_per_param: int = 2,
    gradient_accumulation_steps: int | None = None,
    cpu_offload: bool = False,
) -> ModelStateBytes:
    """Bytes of the model states of one rank (see the module docstring).

    Args:
        total_params: trainable elements of the whole model.
        data_parallel_size: ranks over which the states are sharded.
        stage: ZeRO stage, 0 to 3.
        model_dtype: of the parameters that forward and backward use.
        grad_dtype: in which gradients are accumulated; None for ``model_dtype``.
        master_dtype: of the optimizer's own copy of the parameters; none is kept when it is ``model_dtype``.
        state_dtype: of the optimizer's states.
        states_per_param: state tensors of the optimizer as large as the parameter (Adam 2, momentum SGD and Lion 1).
        gradient_accumulation_steps: micro-steps of a step; None stands for several.
        cpu_offload: keep gradients and optimizer in host memory.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"model_state_bytes: `stage` must be 0, 1, 2 or 3, found {stage!r}")
    owned = math.ceil(total_params / data_parallel_size) if stage > 0 else total_params
    sent_at_once = stage >= 2 or (stage == 1 and gradient_accumulation_steps == 1)
    grads_held = owned if sent_at_once or cpu_offload else total_params
    master = 0 if master_dtype == model_dtype else master_dtype.itemsize
    return ModelStateBytes(
        parameters=(owned if stage == 3 else total_params) * model_dtype.itemsize,
        gradients=grads_held * (grad_dtype or model_dtype).itemsize,
        optimizer=owned * (master + states_per_param * state_dtype.itemsize),
        optimizer_on_host=cpu_offload,
    )


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
    *,
    stage: int = 2,
    model_dtype: torch.dtype = torch.bfloat16,
    grad_dtype: torch.dtype | None = None,
    states_per_param: int = 2,
    gradient_accumulation_steps: int | None = None,
) -> tuple[int, int]:
    """Return (host bytes a node, device bytes a rank) that the model states need under stage 1 or 2.

    The host figure covers the larger of two moments: each rank of the node building the model in fp32, and, with
    ``cpu_offload``, the offloaded states; ``additional_buffer_factor`` multiplies it as head room.

    Args:
        total_params: trainable elements of the model.
        num_gpus_per_node: ranks a node.
        num_nodes: nodes.
        cpu_offload: gradients and optimizer in host memory.
        additional_buffer_factor: see above.
        stage, model_dtype, grad_dtype, states_per_param, gradient_accumulation_steps: see `model_state_bytes`.
    """
    states = model_state_bytes(
        total_params,
        num_gpus_per_node * num_nodes,
        stage,
        model_dtype=model_dtype,
        grad_dtype=grad_dtype,
        states_per_param=states_per_param,
        gradient_accumulation_steps=gradient_accumulation_steps,
        cpu_offload=cpu_offload,
    )
    while_built = total_params * torch.float32.itemsize
    host_per_rank = max(while_built, states.host)
    return int(host_per_rank * num_gpus_per_node * additional_buffer_factor), states.device


def model_to_params(model: nn.Module) -> int:
    """Number of elements of the parameters of ``model``, shared ones counted once."""
    return sum(param.numel() for param in model.parameters())


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
    *,
    stage: int = 2,
    model_dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Print the estimates for ``model`` with and without offload (see `estimate_zero2_model_states_mem_needs`)."""
    estimate_zero2_model_states_mem_needs_all_cold(
        model_to_params(model),
        num_gpus_per_node,
        num_nodes,
        additional_buffer_factor,
        stage=stage,
        model_dtype=model_dtype,
    )


def print_heading(num_gpus_per_node: int, num_nodes: int, model: str) -> None:
    """The lines above a table of estimates; ``model`` says in words what is estimated."""
    nodes = f"{num_nodes} node{'s' if num_nodes > 1 else ''}"
    ranks = f"{num_gpus_per_node} GPU{'s' if num_gpus_per_node > 1 else ''} per node"
    print("Estimated memory needed for params, optim states and gradients for a:")
    print(f"HW: Setup with {nodes}, {ranks}.")
    print(f"SW: Model with {model}.")
    print("  per CPU  |  per GPU |   Options")


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
    *,
    stage: int = 2,
    model_dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Print the estimates for a number of parameters with and without offload."""
    model = f"{total_params / 1e6:.0f}M total params, stage {stage}, {str(model_dtype).split('.')[-1]}"
    print_heading(num_gpus_per_node, num_nodes, model)
    for cpu_offload in (True, False):
        host, device = estimate_zero2_model_states_mem_needs(
            total_params,
            num_gpus_per_node,
            num_nodes,
            cpu_offload,
            additional_buffer_factor,
            stage=stage,
            model_dtype=model_dtype,
        )
        target = "cpu" if cpu_offload else "none"
        print(f"{host / _GIB:8.2f}GB | {device / _GIB:6.2f}GB | offload_optimizer={target}")
