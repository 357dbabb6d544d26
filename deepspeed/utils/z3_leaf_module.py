"""Marks on modules whose parameters ZeRO stage 3 gathers and frees as one unit.

Owns: the mark and the ways to choose modules (class, class name, dotted name, suffix of a dotted name). Does not own
what the mark does: stage 3's hooks read it. Use it for blocks whose set of used children differs between ranks, such as
mixture-of-experts blocks.

A module marked inside another marked module adds nothing: the outer one is gathered whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from deepspeed.utils.logging import logger

if TYPE_CHECKING:
    from torch.nn import Parameter

__all__ = [
    "apply_zero_leaf_module_config",
    "get_z3_leaf_modules",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
    "z3_leaf_parameter",
]

_MARK = "_z3_leaf"
_PARAMETER_MARK = "ds_z3_leaf_module"


def z3_leaf_module(model: nn.Module) -> bool:
    """Tell whether ``model`` itself is marked."""
    return bool(getattr(model, _MARK, False))


def z3_leaf_parameter(model: Parameter) -> bool:
    """Tell whether a parameter belongs to a marked module (known once stage 3 has hooked the model)."""
    return hasattr(model, _PARAMETER_MARK)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark (or unmark) ``model`` itself."""
    setattr(model, _MARK, flag)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return all marked modules of ``model``, itself included, parents first."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def _mark_matching(model: nn.Module, matches: Callable[[str, nn.Module], bool], flag: bool) -> list[nn.Module]:
    """Set the mark of each module for which ``matches(dotted name, module)`` and return them, parents first."""
    found = [module for name, module in model.named_modules() if matches(name, module)]
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _class_names(module: nn.Module) -> set[str]:
    cls = type(module)
    return {cls.__name__, cls.__qualname__, f"{cls.__module__}.{cls.__qualname__}"}


def _not_found(what: str, wanted: Sequence[Any], model: nn.Module, there: Iterable[str]) -> ValueError:
    known = sorted(set(there))
    shown = ", ".join(known[:20]) + (f", ... ({len(known)} in all)" if len(known) > 20 else "")
    return ValueError(f"no module of {type(model).__name__} has {what} {list(wanted)!r}; it has: {shown}")


def _set_by_class(model: nn.Module, classes: Sequence[type | str], flag: bool, required: bool) -> list[nn.Module]:
    for entry in classes:
        if not isinstance(entry, type | str):
            raise ValueError(f"leaf module classes: expected classes or class names, found {entry!r}")
    types = tuple(entry for entry in classes if isinstance(entry, type))
    names = {entry for entry in classes if isinstance(entry, str)}
    found = _mark_matching(
        model, lambda _, module: isinstance(module, types) or not names.isdisjoint(_class_names(module)), flag
    )
    if required and not found:
        raise _not_found("class", classes, model, (type(module).__name__ for module in model.modules()))
    return found


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: list[type[nn.Module]] | list[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark all modules of the given classes and return them.

    Args:
        model: where to look, itself included.
        leaf_module_classes: classes (subclasses count), or class names, plain or with their module's path.
        raise_if_not_found: ValueError when no module matches; False returns an empty list.
    """
    return _set_by_class(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: list[type[nn.Module]] | list[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Remove the mark from all modules of the given classes and return them (see `set_z3_leaf_modules`)."""
    return _set_by_class(model, leaf_module_classes, False, raise_if_not_found)


def _set_by_text(
    model: nn.Module,
    wanted: Sequence[str],
    matches: Callable[[str, str], bool],
    what: str,
    flag: bool,
    required: bool,
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules whose name satisfies ``matches(name, wanted entry)``; second result: entries without a match."""
    hit: set[str] = set()

    def any_matches(name: str, module: nn.Module) -> bool:
        mine = {entry for entry in wanted if matches(name, entry)}
        hit.update(mine)
        return bool(mine)

    found = _mark_matching(model, any_matches, flag)
    missing = [entry for entry in wanted if entry not in hit]
    if required and missing:
        raise _not_found(what, missing, model, (name for name, _ in model.named_modules() if name))
    return found, missing


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: list[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark (``flag=False``: unmark) the modules with exactly these dotted names.

    Returns (modules, names without a module). ValueError when a name does not exist, unless ``raise_if_not_found`` is
    False; the others are marked all the same.
    """
    return _set_by_text(model, module_names, lambda name, wanted: name == wanted, "name", flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: list[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark (``flag=False``: unmark) the modules whose dotted name ends with one of these suffixes.

    Returns (modules, suffixes without a module). ValueError when a suffix matches nothing, unless
    ``raise_if_not_found`` is False; the others are marked all the same.
    """
    return _set_by_text(
        model,
        module_name_suffixes,
        lambda name, suffix: name.endswith(suffix),
        "a name ending in",
        flag,
        raise_if_not_found,
    )


def apply_zero_leaf_module_config(model: nn.Module, leaf_cfg: Any) -> list[nn.Module]:
    """Mark what the config section ``zero_optimization.leaf_module`` lists; returns the marked modules, each once.

    Args:
        model: where to look.
        leaf_cfg: object with the lists ``classes``, ``names`` and ``name_suffixes``; None does nothing. Entries the
            user wrote (``model_fields_set``) that match nothing are named in one warning; built-in defaults are not.
    """
    if leaf_cfg is None:
        return []
    by_class = {entry: _set_by_class(model, [entry], True, required=False) for entry in leaf_cfg.classes}
    by_name, names_missing = set_z3_leaf_modules_by_name(model, leaf_cfg.names, raise_if_not_found=False)
    by_suffix, suffixes_missing = set_z3_leaf_modules_by_suffix(model, leaf_cfg.name_suffixes, raise_if_not_found=False)
    classes_missing = [entry for entry, modules in by_class.items() if not modules]
    if "classes" not in getattr(leaf_cfg, "model_fields_set", {"classes"}):
        classes_missing = []
    for key, missing in (("classes", classes_missing), ("names", names_missing), ("name_suffixes", suffixes_missing)):
        if missing:
            logger.warning("zero_optimization.leaf_module.%s: no module of the model matches %s", key, missing)
    marked = [*(module for modules in by_class.values() for module in modules), *by_name, *by_suffix]
    return list(dict.fromkeys(marked))
