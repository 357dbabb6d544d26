"""The table of recorded collectives: sums, bandwidths, text."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from deepspeed.utils.comms_logging import CommsLogger, calc_bw_log, convert_size


@pytest.mark.parametrize(
    ("name", "bandwidths"),
    (
        # 1 MB in 2 ms on 4 ranks, as 0.19.8 counts
        ("all_reduce", (8.0, 6.0)),
        ("all_gather_into_tensor", (16.0, 12.0)),
        ("reduce_scatter_tensor", (16.0, 12.0)),
        ("all_to_all_single", (4.0, 3.0)),
        ("broadcast", (4.0, 4.0)),
        ("send", (4.0, 4.0)),
    ),
)
def test_bandwidth_formulas(name: str, bandwidths: tuple[float, float]) -> None:
    assert calc_bw_log(name, 10**6, 2.0, world_size=4) == pytest.approx(bandwidths)


@pytest.mark.parametrize(
    ("size", "text"), ((0, "0B"), (4, "4.0 B"), (1500, "1.46 KB"), (10**9, "953.67 MB"), (2**60, "1.0 EB"))
)
def test_sizes_as_text(size: int, text: str) -> None:
    assert convert_size(size) == text


def test_records_add_up_per_name_and_size(capsys: pytest.CaptureFixture[str]) -> None:
    log = CommsLogger()
    assert not log.has_data()
    log.append("all_reduce", "all_reduce", 1.0, 4000)
    log.append("all_reduce", "all_reduce", 3.0, 4000)
    log.append("all_reduce", "norm", 5.0, 4)
    assert log.get_total_operations() == 3
    assert log.get_operation_names() == ["all_reduce", "norm"]
    summary = log.get_operation_summary("all_reduce")[4000]
    assert (summary["count"], summary["total_latency_ms"], summary["avg_latency_ms"]) == (2, 4.0, 2.0)
    assert summary["msg_size_str"] == "3.91 KB"
    raw = log.get_raw_data()
    raw["all_reduce"][4000][1].clear()
    assert log.get_raw_data()["all_reduce"][4000][1] == [1.0, 3.0]  # a copy was handed out
    result = log.log_all(return_dict=True)
    assert result is not None
    assert result["summary"]["norm"][4]["count"] == 1
    head, name, row = capsys.readouterr().out.splitlines()[:3]
    assert re.split(r"  +", head)[:4] == ["Comm. Op", "Message Size", "Count", "Total Latency(ms)"]
    assert name == "all_reduce"
    assert re.split(r"  +", row) == ["", "3.91 KB", "2", "4.00", "2.00", "0.04", "0.00"]
    assert log.log_all(print_log=False) is None
    log.reset_data()
    assert not log.has_data()
    assert log.get_operation_summary("all_reduce") == {}


def test_settings_choose_what_is_recorded() -> None:
    log = CommsLogger()
    section = SimpleNamespace(enabled=True, prof_all=False, prof_ops=["all_reduce"], verbose=False, debug=False)
    log.configure(SimpleNamespace(comms_logger_enabled=True, comms_logger=section))
    assert log.wants("all_reduce")
    assert not log.wants("broadcast")
    assert log.wants("broadcast", prof=True)
    log.start_profiling_op(["broadcast"])
    log.stop_profiling_op(["all_reduce"])
    assert log.wants("broadcast")
    assert not log.wants("all_reduce")
    log.start_profiling_comms()
    assert log.wants("all_reduce")
    log.configure(SimpleNamespace(comms_logger_enabled=False, comms_logger=section))
    assert not log.wants("all_reduce", prof=True)
