"""What a parameter is while its data is sharded: shape and dtype as always, values fetched on first use.

While a block is released, each of its parameters has the class ``Sharded<its class>`` and a placeholder as data: one
NaN expanded to the parameter's shape. Every torch function that meets such a parameter passes through
:func:`_dispatch`:

    asks only about metadata (shape, numel, grad ...)   answered
    needs values, in forward, backward or grad mode      the block is gathered, then the function runs
    writes a whole value (``copy_``, ``zero_``, ``data =``) each rank writes its own shard, nothing is gathered
    needs values anywhere else                           :class:`ShardedParameterError` with the call to add

Gathering by itself stops at that last line because a gather is collective: reading weights on one rank only, in a
logging line, would make that rank wait for the others. ``param.data`` and ``param.detach()`` outside of training give
a :class:`ShardedData`, which carries the metadata on and treats a read of its values in the same way.

So no read of a parameter sees a wrong value, whoever owns it and wherever it stands: outside its module, in recomputed
or user-written autograd functions, in loss terms. Code that takes the pointer in C++ without going through torch's
dispatch is served by the modules' forward hooks (``sharded_module.py``), and else finds NaN.

The swap of the class costs nothing while a parameter is gathered: it is a plain parameter then.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from deepspeed.runtime.zero.param_block import ParamBlock

_NO_DISPATCH = torch._C.DisableTorchFunctionSubclass


class ShardedParameterError(RuntimeError):
    """The values of a sharded parameter were asked for where they cannot be gathered by themselves."""


class ShardedTensor:
    """Mixin of everything that stands for a sharded parameter; sends torch functions to :func:`_dispatch`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METADATA:
            with _NO_DISPATCH():
                return func(*args, **(kwargs or {}))
        return _entry(func, args, kwargs or {})

    # nn.Parameter answers these itself, without dispatch.

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # as torch.Tensor's
        block, param = block_of(self), parameter_of(self)
        kind = "data of a parameter" if isinstance(self, ShardedData) else "Parameter"
        name = f" {block.name_of(param)!r}" if block is not None else ""
        return f"<{kind}{name} of shape {tuple(param.shape)}, {param.dtype}, sharded>"

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __deepcopy__(self, memo: Any) -> Any:
        block = block_of(self)
        if block is None or block.owner is None:
            raise copy_refusal(self)
        return block.owner.copy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise copy_refusal(self)


class ShardedData(ShardedTensor, torch.Tensor):  # type: ignore[misc]  # __repr__ takes more than Tensor's
    """``param.data`` or ``param.detach()`` of a sharded parameter: its metadata, and the way to it. Has no memory."""

    _ds_param: nn.Parameter

    @staticmethod
    def of(param: nn.Parameter) -> ShardedData:
        with _NO_DISPATCH():
            made: ShardedData = torch.Tensor._make_wrapper_subclass(
                ShardedData, param.shape, dtype=param.dtype, device=param.device
            )
        made._ds_param = param
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """What torch's functions do not show: ``torch.func`` puts its own tensors around this one, in C++."""
        return _with_values(func, args, kwargs or {})


@functools.cache
def guard_class(cls: type[nn.Parameter]) -> type[nn.Parameter]:
    """The class that a parameter of class ``cls`` has while it is sharded. A subclass, so ``isinstance`` holds."""
    made = type(f"Sharded{cls.__name__}", (ShardedTensor, cls), {"__module__": __name__})
    if _entry is not _dispatch:
        _break_graphs_at(made)
    _guards.append(made)
    return made


def hide_from_compiler() -> None:
    """From now on torch.compile ends its graph where it meets a sharded parameter, and traces nothing of this module.

    Its guards would look at the memory of the placeholder, past what the parameter says of itself. Loads the compiler,
    which every torch optimizer does when it is made.
    """
    global _entry
    if _entry is _dispatch:
        _entry = torch.compiler.disable(_dispatch)
        for made in _guards:
            _break_graphs_at(made)


