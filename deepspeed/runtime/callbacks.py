"""Events of the training loop, and who listens.

Anything that watches training (monitor, timers, profiler, curriculum) is a callback; the engine names none of them:

    engine(x)            on_forward_begin(engine)  ...module...  on_forward_end(engine)
    engine.backward(l)   on_backward_begin(engine)  ...autograd, reductions...  on_backward_end(engine, l)
    engine.step()        on_step_begin(engine)  ...boundary only: update...  on_step_end(engine, applied)

Every method does nothing by default. ``state_dict`` / ``load_state_dict`` put a callback's state into checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from deepspeed.runtime.engine import DeepSpeedEngine


class Callback:
    """Base of all callbacks; override what is of interest."""

    name = "callback"

    def on_forward_begin(self, engine: DeepSpeedEngine) -> None: ...
    def on_forward_end(self, engine: DeepSpeedEngine) -> None: ...
    def on_backward_begin(self, engine: DeepSpeedEngine) -> None: ...
    def on_backward_end(self, engine: DeepSpeedEngine, loss: torch.Tensor) -> None: ...
    def on_step_begin(self, engine: DeepSpeedEngine) -> None: ...
    def on_step_end(self, engine: DeepSpeedEngine, applied: bool) -> None: ...
    def on_destroy(self, engine: DeepSpeedEngine) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class CallbackList:
    """Calls each callback in registration order. Empty lists cost one attribute test per event in the engine."""

    def __init__(self, callbacks: Iterable[Callback] = ()) -> None:
        self.items = list(callbacks)

    def __bool__(self) -> bool:
        return bool(self.items)

    def add(self, callback: Callback) -> None:
        self.items.append(callback)

    def fire(self, event: str, *args: Any) -> None:
        for callback in self.items:
            getattr(callback, event)(*args)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """State of the callbacks that have some, by name."""
        return {item.name: state for item in self.items if (state := item.state_dict())}

    def load_state_dict(self, states: dict[str, dict[str, Any]]) -> None:
        for item in self.items:
            if item.name in states:
                item.load_state_dict(states[item.name])
