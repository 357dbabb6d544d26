"""``ShardedModule``: a user's module whose parameters are sharded, and the hooks that see them used.

Owns the gatherer, the blocks' cut, the parameters that no optimizer group shards (frozen ones, or all of them without
an optimizer), and two kinds of forward hooks:

    on the whole module     opens the scope in which parameters may be gathered and graphs keep notes of them
    on each part that holds parameters, before its forward     fetches its blocks

Most uses would be seen without the second kind, since a sharded parameter is fetched by whatever torch function meets
it; the hook is for kernels that take a pointer past torch's dispatch, and it fetches all of a module at once.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from deepspeed.comm.group_facts import facts_of
from deepspeed.runtime.swap_tensor.host_store import HostMemory
from deepspeed.runtime.zero.block_cut import CutOptions, cut, number_atoms, persistent_params
from deepspeed.runtime.zero.gather import GatherOptions, ParamGatherer
from deepspeed.runtime.zero.hooks import tensors_with_graph
from deepspeed.runtime.zero.layout import ShardLayout
from deepspeed.runtime.zero.param_block import ParamBlock, Place
from deepspeed.runtime.zero.routes import GatherRoute
from deepspeed.runtime.zero.shard_group import GroupSpec, ShardGroup
from deepspeed.runtime.zero.sharded_parameter import block_of, hide_from_compiler, refuse_tracing
from deepspeed.utils.z3_leaf_module import z3_leaf_module

_ALIGN_BYTES = 64


class ShardedModule:
    """See the module docstring. ``process_group`` carries the gathers alone, so that their order is their own."""

    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: Any,
        rank: int,
        world: int,
        names: dict[int, str],
        gather: GatherOptions | None = None,
        cut_options: CutOptions | None = None,
        route: GatherRoute | None = None,
        frozen_route: GatherRoute | None = None,
        align_numel: int = 1,
        host: HostMemory | None = None,
    ) -> None:
        """``route``: how blocks are gathered, ``frozen_route``: blocks of frozen parameters alone; default: exactly.

        ``align_numel``: parameters and pieces start at multiples of so many elements. ``host``: shards live there.
        """
        self.route = route or GatherRoute(process_group)
        self.frozen_route = frozen_route or self.route
        self.align_numel = align_numel
        self.host = host
        self.module = module
        self.process_group, self.rank, self.world = process_group, rank, world
        self.names = names
        self.gatherer = ParamGatherer(gather)
        self.cut_options = cut_options or CutOptions()
        self.atoms = number_atoms(module, self.cut_options.granularity)
        self.persistent = persistent_params(list(module.parameters()), self.cut_options)
        self.rest: list[ShardGroup] = []  # sharded parameters without an optimizer
        self._scopes: list[contextlib.ExitStack] = []
        self._handles: list[Any] = []

    # ---- construction ----------------------------------------------------------------------------------------------

    def cut(self, params: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        """``params`` (of one dtype and optimizer group) as the blocks they are gathered in, in their order."""
        return cut(params, self.atoms, self.persistent, self.cut_options)

    @property
    def secondary_ranks(self) -> int:
        """Ranks that a second copy of released blocks is spread over; 0 where none is kept."""
        return facts_of(self.route.secondary).size if self.route.secondary is not None else 0

    @property
    def releases(self) -> bool:
        """Whether blocks are released after use, as not all of the module may stay gathered."""
        options = self.gatherer.options
        return sum(param.numel() for param in self.module.parameters()) > min(options.max_live, options.max_reuse)

    def align(self, itemsize: int) -> int:
        """Elements of ``itemsize`` bytes whose multiples parameters and pieces start at."""
        return max(1, _ALIGN_BYTES // itemsize, self.align_numel)

    @contextlib.contextmanager
    def whole_values(self, params: Sequence[nn.Parameter]) -> Iterator[list[torch.Tensor]]:
        """The whole data of ``params``, also of those that are sharded already; their blocks lose them afterwards."""
        sharded = {id(block): block for param in params if (block := block_of(param)) is not None}
        for block in sharded.values():
            block.pins += 1
            (block.owner or self.gatherer).fetch_all([block])
        yield [param.data for param in params]
        for block in sharded.values():
            block.pins -= 1
            owner = block.owner or self.gatherer
            block.remove(params)
            if block.places:
                owner.release([block])

    def add_block(self, places: Sequence[Place], shard: torch.Tensor) -> ParamBlock:
        """A new block of these parameters, released; ``shard`` holds this rank's values."""
        block = ParamBlock(
            places,
            shard,
            process_group=self.process_group,
            rank=self.rank,
            world=self.world,
            index=len(self.gatherer.blocks),
            persistent=bool(places) and all(id(place.param) in self.persistent for place in places),
            offloaded_from=places[0].param.device if self.host is not None and places else None,
            route=self.route if any(place.param.requires_grad for place in places) else self.frozen_route,
        )
        block.hide()
        self.gatherer.add(block)
        return block

    def shard_rest(self) -> None:
        """Shard every parameter of the module that no block holds yet: frozen, or of no optimizer."""
        runs: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for param in self.module.parameters():
            block = block_of(param)
            if block is None or block.owner is not self.gatherer:
                runs.setdefault((param.dtype, param.device), []).append(param)
        for run in runs.values():
            self.rest.append(self._rest_group(run))

    def _rest_group(self, params: list[nn.Parameter]) -> ShardGroup:
        order = {key: position for position, key in enumerate(self.names)}
        dtype = params[0].dtype
        align = self.align(params[0].element_size())
        blocks = self.cut(params)
        listed = [param for block in blocks for param in block]

        def entry(param: nn.Parameter) -> tuple[str, int]:
            return self.names.get(id(param), f"param{order.get(id(param), 0)}"), param.numel()

        layout = ShardLayout.by_block(
            [[entry(param) for param in block] for block in blocks],
            self.world,
            param_align=align,
            piece_align=align,
        )
        spec = GroupSpec(
            group_index=-1,
            names=tuple(slot.name for slot in layout.slots),
            params=tuple(listed),
            order=tuple(order.get(id(param), 0) for param in listed),
            master_dtype=dtype,
            accum_dtype=dtype,
            comm_dtype=dtype,
            rank=self.rank,
            world=self.world,
        )
        return ShardGroup(spec, layout, self)

    # ---- hooks -----------------------------------------------------------------------------------------------------

    def install_hooks(self) -> None:
        """Hook the module and its parts as they are now; parts attached later are seen by ``install_hooks`` again."""
        hide_from_compiler()
        self.remove_hooks()
        reference = weakref.ref(self)

        def enter(module: nn.Module, args: Any) -> None:
            sharded = reference()
            if sharded is not None:
                stack = contextlib.ExitStack()
                stack.enter_context(sharded.gatherer.forward_scope())
                sharded._scopes.append(stack)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            sharded = reference()
            if sharded is not None and sharded._scopes:
                sharded._scopes.pop().close()

        self._handles.append(self.module.register_forward_pre_hook(_Hook(enter), prepend=True))
        self._handles.append(self.module.register_forward_hook(_Hook(leave), always_call=True))
        inside: set[nn.Module] = set()
        for part in self.module.modules():
            if part in inside:
                continue
            if z3_leaf_module(part):
                inside.update(part.modules())
                self._hook_leaf(part)
            else:
                self._hook_part(part)

    def _hook_part(self, part: nn.Module) -> None:
        own = [param for param in part._parameters.values() if param is not None]
        params = [param for param in (*own, *external_parameters(part)) if block_of(param) is not None]
        if params:
            self._handles.append(part.register_forward_pre_hook(self._fetch_hook(params)))

    def _hook_leaf(self, leaf: nn.Module) -> None:
        params = [param for param in leaf.parameters() if block_of(param) is not None]
        if not params:
            return
        fetch = self._fetch_hook(params)
        self._handles.append(leaf.register_forward_pre_hook(fetch))

        # In backward too, every rank fetches all of a leaf's blocks, whichever of them its own graph needs.
        def follow(module: nn.Module, args: Any, output: Any) -> None:
            for tensor in tensors_with_graph(output):
                tensor.register_hook(lambda grad: fetch(module, ()))

        self._handles.append(leaf.register_forward_hook(_Hook(follow)))

    def _fetch_hook(self, params: Sequence[nn.Parameter]) -> Callable[[nn.Module, Any], None]:
        blocks = list({id(block): weakref.ref(block) for param in params if (block := block_of(param))}.values())
        gatherer = weakref.ref(self.gatherer)

        def fetch(module: nn.Module, args: Any) -> None:
            into = gatherer()
            if into is None:
                return
            wanted = [block for reference in blocks if (block := reference()) is not None]
            if "_ds_external" in module.__dict__:
                wanted += [block for param in external_parameters(module) if (block := block_of(param)) is not None]
            if torch.jit.is_tracing():
                refuse_tracing(wanted)
            into.fetch_many(wanted)

        return _Hook(fetch)

    def remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        while self._scopes:
            self._scopes.pop().close()

    # ---- life ------------------------------------------------------------------------------------------------------

    def destroy(self, *, whole: bool = True) -> None:
        """Remove the hooks and give every parameter back: whole (collective), or without data."""
        self.remove_hooks()
        self.gatherer.destroy(whole=whole)
        for group in self.rest:
            group.release()
        self.rest = []


def external_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Parameters of other modules that ``module`` was registered to use."""
    return list(module.__dict__.get("_ds_external", {}).values())


class _Hook:
    """A hook that torch.compile calls and does not trace, since it changes what parameters are.

    It stays with its module: in a copy or pickle of that, whose parameters are whole, it does nothing.

    Making one loads the compiler, which every torch optimizer does when it is made.
    """

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._run = torch.compiler.disable(hook)

    def __call__(self, *args: Any) -> Any:
        return self._run(*args)

    def __reduce__(self) -> Any:  # copy.deepcopy asks it too
        return _idle_hook, ()


def _do_nothing(*args: Any) -> None:
    """What is left of a :class:`_Hook` in a copy."""


def _idle_hook() -> Callable[..., None]:
    return _do_nothing