def _break_graphs_at(cls: type) -> None:
    torch._dynamo.config.nontraceable_tensor_subclasses.add(cls)


def placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """NaN (0 for integers) in ``shape``, in one element of memory."""
    return _placeholder_element(dtype, device).expand(shape)


@functools.cache
def _placeholder_element(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device)


def block_of(value: object) -> ParamBlock | None:
    """The block of a sharded parameter (gathered or not) or of its ``ShardedData``; None for anything else."""
    reference = getattr(parameter_of(value), "__dict__", {}).get("_ds_block")
    return reference() if reference is not None else None


def parameter_of(value: Any) -> Any:
    """The parameter that ``value`` is, or stands for."""
    return value._ds_param if isinstance(value, ShardedData) else value


# ---- dispatch ------------------------------------------------------------------------------------------------------


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    special = _SPECIAL.get(func)
    if special is not None:
        return special(func, args, kwargs)
    return _with_values(func, args, kwargs)


_entry: Callable[..., Any] = _dispatch
_guards: list[type] = []


def _with_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gather what ``func`` needs, where that is allowed, and run it on real parameters."""
    blocks: dict[int, ParamBlock] = {}
    names: dict[int, str] = {}
    for held in _sharded_in((*args, *kwargs.values())):
        param = parameter_of(held)
        block = block_of(param)
        if block is None or block.owner is None:
            raise ShardedParameterError(
                f"{_name(func)}: a sharded parameter of shape {tuple(param.shape)} has lost its engine (destroyed?) "
                "and with it its values. Load them from a checkpoint"
            )
        if not block.pins and not block.owner.may_gather():
            raise _refusal(block.name_of(param), _name(func))
        blocks[id(block)] = block
        if block.full is None:
            names[id(block)] = block.name_of(param)
    with contextlib.ExitStack() as pins:
        for block in blocks.values():  # one after the other must not send its predecessor away
            pins.enter_context(block.pinned())
            if block.full is None:
                with block.owner.fetching_for(f"{_name(func)} reads parameter {names[id(block)]!r}"):
                    block.owner.fetch(block)
            else:
                block.owner.fetch(block)
        args = tuple(_real(arg) for arg in args)
        return func(*args, **{key: _real(value) for key, value in kwargs.items()})


def _sharded_in(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, ShardedTensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _sharded_in(value)
        elif isinstance(value, dict):
            yield from _sharded_in(value.values())


def _real(value: Any) -> Any:
    """``value`` with every :class:`ShardedData` in it replaced by the gathered data."""
    if isinstance(value, ShardedData):
        return value._ds_param.data
    if type(value) in (list, tuple):
        return type(value)(_real(item) for item in value)
    if type(value) is dict:
        return {key: _real(item) for key, item in value.items()}
    return value


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    owner = getattr(func, "__self__", None)
    attribute = getattr(owner, "__name__", None)
    return f"{name} of {attribute}" if name in ("__get__", "__set__") and attribute else name


def _refusal(name: str, func: str) -> ShardedParameterError:
    """The error for a read of the values of parameter ``name`` by ``func`` where no gather may be started."""
    return ShardedParameterError(
        f"parameter {name!r} is sharded over the ranks (ZeRO stage 3), and {func} needs its values outside forward and "
        "backward. Gathering them takes every rank: wrap the code in `with deepspeed.zero.GatheredParameters(params):` "
        "on all ranks (modifier_rank=0 to write), or read a copy with deepspeed.utils.safe_get_full_fp32_param(param)"
    )


def refuse_tracing(blocks: Sequence[ParamBlock]) -> None:
    """Raise where ``torch.jit.trace`` or an exporter built on it is about to put ``blocks`` into its graph.

    The graph reads the parameters' memory in C++, where a released parameter is NaN.
    """
    block = next((block for block in blocks if not block.pins), None)
    if block is not None:
        raise ShardedParameterError(
            f"torch.jit.trace (or an export that uses it) of a module whose parameter {block.places[0].name!r} is "
            "sharded over the ranks (ZeRO stage 3): the graph would hold no values. Trace and save on all ranks inside "
            "`with deepspeed.zero.GatheredParameters(list(module.parameters())):`, or load what "
            "engine.save_16bit_model wrote into a module of its own and trace that"
        )


# ---- functions with an answer of their own ---------------------------------------------------------------------------


def _data_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``.data`` and ``.detach()``: real values during training, else a :class:`ShardedData`."""
    param = parameter_of(args[0])
    block = block_of(param)
    if block is not None and block.owner is not None and block.owner.in_training():
        return _with_values(func, args, kwargs)
    return ShardedData.of(param)


