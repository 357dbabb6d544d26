"""Reading checkpoint files without running code from them: tensors as torch's, or as plain ones for tools.

Files are mapped, not read: a tensor costs disk traffic only where its elements are touched. Unpickling knows tensors,
plain data, a few harmless classes of the standard library and numpy, and the old class paths that files of other
releases name (those become :class:`PlainObject`). Anything else in a file becomes an inert :class:`Untrusted` object
that remembers which class was asked for, so that the weights of a file never depend on trusting its client state.
Classes registered with ``torch.serialization.add_safe_globals`` are honoured.

Owns: the allow-list. Does not own: what to do about an untrusted value (``reader.py``).
"""

from __future__ import annotations

import collections
import functools
import io
import pathlib
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.utils.torch_archive import load as archive
from deepspeed.utils.torch_archive.bridge import from_torch


class PlainObject:
    """The attributes of an object of an old class path, as data. ``pickled_as``: that path."""

    pickled_as = ""

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.__dict__})"


class Untrusted:
    """Stands for an object whose class is not on the allow-list. Holds nothing of it but the class's name."""

    path = "?"

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, value: Any) -> None: ...

    def extend(self, values: Any) -> None: ...

    def add(self, value: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __repr__(self) -> str:
        return f"<untrusted {self.path}>"


_OLD_CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
)


def _old_classes() -> dict[str, Any]:
    made: dict[str, Any] = {
        path: type(path.rpartition(".")[2], (PlainObject,), {"pickled_as": path}) for path in _OLD_CLASSES
    }
    made["deepspeed.runtime.fp16.loss_scaler.LossScaleProfile"] = str
    made["deepspeed.runtime.zero.config.ZeroStageEnum"] = int
    return made


def _harmless() -> dict[str, Any]:
    """Classes whose construction from any arguments does nothing but hold data."""
    import argparse
    import datetime
    import decimal
    import fractions
    import uuid

    found: dict[str, Any] = {}
    classes: list[type] = [
        argparse.Namespace, types.SimpleNamespace, collections.deque, collections.defaultdict, collections.Counter,
        collections.OrderedDict, datetime.datetime, datetime.date, datetime.time, datetime.timedelta,
        datetime.timezone, decimal.Decimal, fractions.Fraction, uuid.UUID, uuid.SafeUUID, io.BytesIO,
    ]  # fmt: skip
    for kind in classes:
        found[f"{kind.__module__}.{kind.__qualname__}"] = kind
    # Paths of the other family of systems cannot be made here; their pure form can. Later Pythons moved the module.
    for name in ("PurePath", "PurePosixPath", "PureWindowsPath", "Path", "PosixPath", "WindowsPath"):
        kind = getattr(pathlib, name)
        foreign = {"PosixPath": pathlib.PurePosixPath, "WindowsPath": pathlib.PureWindowsPath}
        if name in foreign and type(pathlib.Path()) is not kind:
            kind = foreign[name]
        for module in ("pathlib", "pathlib._local"):
            found[f"{module}.{name}"] = kind
    return found


def _common() -> dict[str, Any]:
    """Those of them that most files name, found without an import."""
    found: dict[str, Any] = {"collections.OrderedDict": collections.OrderedDict}
    builtin: list[type] = [
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        bytearray,
        list,
        tuple,
        dict,
        set,
        frozenset,
        range,
        slice,
    ]
    for kind in builtin:
        found[f"builtins.{kind.__name__}"] = kind
        found[f"__builtin__.{kind.__name__}"] = kind
    found["__builtin__.xrange"] = range
    return found


def _numpy_classes() -> dict[str, Any]:
    import numpy

    rebuild = numpy.ndarray((0,)).__reduce__()[0]
    scalar = numpy.float64(0).__reduce__()[0]
    found: dict[str, Any] = {"numpy.ndarray": numpy.ndarray, "numpy.dtype": numpy.dtype}
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        found[f"{module}._reconstruct"] = rebuild
        found[f"{module}.scalar"] = scalar
    for code in numpy.typecodes["All"]:
        if code != "O":
            kind: Any = type(numpy.dtype(code))
            found[f"{kind.__module__}.{kind.__qualname__}"] = kind
    return found


