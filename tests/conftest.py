"""Fixtures of the whole suite: the warm pool, and a check that no test leaves process-wide state behind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

# Before torch is imported anywhere: ranks share few cores, and the suite runs on the CPU unless told otherwise.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("DS_CONFIG_STRICT", "1")

import hypothesis
import pytest
import torch

from tests.harness import leaks
from tests.harness.pool import WorkerPool

MAX_WORLD_SIZE = 4


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    # A machine that is busy with something else draws examples slowly; that is no fault of a test.
    slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("suite", deadline=None, suppress_health_check=slow)
    hypothesis.settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--wide", action="store_true", help="also the rows of the large tables marked wide")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--wide"):
        return
    left_out = [item for item in items if item.get_closest_marker("wide")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("wide")]


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
    """Worker processes that live for the session; `pool.run(world_size, function, *args)`."""
    made = WorkerPool(MAX_WORLD_SIZE, request.config.getini("filterwarnings"))
    yield made
    made.close()


@pytest.fixture
def ranks(pool: WorkerPool, request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """`ranks(function, *args)` on as many ranks as `@pytest.mark.world(n)` says (2 without it)."""
    marker = request.node.get_closest_marker("world")
    return partial(pool.run, marker.args[0] if marker else 2)


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves environment variables, threads, groups, modes or patches behind in this process."""
    before = leaks.take_snapshot()
    yield
    leaked = leaks.settle(
        before,
        ignore_environment=("PYTEST_CURRENT_TEST",),  # pytest names the running test there
        ignore_files="pool" in request.fixturenames,  # a pool that starts workers keeps its pipes to them
    )
    if leaked:
        pytest.fail("left behind by the test:\n" + "\n".join(leaked), pytrace=False)
