"""Which accelerator this process uses: chosen once, then the same object for everybody.

Owns: the choice and the singleton. The environment variable ``DS_ACCELERATOR`` names one; without it the first that is
available wins: plug-ins (in name order), cuda, mps, cpu. Does not own any device code, and imports a device module
only when it is chosen or asked for.

A plug-in is a subclass of ``DeepSpeedAccelerator`` announced by its package under the entry point group
``deepspeed.accelerators``::

    [project.entry-points."deepspeed.accelerators"]
    xpu = "my_package.xpu:XpuAccelerator"
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from deepspeed.utils.logging import logger

if TYPE_CHECKING:
    import logging
    from importlib.metadata import EntryPoint

__all__ = [
    "ENTRY_POINT_GROUP",
    "SUPPORTED_ACCELERATOR_LIST",
    "get_accelerator",
    "is_current_accelerator_supported",
    "set_accelerator",
]

ENTRY_POINT_GROUP = "deepspeed.accelerators"

SUPPORTED_ACCELERATOR_LIST: list[str] = ["cuda", "cpu", "mps"]
"""Names built into this package; plug-ins add theirs through the entry point group."""

_BUILT_IN: dict[str, tuple[str, str]] = {
    "cuda": ("deepspeed.accelerator.cuda_accelerator", "CUDA_Accelerator"),
    "mps": ("deepspeed.accelerator.mps_accelerator", "MPS_Accelerator"),
    "cpu": ("deepspeed.accelerator.cpu_accelerator", "CPU_Accelerator"),
}
_PROBE_ORDER = ("cuda", "mps", "cpu")

accel_logger: logging.Logger = logger

ds_accelerator: DeepSpeedAccelerator | None = None
"""The singleton; read it through `get_accelerator`."""


def _plug_ins() -> dict[str, EntryPoint]:
    # Imported late: it takes longer to load than all the rest of this module.
    from importlib.metadata import entry_points

    return {point.name: point for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name)}


def _built_in(name: str) -> DeepSpeedAccelerator:
    module, class_name = _BUILT_IN[name]
    return getattr(importlib.import_module(module), class_name)()


def _from_plug_in(point: EntryPoint) -> DeepSpeedAccelerator:
    factory: Callable[[], object] = point.load()
    accelerator = factory()
    if not isinstance(accelerator, DeepSpeedAccelerator):
        raise TypeError(
            f"entry point {point.name!r} = {point.value!r} of group {ENTRY_POINT_GROUP!r} made a "
            f"{type(accelerator).__name__}; it must make a subclass of DeepSpeedAccelerator"
        )
    return accelerator


def _named_by_environment(name: str) -> DeepSpeedAccelerator:
    plug_ins = {} if name in _BUILT_IN else _plug_ins()
    if name in _BUILT_IN:
        accelerator = _built_in(name)
    elif name in plug_ins:
        accelerator = _from_plug_in(plug_ins[name])
    else:
        raise ValueError(
            f"environment variable DS_ACCELERATOR={name!r} names no known accelerator; known here: "
            f"{', '.join([*SUPPORTED_ACCELERATOR_LIST, *plug_ins])}. Others join by installing a package with an "
            f"entry point in the group {ENTRY_POINT_GROUP!r}"
        )
    if not accelerator.is_available():
        raise ValueError(
            f"environment variable DS_ACCELERATOR={name!r}: no such device is usable on this machine "
            f"({accelerator.unavailable_reason()}); unset it to take what is there, or set DS_ACCELERATOR=cpu"
        )
    return accelerator


def _detected() -> DeepSpeedAccelerator:
    for point in _plug_ins().values():
        try:
            accelerator = _from_plug_in(point)
            usable = accelerator.is_available()
        except Exception as problem:
            # A broken third-party package must not stop a run that does not need it, but it is told.
            logger.warning(
                "accelerator plug-in %r (%s) is skipped: %s: %s",
                point.name,
                point.value,
                type(problem).__name__,
                problem,
            )
            continue
        if usable:
            return accelerator
    for name in _PROBE_ORDER:
        accelerator = _built_in(name)
        if accelerator.is_available():
            return accelerator
    raise AssertionError("the cpu accelerator is always available")


def get_accelerator() -> DeepSpeedAccelerator:
    """Return the accelerator of this process, choosing it on the first call.

    Raises:
        ValueError: ``DS_ACCELERATOR`` names an unknown accelerator, or one that this machine does not have.
    """
    global ds_accelerator
    if ds_accelerator is None:
        name = os.environ.get("DS_ACCELERATOR")
        ds_accelerator = _named_by_environment(name.strip().lower()) if name else _detected()
    return ds_accelerator


def set_accelerator(accel_obj: DeepSpeedAccelerator) -> None:
    """Make ``accel_obj`` the accelerator of this process; objects made before keep the old one."""
    global ds_accelerator
    if not isinstance(accel_obj, DeepSpeedAccelerator):
        raise TypeError(f"set_accelerator: expected a DeepSpeedAccelerator, found {type(accel_obj).__name__}")
    ds_accelerator = accel_obj


def is_current_accelerator_supported() -> bool:
    """Tell whether the accelerator in use is built in or announced by a plug-in."""
    name = get_accelerator().name
    return name in _BUILT_IN or name in _plug_ins()