def _write(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``copy_``, ``zero_``, ``fill_``, ``data =`` and their like: every rank writes its own elements of the value."""
    target = args[0]
    if not isinstance(target, ShardedTensor):  # a sharded tensor is the source
        return _with_values(func, args, kwargs)
    param: Any = parameter_of(target)
    block = block_of(param)
    source = args[1] if len(args) > 1 else kwargs.get("src", kwargs.get("value", 0.0))
    if block is None or block.owner is None:
        return _with_values(func, args, kwargs)
    if isinstance(source, ShardedTensor):
        if parameter_of(source) is param:  # module.to() and its kin assign a parameter its own data
            return None if func == _SET_DATA else target
        return _with_values(func, args, kwargs)
    if torch.is_grad_enabled() and param.requires_grad and target is param and func != _SET_DATA:
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    if func == _SET_DATA and tuple(source.shape) != tuple(param.shape):
        raise ShardedParameterError(
            f"parameter {block.name_of(param)!r} is sharded; .data was assigned a tensor of shape "
            f"{tuple(source.shape)}, expected {tuple(param.shape)}"
        )
    if block.owner.before_write() and isinstance(source, torch.Tensor):
        return _with_values(func, args, kwargs)
    block.write_shard(param._ds_position, source)
    return None if func == _SET_DATA else target


def _in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Conversions (``to``, ``float`` ...) that would change nothing give the parameter itself."""
    held = args[0]
    with _NO_DISPATCH():
        probe = parameter_of(held).data
        found = func(probe, *args[1:], **kwargs)
        # torch converts from "cpu" to "cpu:0" by copying, though the host is one device
        same_host = found.device.type == probe.device.type == "cpu" and found.dtype == probe.dtype
        if found is probe or (same_host and not kwargs.get("copy", False)):
            return held
    block = block_of(held)
    if block is not None and block.owner is not None and not block.pins and not block.owner.may_gather():
        module = _converted_module()
        if module:
            raise _conversion_refusal(block.name_of(parameter_of(held)), module, probe, found)
    return _with_values(func, args, kwargs)


def _converted_module() -> str | None:
    """The class of the module whose ``half()``, ``to()`` or the like is under way; None when none is."""
    name, frame = None, sys._getframe(1)
    while frame is not None:
        if frame.f_code is nn.Module._apply.__code__:
            name = type(frame.f_locals.get("self")).__name__
        frame = frame.f_back  # type: ignore[assignment]
    return name


def _conversion_refusal(name: str, module: str, old: torch.Tensor, new: torch.Tensor) -> ShardedParameterError:
    change = f"from {old.dtype} to {new.dtype}" if old.dtype != new.dtype else f"from {old.device} to {new.device}"
    return ShardedParameterError(
        f"{module} was to be converted {change} and has stopped at parameter {name!r}, which is sharded over the ranks "
        "(ZeRO stage 3) and keeps its dtype and device. No sharded parameter has changed; buffers of modules before "
        f"it may be {new.dtype} on {new.device} already: convert those back, or build the model anew. The dtype of "
        "training is set by the bf16 or fp16 section of the config, or by converting before deepspeed.initialize and "
        "by zero.Init(dtype=...)"
    )


def copy_refusal(held: Any) -> ShardedParameterError:
    """The error for copying or pickling a sharded parameter or its data."""
    param, block = parameter_of(held), block_of(held)
    name = block.name_of(param) if block is not None else "?"
    return ShardedParameterError(
        f"parameter {name!r} is sharded over the ranks (ZeRO stage 3) and cannot be copied or pickled: this rank holds "
        "only its shard. Save with engine.save_checkpoint or engine.save_16bit_model; copy inside "
        "`with deepspeed.zero.GatheredParameters(params):`"
    )


def _contiguous_facts(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``stride``, ``is_contiguous`` ... as of the gathered parameter, whose data is contiguous."""
    with _NO_DISPATCH():
        meta = torch.empty(args[0].shape, dtype=args[0].dtype, device="meta")
        return func(meta, *args[1:], **kwargs)


def _storage_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``untyped_storage()`` outside of training: one byte of the parameter's own, which tells which tensors are tied.

    Exports compare storages, often on one rank alone, where a gather would wait for the others for ever.
    """
    param: Any = parameter_of(args[0])
    block = block_of(param)
    if block is None or block.owner is None or block.pins or block.owner.in_training():
        return _with_values(func, args, kwargs)
    identity = param.__dict__.get("_ds_identity")
    if identity is None:
        identity = param._ds_identity = torch.zeros(1, dtype=torch.uint8, device=param.device)
    return identity.untyped_storage()


def _address_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``data_ptr()``: who asks for an address outside of training would read what is not there."""
    block = block_of(parameter_of(args[0]))
    if block is not None and block.owner is not None and not block.pins and not block.owner.in_training():
        raise _refusal(block.name_of(parameter_of(args[0])), _name(func))
    return _with_values(func, args, kwargs)


_T: Any = torch.Tensor
_SET_DATA = _T.data.__set__

_SPECIAL: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    _T.data.__get__: _data_of,
    _T.detach: _data_of,
    torch.detach: _data_of,
    _SET_DATA: _write,
    _T.copy_: _write,
    _T.zero_: _write,
    _T.fill_: _write,
    _T.to: _in_place,
    _T.float: _in_place,
    _T.double: _in_place,
    _T.half: _in_place,
    _T.bfloat16: _in_place,
    _T.cuda: _in_place,
    _T.cpu: _in_place,
    _T.contiguous: _in_place,
    _T.untyped_storage: _storage_of,
    _T.data_ptr: _address_of,
    _T.stride: _contiguous_facts,
    _T.is_contiguous: _contiguous_facts,
}


def _getters(*names: str) -> Iterator[Any]:
    return (getattr(_T, name).__get__ for name in names if hasattr(_T, name))  # not every torch has all


# What can be said of a sharded parameter without its values.
_METADATA = frozenset(
    {
        *_getters(
            "shape", "requires_grad", "grad", "dtype", "device", "layout", "ndim", "is_leaf", "grad_fn", "_version",
            "itemsize", "nbytes", "is_sparse", "is_sparse_csr", "is_quantized", "is_meta", "is_cuda", "is_cpu",
            "is_mps", "is_mkldnn", "is_nested", "is_xpu", "name", "retains_grad", "output_nr", "_backward_hooks",
            "_post_accumulate_grad_hooks", "_grad", "_grad_fn", "is_ipu", "is_vulkan", "is_maia", "is_xla",
            "grad_dtype",
        ),
        _T.requires_grad.__set__, _T.grad.__set__, _T.grad.__delete__,
        _T.size, _T.dim, _T.numel, _T.nelement, _T.ndimension, _T.element_size, _T.is_floating_point, _T.is_complex,
        _T.is_signed, _T.get_device, _T.requires_grad_, _T.register_hook, _T.register_post_accumulate_grad_hook,
        _T.retain_grad, _T.__hash__, _T.__len__, _T.is_inference, _T.dim_order, _T.is_shared,
        torch.numel, torch.is_floating_point, torch.is_complex, torch.is_inference, torch.is_same_size,
        torch._has_compatible_shallow_copy_type,  # module.to() asks it
    }
)  # fmt: skip
