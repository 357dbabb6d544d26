"""Offload on a machine without an accelerator: host memory is taken to be apart from the device's."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from deepspeed.runtime.swap_tensor.host_store import APART_VARIABLE


@contextlib.contextmanager
def apart(wanted: bool = True) -> Iterator[None]:
    """Inside, `deepspeed.initialize` offloads as it does on an accelerator; nothing if not `wanted`."""
    before = os.environ.get(APART_VARIABLE)
    if wanted:
        os.environ[APART_VARIABLE] = "1"
    try:
        yield
    finally:
        if wanted:
            os.environ.pop(APART_VARIABLE)
            if before is not None:
                os.environ[APART_VARIABLE] = before


def offloads(zero: Mapping[str, Any]) -> bool:
    """Whether a `zero_optimization` section asks for offload."""
    return any(zero.get(key, {}).get("device", "none") != "none" for key in ("offload_optimizer", "offload_param"))


def offload_sections(kind: str) -> dict[str, Any]:
    """The keys of `zero_optimization` for cpu, half, super, param, all; disk, disk_param, disk_all."""
    place: dict[str, Any] = {"device": "cpu"}
    if kind.startswith("disk"):
        place = {"device": "nvme", "nvme_path": os.path.join(tempfile.gettempdir(), "deepspeed-test-swap")}
    sections: dict[str, Any] = {}
    if not kind.endswith("param"):
        more = {"half": {"ratio": 0.5}, "super": {"super_offload": True}}.get(kind, {})
        sections["offload_optimizer"] = {**place, **more}
    if kind.endswith(("param", "all")):
        sections["offload_param"] = dict(place)
    return sections
