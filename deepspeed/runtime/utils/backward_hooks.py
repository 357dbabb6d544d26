"""Hooks on what a forward returned, so that a plain ``loss.backward()`` tells the engine that backward has begun."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

__all__ = [
    "OutputBackwardHookManager",
    "check_internal_apis_for_count_used_parameters",
    "count_used_parameters_in_backward",
    "maybe_loss_for_backward",
    "register_output_backward_hooks",
]


def maybe_loss_for_backward(value: Any) -> bool:
    """Tell whether ``value`` can be a loss: a tensor of one element with a graph behind it."""
    return isinstance(value, torch.Tensor) and value.numel() == 1 and value.grad_fn is not None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors inside nested tuples, lists and mappings."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


class OutputBackwardHookManager:
    """Calls back when gradients reach the outputs of a forward.

    Args:
        preprocess_once_fn: called once, when the first gradient arrives, before any other gradient is computed.
        preprocess_per_tensor_fn: called with the gradient of each output; its result replaces the gradient.
    """

    def __init__(
        self,
        preprocess_once_fn: Callable[[], Any],
        preprocess_per_tensor_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.preprocess_once_fn = preprocess_once_fn
        self.preprocess_per_tensor_fn = preprocess_per_tensor_fn
        self.preprocess_done = False
        self.hook_handles: list[Any] = []

    def _on_gradient(self, grad: torch.Tensor) -> torch.Tensor | None:
        if not self.preprocess_done:
            self.preprocess_done = True
            self.preprocess_once_fn()
        return None if self.preprocess_per_tensor_fn is None else self.preprocess_per_tensor_fn(grad)

    def register_hooks_on_outputs(self, outputs: Any) -> None:
        """Hook each tensor of ``outputs`` (any nesting) that has a graph behind it."""
        for tensor in _tensors(outputs):
            if tensor.grad_fn is not None:
                self.hook_handles.append(tensor.register_hook(self._on_gradient))

    def remove_hooks(self) -> None:
        """Remove all hooks."""
        for handle in self.hook_handles:
            handle.remove()
        self.hook_handles.clear()

    def reset(self) -> None:
        """The next gradient counts as the first again."""
        self.preprocess_done = False


def register_output_backward_hooks(
    outputs: Any,
    preprocess_once_fn: Callable[[], Any],
    preprocess_per_tensor_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> OutputBackwardHookManager:
    """Make an `OutputBackwardHookManager` on ``outputs``."""
    manager = OutputBackwardHookManager(preprocess_once_fn, preprocess_per_tensor_fn)
    manager.register_hooks_on_outputs(outputs)
    return manager


def check_internal_apis_for_count_used_parameters() -> bool:
    """Tell whether this torch has what `count_used_parameters_in_backward` needs."""
    return all(hasattr(torch._C, name) for name in ("_current_graph_task_id", "_will_engine_execute_node"))


def count_used_parameters_in_backward(parameters: Sequence[torch.nn.Parameter]) -> int:
    """Number of ``parameters`` that the backward pass under way will give a gradient.

    RuntimeError outside a backward pass.
    """
    if torch._C._current_graph_task_id() == -1:
        raise RuntimeError("count_used_parameters_in_backward: no backward pass is under way; call it from a hook")
    nodes = [torch.autograd.graph.get_gradient_edge(param).node for param in parameters if param.requires_grad]
    return sum(1 for node in nodes if torch._C._will_engine_execute_node(node))
