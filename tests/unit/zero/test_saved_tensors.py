"""What the graphs of stage 3 put on tensors at large stays out of the way of those who look at the class."""

from __future__ import annotations

import torch

from deepspeed.runtime.zero.saved_tensors import keep_sharded


def test_every_attribute_of_the_tensor_class_can_be_read() -> None:
    """torch.compile lists what `__torch_function__` may override by reading each of them."""
    with keep_sharded():
        for name in dir(torch.Tensor):
            getattr(torch.Tensor, name)
        assert not hasattr(torch.zeros(2), "ds_status")
    torch.overrides.get_overridable_functions()
