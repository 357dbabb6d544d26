"""The list `make clients` ends with: what a test's name says, and that a skipped flow is no success."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.clients.flows import KEY, FlowList, words


def item(file: str, name: str, **told: str) -> Any:
    marker = SimpleNamespace(kwargs=told) if told else None
    return SimpleNamespace(path=Path(file), name=name, get_closest_marker=lambda _: marker)


@pytest.mark.parametrize(
    ("found", "expected"),
    (
        (item("test_trainer.py", "test_resuming[0-fp32]"), ("trainer", "resuming", "0", "fp32")),
        (item("test_trainer_more.py", "test_again[3]", dtype="bf16"), ("trainer", "again", "3", "bf16")),
        (item("test_trl.py", "test_trains[dpo-ahead-3-fp32]"), ("trl", "trains dpo ahead", "3", "fp32")),
        (item("test_lightning.py", "test_half[16-mixed]", stage="3"), ("lightning", "half", "3", "fp16")),
        (item("test_lightning.py", "test_agree[--stage 2 --offload]"), ("lightning", "agree offload", "2", "")),
    ),
)
def test_client_flow_stage_and_dtype(found: Any, expected: tuple[str, ...]) -> None:
    assert words(found) == expected


@pytest.mark.parametrize(("outcome", "status"), (("passed", 0), ("skipped", 1)))
def test_a_skipped_flow_fails_the_run(outcome: str, status: int) -> None:
    flows = FlowList()
    flow = ("trl", "trains", "3", "fp32")
    report = SimpleNamespace(
        nodeid="a", user_properties=[(KEY, flow)], failed=False, skipped=outcome == "skipped"
    )
    flows.pytest_runtest_logreport(report)
    session: Any = SimpleNamespace(exitstatus=0)
    flows.pytest_sessionfinish(session, 0)
    assert int(session.exitstatus) == status
    assert flows.results() == [(*flow, "ok" if status == 0 else "skipped")]
