"""The learned order of fetches under its historical name, as far as clients ask for it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from deepspeed.runtime.zero.gather import ParamGatherer
from deepspeed.runtime.zero.historical_params import ZeroParamStatus

__all__ = ["PartitionedParameterCoordinator", "ZeroParamStatus", "get_all_parameters", "iter_params"]


class PartitionedParameterCoordinator:
    """A view of a gatherer; without one (nothing is sharded) there is no order to speak of."""

    def __init__(self, gatherer: ParamGatherer | None) -> None:
        self._gatherer = gatherer

    def is_complete_trace(self) -> bool:
        """The order of a whole window is known."""
        return self._gatherer is not None and bool(self._gatherer.trace.forecast)

    def is_invalid_trace(self) -> bool:
        """Nothing is known, and nothing has been seen since."""
        return self._gatherer is not None and not self._gatherer.trace.forecast and not self._gatherer.trace.recorded

    def is_record_trace(self) -> bool:
        """The order is being learned."""
        return not self.is_complete_trace() and not self.is_invalid_trace()

    def _invalidate_trace(self) -> None:
        """Forget the order: nothing is prefetched until a window has been seen again. Call it on every rank."""
        if self._gatherer is not None:
            self._gatherer.trace.forget()

    def reset_step(self) -> None:
        """Nothing to do: windows end with the optimizer's step."""

    def release_and_reset_all(self, module: nn.Module | None = None) -> None:
        """Release every parameter that may be."""
        if self._gatherer is not None:
            self._gatherer.release_all()


def get_all_parameters(sub_module: nn.Module, recurse: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
    """``(name, parameter)`` of a module and of those registered with it as external."""
    external: Any = getattr(sub_module, "ds_external_parameters", tuple)
    return itertools.chain(sub_module.named_parameters(recurse=recurse), external())


def iter_params(module: nn.Module, recurse: bool = False) -> Iterable[nn.Parameter]:
    """The same without names."""
    return (param for _, param in get_all_parameters(module, recurse))
