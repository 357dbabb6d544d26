"""Floating elements in another dtype, as torch casts them (by way of float32, to the nearest, ties to even).

Owns: the casts between 64, 32 and 16 bits, by numpy. The others are torch's. Source of bfloat16's rounding: adding half
a unit of the last kept place, minus one where that place is even, carries exactly when the nearest is above.
Invariant: bit for bit what ``tensor.to(dtype)`` gives; of several NaN, torch's own quiet one.
"""

from __future__ import annotations

from typing import Any

from deepspeed.utils.torch_archive.tensors import DType, PlainTensor

__all__ = ["cast"]

_NUMPYS = {"float64": "f8", "float32": "f4", "float16": "f2"}
_QUIET_NAN = 0x7FC0


def cast(part: PlainTensor, dtype: DType) -> memoryview:
    """The elements of ``part`` in ``dtype``, end to end; over the same bytes where nothing is to be done."""
    if part.dtype is dtype or not part.numel():
        return part.bytes()
    known = {*_NUMPYS, "bfloat16"}
    if part.dtype.name not in known or dtype.name not in known:
        from deepspeed.utils.torch_archive import bridge

        made = bridge.tensor_to_torch(part).detach().to(bridge.dtype_to_torch(dtype))
        return bridge.tensor_from_torch(made).bytes()
    return memoryview(_from_float32(_to_float32(part.bytes(), part.dtype.name), dtype.name)).cast("B")


def _to_float32(data: memoryview, name: str) -> Any:
    import numpy

    if name == "bfloat16":
        return (numpy.frombuffer(data, numpy.uint16).astype(numpy.uint32) << 16).view(numpy.float32)
    with numpy.errstate(over="ignore", invalid="ignore"):
        return numpy.frombuffer(data, _NUMPYS[name]).astype(numpy.float32)


def _from_float32(values: Any, name: str) -> Any:
    import numpy

    if name != "bfloat16":
        with numpy.errstate(over="ignore", invalid="ignore"):
            return values.astype(_NUMPYS[name])
    bits = values.view(numpy.uint32)
    made = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(numpy.uint16)
    made[numpy.isnan(values)] = _QUIET_NAN
    return made
