"""Which parameters are gathered together: cutting a module into blocks. Looks at structure and sizes, moves nothing.

An *atom* is what is never torn apart: a layer of a ``ModuleList`` or ``Sequential`` with all below it (a transformer
block), a module marked as a leaf, or else the parameters one module holds itself. Neighbouring atoms are merged into a
block until it has the wanted number of elements, so a block is gathered by one collective and small modules do not
cost one each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from deepspeed.utils.z3_leaf_module import z3_leaf_module

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True)
class CutOptions:
    """Sizes in elements.

    ``target``: of a block; None merges nothing beyond single atoms. ``split_atoms``: an atom larger than ``target`` is
    cut between its parameters; one larger than ``max_block`` always is. ``persistent``: parameters below it stay
    gathered, as long as their sum does not exceed ``max_persistent``. ``granularity``: modules with fewer elements per
    descendant module are atoms.
    """

    target: int | None = None
    split_atoms: bool = False
    max_block: int = 1 << 62
    persistent: int = 0
    max_persistent: int = 1 << 62
    granularity: int = 0


def number_atoms(module: nn.Module, granularity: int = 0) -> dict[int, int]:
    """``id(parameter) -> number of its atom``, atoms numbered in order of registration. A tied one has its first."""
    atoms: dict[int, int] = {}
    last = -1

    def take(params: Sequence[nn.Parameter]) -> None:
        nonlocal last
        fresh = [param for param in params if id(param) not in atoms]
        if fresh:
            last += 1
            atoms.update((id(param), last) for param in fresh)

    def walk(part: nn.Module, in_list: bool) -> None:
        if z3_leaf_module(part) or (in_list and not _has_list(part)) or _is_fine(part, granularity):
            take(list(part.parameters()))
            return
        take(list(part.parameters(recurse=False)))
        for child in part.children():
            walk(child, isinstance(part, _LISTS))

    walk(module, False)
    return atoms


def _has_list(module: nn.Module) -> bool:
    return any(
        isinstance(part, _LISTS) and sum(1 for child in part.children() if any(True for _ in child.parameters())) > 1
        for part in module.modules()
    )


def _is_fine(module: nn.Module, granularity: int) -> bool:
    if granularity <= 0:
        return False
    descendants = sum(1 for _ in module.modules()) - 1
    return descendants > 0 and sum(param.numel() for param in module.parameters()) / descendants < granularity


def persistent_params(params: Sequence[nn.Parameter], options: CutOptions) -> set[int]:
    """``id()`` of the parameters of ``params`` (in order of registration) that stay gathered."""
    chosen: set[int] = set()
    held = 0
    for param in params:
        if param.numel() < options.persistent and held + param.numel() <= options.max_persistent:
            chosen.add(id(param))
            held += param.numel()
    return chosen


def cut(
    params: Sequence[nn.Parameter], atoms: dict[int, int], persistent: set[int], options: CutOptions
) -> list[list[nn.Parameter]]:
    """``params`` as blocks, in their order; those in ``persistent`` are one block, the last."""
    blocks: list[list[nn.Parameter]] = []
    held = 0
    previous: int | None = None
    moving = [param for param in params if id(param) not in persistent]
    numbers = [atoms.get(id(param), -1 - place) for place, param in enumerate(moving)]  # foreign: each on its own
    whole: dict[int, int] = {}
    for atom, param in zip(numbers, moving, strict=True):
        whole[atom] = whole.get(atom, 0) + param.numel()
    for atom, param in zip(numbers, moving, strict=True):
        coming = param.numel() if options.split_atoms or atom == previous else whole[atom]
        if not blocks or _starts_block(atom == previous, held, coming, options):
            blocks.append([])
            held = 0
        blocks[-1].append(param)
        held += param.numel()
        previous = atom
    last = [param for param in params if id(param) in persistent]
    return [*blocks, last] if last else blocks


def _starts_block(same_atom: bool, held: int, coming: int, options: CutOptions) -> bool:
    if same_atom and not options.split_atoms:
        return held + coming > options.max_block
    if options.target is None:
        return not same_atom
    return held + coming > options.target
