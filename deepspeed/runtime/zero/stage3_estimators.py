"""How many bytes the model states take at stage 3, before anything is allocated. See ``memory_estimators.py``.

Per rank: ``model_state_bytes(..., stage=3)``, everything divided by the ranks, and the largest layer, which is whole
for a while: its parameters and, in backward, its gradient bucket. Blocks that stay gathered (while
``stage3_max_live_parameters`` allows it) come on top, up to the parameters' own bytes. Sizes are bytes.
"""

from __future__ import annotations

import torch
from torch import nn

from deepspeed.runtime.zero.memory_estimators import ModelStateBytes, model_state_bytes, print_heading

__all__ = [
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "model_to_params",
]

_GIB = 2**30


def model_to_params(model: nn.Module) -> tuple[int, int]:
    """(elements of all parameters, shared ones counted once; elements of the largest layer's own parameters)."""
    total = sum(param.numel() for param in model.parameters())
    layers = (sum(param.numel() for param in part.parameters(recurse=False)) for part in model.modules())
    return total, max(layers, default=0)


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
    *,
    model_dtype: torch.dtype = torch.bfloat16,
    grad_dtype: torch.dtype | None = None,
    states_per_param: int = 2,
) -> tuple[int, int, int]:
    """Return (host bytes a node, device bytes a rank, bytes of the largest layer while it is whole) under stage 3.

    The host figure covers the larger of two moments: the ranks of the node building the model in fp32 (layer by layer
    with ``zero_init``), and the offloaded states; ``additional_buffer_factor`` multiplies it as head room.

    Args:
        total_params: elements of the model.
        largest_layer_params: elements of its largest layer.
        num_gpus_per_node: ranks a node.
        num_nodes: nodes.
        cpu_offload: gradients and optimizer in host memory.
        cpu_offload_params: with ``cpu_offload``, the parameter shards too.
        zero_init: the model is built under ``zero.Init``.
        additional_buffer_factor: see above.
        model_dtype, grad_dtype, states_per_param: see `model_state_bytes`.
    """
    states = model_state_bytes(
        total_params,
        num_gpus_per_node * num_nodes,
        3,
        model_dtype=model_dtype,
        grad_dtype=grad_dtype,
        states_per_param=states_per_param,
        cpu_offload=cpu_offload,
    )
    layer = largest_layer_params * (model_dtype.itemsize + (grad_dtype or model_dtype).itemsize)
    params_on_host = cpu_offload and cpu_offload_params
    built = (largest_layer_params if zero_init else total_params) * torch.float32.itemsize
    on_host = states.host + (states.parameters if params_on_host else 0)
    host = int(max(built, on_host) * num_gpus_per_node * additional_buffer_factor)
    return host, layer + _on_device(states, params_on_host), layer


def _on_device(states: ModelStateBytes, params_on_host: bool) -> int:
    return states.device - (states.parameters if params_on_host else 0)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
    *,
    model_dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Print the estimates for ``model`` with every combination of offload and ``zero_init``."""
    total, largest = model_to_params(model)
    estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor, model_dtype=model_dtype
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
    *,
    model_dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Print the estimates for numbers of parameters with every combination of offload and ``zero_init``."""
    sizes = f"{total_params / 1e6:.0f}M total params, {largest_layer_params / 1e6:.0f}M largest layer params"
    print_heading(num_gpus_per_node, num_nodes, f"{sizes}, stage 3, {str(model_dtype).split('.')[-1]}")
    for cpu_offload, cpu_offload_params in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            host, device, _ = estimate_zero3_model_states_mem_needs(
                total_params,
                largest_layer_params,
                num_gpus_per_node,
                num_nodes,
                cpu_offload,
                cpu_offload_params,
                zero_init,
                additional_buffer_factor,
                model_dtype=model_dtype,
            )
            params, states = ("cpu" if where else "none" for where in (cpu_offload_params, cpu_offload))
            print(
                f"{host / _GIB:8.2f}GB | {device / _GIB:6.2f}GB | offload_param={params}, offload_optimizer={states}, "
                f"zero_init={int(zero_init)}"
            )
