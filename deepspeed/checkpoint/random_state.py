"""Random number generators of one process: Python, numpy, torch on the host and on the accelerator.

Plain data both ways. Restored by ``load_checkpoint`` when everything is restored, so that dropout and shuffling go on
as in an unbroken run; ``checkpoint.load_rng_state: false`` in the config leaves the generators alone.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy
import torch

from deepspeed.accelerator import get_accelerator


def capture() -> dict[str, Any]:
    """The state of every generator. Draws nothing."""
    kind, words, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(numpy.asarray(words).view(numpy.int32).copy()), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
    }
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        state["accelerator"] = accelerator.get_rng_state()
    tracker = _tracker()
    if tracker is not None and tracker.get_states():
        state["tracker"] = dict(tracker.get_states())
    return state


def restore(state: dict[str, Any]) -> None:
    """Set every generator of ``state``; an accelerator's state needs an accelerator of the kind it was saved on."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = state["numpy"]
    numpy.random.set_state((kind, keys.numpy().view(numpy.uint32), *rest))
    torch.set_rng_state(state["torch"].clone())
    accelerator = get_accelerator()
    if "accelerator" in state and accelerator.device_name() != "cpu":
        accelerator.set_rng_state(state["accelerator"].clone())
    if "tracker" in state:
        from deepspeed.runtime.activation_checkpointing import checkpointing

        checkpointing.get_cuda_rng_tracker().set_states({key: value.clone() for key, value in state["tracker"].items()})


def _tracker() -> Any:
    """The named generators of activation checkpointing, when that module is in use."""
    module = sys.modules.get("deepspeed.runtime.activation_checkpointing.checkpointing")
    return module.get_cuda_rng_tracker() if module is not None else None
