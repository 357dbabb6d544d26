"""``GatheredParameters``: sharded parameters made whole by hand; and parameters a module borrows from others.

Public under ``deepspeed.zero`` and ``partition_parameters.py``; the mechanics are those of ``gather.py`` and
``param_block.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from deepspeed.comm import collectives
from deepspeed.runtime.zero.param_block import ParamBlock
from deepspeed.runtime.zero.sharded_parameter import block_of, parameter_of
from deepspeed.utils.argument_checks import flag
from deepspeed.utils.logging import warning_once


class GatheredParameters:
    """Inside the context the sharded ones among ``params`` are whole. Collective at both ends; may be entered again.

    Args:
        params: a parameter, or any iterable of parameters (None among them stands for a missing bias); what is not
            sharded is left alone.
        modifier_rank: the rank (of the job) whose values count at the exit: they reach every rank, its shards and fp32
            masters. None: the context is for reading; edits are dropped at the exit, with one line naming them.
        fwd_module: the parameters are used in this module's forward (see :func:`register_external_parameter`).
        enabled: False does nothing at all.

    Raises:
        ValueError: ``modifier_rank`` is none of the ranks that share the parameters.
        TypeError: ``params`` are no parameters: a module, a name, ``named_parameters()``, a dict.
    """

    def __init__(
        self, params: Any, modifier_rank: int | None = None, fwd_module: nn.Module | None = None, enabled: bool = True
    ) -> None:
        self.enabled = flag(enabled, "GatheredParameters(enabled)")
        self.modifier_rank = modifier_rank
        self.params: list[nn.Parameter] = []
        self.whole: list[nn.Parameter] = []  # not sharded: one rank, or a lower stage
        self._stacks: list[contextlib.ExitStack] = []
        if not self.enabled:
            return
        listed = _listed(params)
        unique = {id(param): param for param in listed}
        self.params = [param for param in unique.values() if block_of(param) is not None]
        self.whole = [param for param in unique.values() if block_of(param) is None]
        if fwd_module is not None:
            for param in self.params:
                register_external_parameter(fwd_module, param)

    def __enter__(self) -> None:
        if not self.enabled:
            return
        stack = contextlib.ExitStack()
        stack.enter_context(self._gathered())
        self._stacks.append(stack)

    def __exit__(self, *exc: Any) -> None:
        if self.enabled:
            self._stacks.pop().__exit__(*exc)

    @contextlib.contextmanager
    def _gathered(self) -> Iterator[None]:
        blocks = _blocks(self.params)
        by_owner: dict[int, list[ParamBlock]] = {}
        for block in blocks:
            by_owner.setdefault(id(block.owner), []).append(block)
        sources = {id(block): self._source(block) for block in blocks} if self.modifier_rank is not None else {}
        with contextlib.ExitStack() as stack:
            for block in blocks:
                if not block.pins:  # else what was edited belongs to the context around this one
                    block.absorb()
                block.pins += 1
            for group in by_owner.values():
                use = f"GatheredParameters is entered with parameter {group[0].places[0].name!r}"
                with group[0].owner.fetching_for(use, by_hand=True):
                    group[0].owner.fetch_all(group)
                stack.enter_context(group[0].owner.tracking())
            before = {id(param): (param._version, param.data_ptr()) for param in self.params}
            completed = False
            try:
                yield
                completed = True
                if self.modifier_rank is not None:
                    self._refresh_masters()
            finally:
                for block in blocks:
                    block.pins -= 1
                try:
                    if completed:
                        if self.modifier_rank is not None:
                            self._spread(blocks, sources)
                        else:
                            self._report_dropped(before)
                finally:
                    for group in by_owner.values():
                        group[0].owner.release(group, drop_edits=True)

    def _refresh_masters(self) -> None:
        """Masters of parameters that are whole take the values the user has written, also through ``param.data``."""
        for param in self.whole:
            reference = getattr(param, "_ds_zero_owner", None)
            owner = reference() if reference is not None else None
            if owner is not None:
                group, position = owner.find(param)
                group.pull_masters({position})

    def _source(self, block: ParamBlock) -> int:
        """Position of the modifier among the ranks of ``block``."""
        assert self.modifier_rank is not None
        group = _users(block)
        ranks = list(range(block.world)) if group is None else torch.distributed.get_process_group_ranks(group)
        if self.modifier_rank not in ranks:
            raise ValueError(
                f"GatheredParameters(modifier_rank={self.modifier_rank}): the parameters are shared by the ranks "
                f"{ranks[:8]}{' ...' if len(ranks) > 8 else ''}; name one of them"
            )
        return ranks.index(self.modifier_rank)

    @torch.no_grad()
    def _spread(self, blocks: Iterable[ParamBlock], sources: dict[int, int]) -> None:
        """The modifier's values go to every rank's buffer, shard and masters: one broadcast per run of elements."""
        chosen = {id(param) for param in self.params}
        for block in blocks:
            picked = [i for i, place in enumerate(block.places) if id(place.param) in chosen and place.numel]
            for position in picked:
                block.take_back(position)
            what = f"edits made in GatheredParameters, {block.describe()}"
            for low, high in _runs(block, picked):
                assert block.full is not None
                part, source = block.full.narrow(0, low, high - low), sources[id(block)]
                collectives.broadcast(part, source, _users(block), what=what, key=block.index + 1).wait()
            block.written(set(picked))

    def _report_dropped(self, before: dict[int, tuple[int, int]]) -> None:
        """Name what was changed in this context; what a context inside it has kept, and what waits for the one around
        it, is not dropped. Writes through ``param.data`` leave no other trace than values."""
        for param in self.params:
            block = block_of(param)
            if block is None or block.pins:
                continue
            position: int = param._ds_position  # type: ignore[attr-defined]
            seen = before[id(param)] != (param._version, param.data_ptr())
            if block.unsaved(position) if seen else block.differs(position):
                warning_once(
                    f"parameter {block.name_of(param)!r} was changed inside GatheredParameters without modifier_rank: "
                    "the change is dropped. Pass modifier_rank=<the rank whose values count>"
                )


def _users(block: ParamBlock) -> Any:
    """The group of all ranks that use ``block``: where its shards have replicas, more than those that share it."""
    return block.route.everyone or block.process_group


def _blocks(params: Iterable[nn.Parameter]) -> list[ParamBlock]:
    found = {id(block): block for param in params if (block := block_of(param)) is not None}
    return list(found.values())


def _runs(block: ParamBlock, positions: list[int]) -> Iterator[tuple[int, int]]:
    """Elements of these parameters as ``(start, end)``, neighbours joined."""
    low = high = -1
    for place in sorted((block.places[i] for i in positions), key=lambda place: place.start):
        if low >= 0 and place.start - high <= 64:  # alignment between neighbours
            high = place.start + place.numel
            continue
        if low >= 0:
            yield low, high
        low, high = place.start, place.start + place.numel
    if low >= 0:
        yield low, high


def _listed(params: Any) -> list[Any]:
    if isinstance(params, torch.Tensor):
        return [parameter_of(params)]
    wrong = params
    if isinstance(params, Iterable) and not isinstance(params, str):
        listed = list(params)
        others = [item for item in listed if item is not None and not isinstance(item, torch.Tensor)]
        if not others:
            # What stands for a sharded parameter (`param.data`) means the parameter.
            return [parameter_of(item) for item in listed if item is not None]
        wrong = others[0]
    raise TypeError(
        "deepspeed.zero.GatheredParameters: expected a parameter or an iterable of parameters; found "
        f"{'' if wrong is params else 'among them '}{type(wrong).__name__}. Pass module.parameters(), "
        "or the parameters themselves"
    )


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """``module`` uses ``parameter`` in its forward although another module holds it: it is gathered with the others.

    Needed only where a kernel takes the parameter's pointer past torch's dispatch; any torch function that meets a
    sharded parameter gathers it by itself. Raises TypeError for anything but a parameter.
    """
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise TypeError(
            f"register_external_parameter(module, parameter): found {type(module).__name__}, {type(parameter).__name__}"
        )
    external: dict[int, nn.Parameter] = module.__dict__.setdefault("_ds_external", {})
    external[id(parameter)] = parameter


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undo :func:`register_external_parameter`. Raises RuntimeError when it was not registered."""
    external = module.__dict__.get("_ds_external", {})
    if id(parameter) not in external:
        raise RuntimeError(f"the parameter is not registered as external with this {type(module).__name__}")
    del external[id(parameter)]
