"""triton's interpreter, made quick: run by the kernels' test programs in their own processes."""

from __future__ import annotations

from types import ModuleType
from typing import Any


def prepare_once(module: ModuleType) -> None:
    """Let functions of `module` call each other without preparing the language again.

    The launch of a kernel has prepared it for all functions that see the same names; again, per call, it is most of
    the time of a small kernel.
    """
    from triton.runtime.interpreter import InterpretedFunction

    plain = InterpretedFunction.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__ == module.__name__:
            return self.rewrite()(*args, **kwargs)
        return plain(self, *args, **kwargs)

    InterpretedFunction.__call__ = call
