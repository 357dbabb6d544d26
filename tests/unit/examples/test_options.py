"""The quickstart's flags and how they change its config; the live line; Ctrl-C."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest


def config_of(*flags: str, prefer_bf16: bool = False) -> tuple[dict[str, Any], int]:
    from options import deepspeed_config, parse_arguments

    return deepspeed_config(parse_arguments(list(flags)), prefer_bf16=prefer_bf16)


def test_without_flags_the_file_decides(quickstart: Path) -> None:
    config, steps = config_of("--deepspeed")
    written = json.loads((quickstart / "ds_config.json").read_text())
    assert config == written
    assert steps == written["scheduler"]["params"]["total_num_steps"]


def test_flags_override_the_file() -> None:
    config, steps = config_of("--stage", "1", "--dtype", "fp16", "--steps", "7")
    assert config["zero_optimization"]["stage"] == 1
    assert config["fp16"] == {"enabled": True}
    assert steps == config["scheduler"]["params"]["total_num_steps"] == 7
    assert config["scheduler"]["params"]["warmup_num_steps"] == 2


def test_auto_takes_bf16_only_where_the_device_is_good_at_it(tmp_path: Path) -> None:
    assert "bf16" not in config_of()[0]
    assert config_of(prefer_bf16=True)[0]["bf16"] == {"enabled": True}
    assert "bf16" not in config_of("--dtype", "fp32", prefer_bf16=True)[0]
    own = tmp_path / "own.json"
    own.write_text(json.dumps({"train_batch_size": 4, "fp16": {"enabled": True}}))
    assert config_of("--deepspeed_config", str(own))[0]["fp16"] == {"enabled": True}
    assert config_of("--deepspeed_config", str(own), "--dtype", "bf16")[0] == {
        "train_batch_size": 4,
        "bf16": {"enabled": True},
    }


def test_other_stages_go_without_the_settings_of_stage_3() -> None:
    from options import at_stage

    config = {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 5, "overlap_comm": True}}
    assert at_stage(config) == config
    assert at_stage(config, 2) == {"zero_optimization": {"stage": 2, "overlap_comm": True}}
    assert at_stage({}, 1) == {"zero_optimization": {"stage": 1}}
    assert config["zero_optimization"]["stage"] == 3


def test_offload_says_where_states_live(tmp_path: Path) -> None:
    from options import at_stage

    zero = config_of("--offload", "nvme", "--out", str(tmp_path))[0]["zero_optimization"]
    assert zero["offload_optimizer"] == zero["offload_param"] == {"device": "nvme", "nvme_path": str(tmp_path / "swap")}
    assert "offload_optimizer" not in at_stage({"zero_optimization": zero}, 2)["zero_optimization"]
    assert "offload_optimizer" not in config_of()[0]["zero_optimization"]
    own = at_stage(config_of("--stage", "2", "--offload", "cpu")[0])["zero_optimization"]
    assert own["offload_optimizer"] == {"device": "cpu"}
    assert "offload_param" not in own


@pytest.mark.parametrize("flags", (["--stage", "7"], ["--offload", "disk"], ["--dtype", "int8"], ["--steps", "0"]))
def test_bad_flags_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        config_of(*flags)
    assert flags[0] in capsys.readouterr().err


def test_line_shows_all_numbers_on_rank_zero_alone(capsys: pytest.CaptureFixture[str]) -> None:
    from progress import ProgressLine

    ProgressLine(3, 1024, enabled=False).update(1, loss=5.5, lr=1e-3, grad_norm=1.0)
    assert capsys.readouterr().out == ""
    line = ProgressLine(3, 1024, enabled=True)
    line.update(1, loss=5.5, lr=1e-3, grad_norm=1.25)
    line.update(2, loss=5.4, lr=1e-3, grad_norm=1.25)  # too soon after the first one for a log
    line.update(3, loss=5.25, lr=2e-3, grad_norm=None)
    first, last = capsys.readouterr().out.splitlines()
    for shown in ("1/3", "5.500", "1.00e-03", "1.25", "tokens/s", "ETA"):
        assert shown in first
    for shown in ("3/3", "5.250", "skip", "ETA 0:00"):
        assert shown in last


def test_first_ctrl_c_waits_for_the_loop_and_the_second_does_not() -> None:
    from progress import Interrupt

    before = signal.getsignal(signal.SIGINT)
    try:
        interrupt = Interrupt()
        with interrupt.deferred():
            signal.raise_signal(signal.SIGINT)
            assert interrupt.requested
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        fresh = Interrupt()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert fresh.requested
    finally:
        signal.signal(signal.SIGINT, before)
