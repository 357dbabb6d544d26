"""`HostWork`: what the handles of our own transports share of torch's `Work`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

__all__ = ["HostWork"]


class HostWork:
    """A collective under way on a `channel` of ours, which writes into `outputs` (None: nothing is written)."""

    __slots__ = ()

    channel: Any
    outputs: tuple[torch.Tensor, ...] | None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the result is in place; RuntimeError when that fails or takes too long."""
        raise NotImplementedError

    def result(self) -> list[torch.Tensor]:
        """The tensors that receive the result."""
        return list(self.outputs or ())

    def get_future(self) -> Any:
        """A future of the tensors. It is made when they are there: this call waits."""
        future: Any = torch.futures.Future()
        try:
            self.wait()
        except RuntimeError as error:
            future.set_exception(error)
        else:
            future.set_result(self.result())
        return future