_TORCH_FUNCTIONS = (
    "torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3",
    "torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state",
    "torch._utils._rebuild_sparse_tensor", "torch.serialization._get_layout",
    "torch.Tensor", "torch.nn.parameter.Parameter", "torch.Size", "torch.device", "torch.storage.UntypedStorage",
    "torch.storage.TypedStorage",
)  # fmt: skip


def _plain_tensor(rebuild: Any, kind: Any, args: tuple[Any, ...], state: Any) -> Any:
    """A tensor with attributes or a class of its own, without them."""
    return rebuild(*args)


def _look_up(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(__import__(module, fromlist=[name]), name)


class _Table:
    """Path -> object of everything that may be named by a file; built when the first file is read."""

    def __init__(self) -> None:
        self._own = {**_old_classes(), **_common(), "_codecs.encode": _look_up("_codecs.encode")}

    @functools.cached_property
    def _rare(self) -> dict[str, Any]:
        return _harmless()

    @functools.cached_property
    def _numpy(self) -> dict[str, Any]:
        return _numpy_classes()

    @functools.cached_property
    def _torch(self) -> dict[str, Any]:
        found = {path: _look_up(path) for path in _TORCH_FUNCTIONS}
        found["torch._tensor._rebuild_from_type_v2"] = _plain_tensor
        return found

    @property
    def own(self) -> dict[str, Any]:
        """All that is not torch's."""
        return {**self._own, **self._rare, **self._numpy}

    def find(self, module: str, name: str) -> Any:
        """Where tensors are torch's."""
        import torch

        path = f"{module}.{name}"
        if path not in self._own and path in self._torch:
            return self._torch[path]
        if module == "torch":
            value = getattr(torch, name, None)
            if isinstance(value, (torch.dtype, torch.qscheme, torch.layout)):
                return value
        return self.find_plain(module, name) or _untrusted(path)

    def find_plain(self, module: str, name: str) -> Any:
        """Where tensors are plain: None for names of torch that nobody registered."""
        path = f"{module}.{name}"
        if path in self._own:
            return self._own[path]
        top = module.partition(".")[0]
        if top == "numpy" and path in self._numpy:
            return self._numpy[path]
        if path in self._rare:
            return self._rare[path]
        return _registered().get(path) or (None if top == "torch" else _untrusted(path))


_met_untrusted = False  # in any file of this process


def _untrusted(path: str) -> type[Untrusted]:
    global _met_untrusted
    _met_untrusted = True
    return type(path.rpartition(".")[2], (Untrusted,), {"path": path})


def _registered() -> dict[str, Any]:
    """What the user allowed with torch's own function: nothing, where torch was never imported."""
    found: dict[str, Any] = {}
    torch = sys.modules.get("torch")
    if torch is None:
        return found
    for entry in torch.serialization.get_safe_globals():
        if isinstance(entry, tuple):
            found[entry[1]] = entry[0]
        else:
            found[f"{entry.__module__}.{entry.__qualname__}"] = entry
    return found


_table: _Table | None = None


def table() -> _Table:
    global _table
    if _table is None:
        _table = _Table()
    return _table


class Unpickler(pickle.Unpickler):
    """Finds only what :class:`_Table` knows."""

    def find_class(self, module: str, name: str) -> Any:
        return table().find(module, name)


class _PickleModule(types.ModuleType):
    """What ``torch.load`` takes as ``pickle_module``."""

    Unpickler = Unpickler

    @staticmethod
    def load(file: Any, **kwargs: Any) -> Any:
        return Unpickler(file, **kwargs).load()


def load_file(path: pathlib.Path, map_location: Any = None) -> Any:
    """The object in a ``.pt`` file, tensors mapped (written to, they change in memory only).

    ``map_location``: as in ``torch.load``; None is host memory.

    First by ``torch.load(weights_only=True)``; files that ask for more are read with inert stand-ins.
    Raises CheckpointError naming the file when it is missing, torn or no such file at all.
    """
    import torch

    # The context removes at its end what it was given, so what the user registered must not be in it.
    registered = set(torch.serialization.get_safe_globals())
    allowed: list[Any] = [entry for name, value in table().own.items() if (entry := (value, name)) not in registered]
    try:
        with torch.serialization.safe_globals(allowed):
            return torch.load(path, map_location=map_location or "cpu", mmap=True, weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except pickle.UnpicklingError:
        pass
    except (RuntimeError, ValueError, EOFError, OSError) as error:
        if not _is_old_format(error):
            raise CheckpointError(f"{path} cannot be read, it is torn or not a checkpoint file: {error}") from error
    return _load_with_stand_ins(path, map_location or "cpu")


def _is_old_format(error: Exception) -> bool:
    return "mmap" in str(error)  # torch's wording for files that are not zip archives


def old_object(path: str, attributes: dict[str, Any]) -> PlainObject:
    """An object of the old class at ``path``, to be put in a file."""
    made: PlainObject = table().find_plain(*path.rsplit(".", 1))()
    made.__dict__.update(attributes)
    return made


def load_plain(path: pathlib.Path) -> Any:
    """The object in a ``.pt`` file as :func:`load_file` gives it, tensors mapped and plain, without importing torch.

    Files that hold more of torch than tensors, and those of its old format, are read by torch all the same. Raises
    CheckpointError as :func:`load_file` does.
    """
    try:
        return archive.load(path, table().find_plain)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except archive.NeedsTorch:
        return from_torch(load_file(path))
    except Exception as error:  # as in _load_with_stand_ins
        raise CheckpointError(f"{path} cannot be read, it is torn or not a checkpoint file: {error}") from error


def _load_with_stand_ins(path: pathlib.Path, map_location: Any) -> Any:
    import torch

    module = _PickleModule("pickle")
    try:
        try:
            return torch.load(path, map_location=map_location, mmap=True, weights_only=False, pickle_module=module)
        except RuntimeError as error:
            if not _is_old_format(error):
                raise
            return torch.load(path, map_location=map_location, weights_only=False, pickle_module=module)
    except Exception as error:
        # Whatever a damaged pickle makes of the allowed classes: the file is unreadable, and says so by its name.
        raise CheckpointError(f"{path} cannot be read, it is torn or not a checkpoint file: {error!r}") from error


def untrusted_paths(value: Any) -> list[str]:
    """Class paths of the untrusted objects inside ``value``, each once."""
    if not _met_untrusted:
        return []
    return list(dict.fromkeys(item.path for item in _walk(value) if isinstance(item, Untrusted) or _is_stand_in(item)))


def _is_stand_in(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Untrusted)


def _walk(value: Any, seen: set[int] | None = None) -> Iterator[Any]:
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    yield value
    children: list[Any] = []
    if isinstance(value, dict):
        children = [*value.keys(), *value.values()]
    elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        children = list(value)
    elif isinstance(value, (PlainObject, types.SimpleNamespace)) or type(value).__name__ == "Namespace":
        children = list(vars(value).values())
    for child in children:
        yield from _walk(child, seen)


def foreign_classes(value: Any, to_file: Callable[[Any], bytes]) -> list[str]:
    """Class paths a load of ``value`` would have to trust. ``to_file`` pickles it without tensor data."""

    import torch

    class _Probe(Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            return torch.UntypedStorage(0)

        def find_class(self, module: str, name: str) -> Any:
            if module.startswith("torch._utils") or (module == "torch._tensor"):
                return lambda *args: torch.empty(0)
            if module == "torch" and name.endswith("Storage"):
                return torch.UntypedStorage
            return super().find_class(module, name)

    return untrusted_paths(_Probe(io.BytesIO(to_file(value))).load())
