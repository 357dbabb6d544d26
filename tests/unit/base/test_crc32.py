"""Checksums are zlib's, whichever way they are computed."""

from __future__ import annotations

import os
import random
import zlib

import pytest

from deepspeed.native import build
from deepspeed.native.build import NativeUnavailable
from deepspeed.utils import crc32 as module
from deepspeed.utils.crc32 import crc32


@pytest.fixture(params=("native", "zlib"))
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "zlib":
        monkeypatch.setattr(module, "_native", lambda: None)
    elif module._native() is None:
        pytest.skip("no native library here")
    monkeypatch.setattr(module, "_WORTH_IT_NBYTES", 0)


def test_every_length_and_start(way: None) -> None:
    draw, data = random.Random(0), os.urandom(5000)
    for nbytes in (*range(200), 1000, 4096, 4999):
        for start in (0, 1, 7):
            piece, value = memoryview(data)[start : start + nbytes], draw.choice((0, draw.getrandbits(32)))
            assert crc32(piece, value) == zlib.crc32(piece, value), (nbytes, start)
    assert crc32(bytearray(b"123456789")) == 0xCBF43926  # the check value of the polynomial


def test_without_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(name: str) -> None:
        raise NativeUnavailable(name)

    monkeypatch.setattr(build, "load", unavailable)
    module._native.cache_clear()
    try:
        assert crc32(bytes(1 << 21)) == zlib.crc32(bytes(1 << 21))
    finally:
        module._native.cache_clear()
