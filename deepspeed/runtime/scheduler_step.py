"""Whether a learning-rate schedule of the user's can be stepped with what `engine.step` was given."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any


def refuse_step_without(scheduler: Any, given: Collection[str]) -> None:
    """Before anything is updated: raise when ``scheduler.step`` cannot be called with the arguments ``given``.

    Raises:
        TypeError: names what is missing, such as ``metrics`` of ``ReduceLROnPlateau``, and where to pass it.
    """
    try:
        parameters = inspect.signature(scheduler.step).parameters.values()
    except (TypeError, ValueError):  # a callable that does not show its arguments
        return
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    missing = [p.name for p in parameters if p.kind not in optional and p.default is p.empty and p.name not in given]
    if missing:
        name = missing[0]
        raise TypeError(
            f"engine.step: {type(scheduler).__name__}.step needs {', '.join(missing)}; nothing was updated. Pass it as "
            f"engine.step(lr_kwargs={{{name!r}: ...}}) at every boundary, or step the scheduler yourself"
        )
