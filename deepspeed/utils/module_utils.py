"""Dotted attribute paths: read and write ``a.b.0.c`` on nested objects."""

from typing import Any

__all__ = ["recursive_getattr", "recursive_setattr"]


def recursive_getattr(model: Any, module_name: str) -> Any:
    """Return the attribute at the dotted path ``module_name`` of ``model``.

    A numeric part such as ``0`` works for containers (``nn.Sequential``, ``nn.ModuleList``): modules keep their
    children under such names. AttributeError names the part that is missing.
    """
    target = model
    for depth, part in enumerate(module_name.split(".")):
        try:
            target = getattr(target, part)
        except AttributeError:
            walked = ".".join(module_name.split(".")[:depth]) or "the root"
            raise AttributeError(
                f"{module_name!r}: {walked} ({type(target).__name__}) has no attribute {part!r}"
            ) from None
    return target


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Set the attribute at the dotted path ``module_name`` of ``model`` to ``module``."""
    parent_path, _, leaf = module_name.rpartition(".")
    parent = recursive_getattr(model, parent_path) if parent_path else model
    setattr(parent, leaf, module)
