"""A pytest plugin (`-p tests.clients.flows`): lists the client flows that were run, and lets none be skipped.

Owns: the list of client, flow, stage, dtype and result at the end. Does not own: the flows (the test modules).
Invariant: a skipped flow counts as failed here; whoever asks for this list wants to know that every client works.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest

# Module of the tests -> distribution whose version is told.
CLIENTS = {
    "trainer": "transformers",
    "accelerate": "accelerate",
    "peft": "peft",
    "trl": "trl",
    "lightning": "lightning",
    "examples": "",
}
DTYPES = {"no": "fp32", "fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "bf16-mixed": "bf16", "16-mixed": "fp16"}
STAGES = ("0", "1", "2", "3")
KEY = "flow"


def words(item: pytest.Item) -> tuple[str, str, str, str]:
    """Client, flow, stage and dtype of a test; "" where the flow is about none in particular."""
    module = item.path.stem.removeprefix("test_")
    client = next((name for name in CLIENTS if module.startswith(name)), module)
    name, _, given = item.name.removeprefix("test_").partition("[")
    left: list[str] = []
    found: dict[str, str] = {}
    for word in given.removesuffix("]").replace("--stage ", "").replace(" ", "/").split("/"):
        # "2-fp32" and "16-mixed": a dtype may hold a dash, a stage stands alone between dashes.
        whole = [word] if word in DTYPES else [part for part in word.split("-") if part]
        for part in whole:
            if part in DTYPES and "dtype" not in found:
                found["dtype"] = DTYPES[part]
            elif part in STAGES and "stage" not in found:
                found["stage"] = part
            else:
                left.append(part)
    marker = item.get_closest_marker("flow")
    found = {**(marker.kwargs if marker else {}), **found}
    return client, " ".join([name.replace("_", " "), *left]), found.get("stage", ""), found.get("dtype", "")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.user_properties.append((KEY, words(item)))


def _result(reports: Sequence[Any]) -> str:
    if any(report.failed for report in reports):
        return "failed"
    return "skipped" if any(report.skipped for report in reports) else "ok"


class FlowList:
    """Collects the reports of all tests (also those of xdist's workers) and prints one row a test."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[tuple[str, str, str, str], list[Any]]] = {}
        self.unread: set[str] = set()  # modules whose flows are not known

    def pytest_runtest_logreport(self, report: Any) -> None:
        flow = dict(report.user_properties).get(KEY)
        if flow:
            self.rows.setdefault(report.nodeid, (tuple(flow), []))[1].append(report)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.unread.add(report.nodeid)

    def results(self) -> list[tuple[str, str, str, str, str]]:
        return sorted((*flow, _result(reports)) for flow, reports in self.rows.values())

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.OK and any(row[-1] != "ok" for row in self.results()):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("client flows")
        results = self.results()
        for client, flow, stage, dtype, result in results:
            terminalreporter.line(f"{_named(client):<20} {flow:<70} {stage or '-':<5} {dtype or '-':<5} {result}")
        for name in sorted(self.unread):
            terminalreporter.line(f"{name}: cannot be read, its flows were not run")
        bad = [row for row in results if row[-1] != "ok"]
        terminalreporter.line(f"{len(results) - len(bad)} of {len(results)} ok (client, flow, stage, dtype, result)")


def _named(client: str) -> str:
    try:
        return f"{client} {version(CLIENTS[client])}" if CLIENTS.get(client) else client
    except PackageNotFoundError:
        return f"{client} (missing)"


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(FlowList(), "client-flow-list")
