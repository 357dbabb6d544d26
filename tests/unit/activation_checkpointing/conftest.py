"""The settings of activation checkpointing belong to the process: each test starts and ends with none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.activation_checkpointing.settings import Settings


@pytest.fixture(autouse=True)
def fresh_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(checkpointing, "_settings", Settings())
    yield
    checkpointing.get_cuda_rng_tracker().reset()
