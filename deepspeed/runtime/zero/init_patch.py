"""Noticing when a module has been built: the process-wide part of ``deepspeed.zero.Init``.

While a context is open in some thread, every ``__init__`` of a module class is wrapped (classes defined meanwhile
too). The wrapper does something only in a thread that has opened a context itself: modules built in other threads are
none of its business. When the outermost ``__init__`` of a module returns, the innermost context of the thread is told.

Tensor constructors are not patched but seen through a torch function mode, which belongs to its thread by nature.

Invariant: when the last context of the process is left, on whatever path, every class has the ``__init__`` it had.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class Context(Protocol):
    """Who is told what is built."""

    def module_built(self, module: nn.Module) -> None:
        """The constructor of ``module`` has returned."""


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.contexts: list[Context] = []  # open in this thread, innermost last
        self.parked: list[list[Context]] = []  # put aside by :func:`park`
        self.building: list[int] = []  # id() of the modules whose constructor is running
        self.late: list[weakref.ref[nn.Module]] = []  # built by constructors that could not be wrapped in time


_thread = _ThreadState()
_lock = threading.Lock()
_users = 0  # contexts open in all threads
_wrapped: dict[type, tuple[Any, Any]] = {}  # class -> (its own __init__, the wrapper)


def innermost() -> Context | None:
    """The context that modules built here and now belong to."""
    return _thread.contexts[-1] if _thread.contexts else None


def constructing() -> bool:
    """Whether the constructor of some module is running in a context of this thread."""
    return bool(_thread.contexts) and bool(_thread.building)


def open_context(context: Context) -> None:
    """Start telling ``context`` about the modules this thread builds."""
    global _users
    with _lock:
        if _users == 0:
            try:
                _wrap_everything()
            except BaseException:
                _unwrap_everything()
                raise
        _users += 1
    _thread.contexts.append(context)


def close_context(context: Context, *, completed: bool) -> None:
    """The opposite. ``completed`` is False while an exception passes: what is unfinished is not looked at then."""
    global _users
    late, _thread.late = _thread.late, []
    try:
        if completed:
            _tell_late(context, late)
    finally:
        _thread.contexts.remove(context)
        with _lock:
            _users -= 1
            if _users == 0:
                _unwrap_everything()


def park() -> None:
    """Until :func:`unpark`, this thread behaves as if no context were open."""
    _thread.parked.append(_thread.contexts)
    _thread.contexts = []


def unpark() -> None:
    """Undo the last :func:`park`."""
    if _thread.parked:
        _thread.contexts = _thread.parked.pop()


@contextlib.contextmanager
def parked() -> Iterator[None]:
    """Inside, no context is open in this thread."""
    park()
    try:
        yield
    finally:
        unpark()


# ---- classes ---------------------------------------------------------------------------------------------------------


def all_subclasses(cls: type) -> set[type]:
    """Every class below ``cls``, without itself."""
    found: set[type] = set()
    waiting: list[type] = [cls]
    while waiting:
        sub: type
        for sub in type.__subclasses__(waiting.pop()):
            if sub not in found:
                found.add(sub)
                waiting.append(sub)
    return found


def _wrap_everything() -> None:
    for cls in (nn.Module, *all_subclasses(nn.Module)):
        _wrap_class(cls)

    def seen(cls: type, /, **kwargs: Any) -> None:
        super(nn.Module, cls).__init_subclass__(**kwargs)  # type: ignore[misc]
        _wrap_class(cls)

    nn.Module.__init_subclass__ = classmethod(seen)  # type: ignore[assignment]


def _unwrap_everything() -> None:
    if "__init_subclass__" in nn.Module.__dict__:
        del nn.Module.__init_subclass__
    for cls, (original, wrapper) in _wrapped.items():
        if cls.__dict__.get("__init__") is wrapper:  # else somebody has replaced it since, and it passes us by
            cls.__init__ = original  # type: ignore[misc]
    _wrapped.clear()


def _wrap_class(cls: type) -> None:
    original = cls.__dict__.get("__init__")
    if original is None or cls in _wrapped or issubclass(cls, torch.jit.ScriptModule):
        return
    wrapper = _wrap(original, root=cls is nn.Module)
    _wrapped[cls] = (original, wrapper)
    cls.__init__ = wrapper  # type: ignore[method-assign]


def _wrap(original: Callable[..., None], *, root: bool) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        # Nothing of ``self`` may be touched before its own constructor has run: its attributes do not exist yet.
        context = innermost()
        building = _thread.building
        if context is None or id(self) in building:
            original(self, *args, **kwargs)
            return
        building.append(id(self))
        try:
            original(self, *args, **kwargs)
        finally:
            building.pop()
        if root and _slipped_through(type(self)):
            _thread.late.append(weakref.ref(self))
            return
        if not building and _thread.late:
            late, _thread.late = _thread.late, []
            _tell_late(context, late)
        context.module_built(self)

    __init__._ds_wrapper = True  # type: ignore[attr-defined]
    return __init__


def _slipped_through(cls: type) -> bool:
    """Whether the constructor of ``cls`` is not wrapped: made by a decorator, or past ``__init_subclass__``."""
    if getattr(cls.__init__, "_ds_wrapper", False):  # type: ignore[misc]
        return False
    with _lock:
        for base in cls.__mro__:
            if issubclass(base, nn.Module):
                _wrap_class(base)  # in time for the next one
    return True


def _tell_late(context: Context, late: list[weakref.ref[nn.Module]]) -> None:
    for reference in late:
        module = reference()
        if module is not None:
            context.module_built(module)


# ---- tensor constructors ---------------------------------------------------------------------------------------------


class ConstructorMode(TorchFunctionMode):
    """Calls ``replacements[f]`` in place of torch function ``f``, in this thread, unless the contexts are parked."""

    def __init__(self, replacements: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
        super().__init__()
        self._replacements = replacements

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _thread.contexts:
            func = self._replacements.get(func, func)
        return func(*args, **(kwargs or {}))
