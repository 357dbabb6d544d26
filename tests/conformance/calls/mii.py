"""Calls of DeepSpeed-MII."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import deepspeed
from tests.conformance.calls.table import calls, model, refused, settings


@calls(
    "mii",
    "inference.config.DtypeEnum.from_str(s).value[0]",
    "runtime.config_utils.DeepSpeedConfigModel subclassed, model_dump_json",
    "runtime.config.DeepSpeedConfig(cfg).zero_optimization_stage == ZeroStageEnum.weights",
    "launcher.runner.{DLTS_HOSTFILE,fetch_hostfile(path)}",
    "utils.timer.SynchronizedWallClockTimer()(name).{start,stop,elapsed}(reset=False)",
    "accelerator.{current_device,set_device,device_count,empty_cache,synchronize}",
    'init_distributed(dist_backend="nccl", timeout=), init_distributed("nccl")',
    "initialize(model=, config=)",
    "deepspeed -i host:ids --master_port P --master_addr A --no_ssh_check --no_local_rank --no_python --force_multi x",
)
def serving(folder: Path) -> None:
    from pydantic import field_validator

    from deepspeed.inference.config import DtypeEnum
    from deepspeed.launcher.runner import DLTS_HOSTFILE, fetch_hostfile, parse_args
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.timer import SynchronizedWallClockTimer

    assert DtypeEnum.from_str("fp16").value[0] is torch.float16
    assert DtypeEnum.from_str("bf16").value[0] is torch.bfloat16

    class Serving(DeepSpeedConfigModel):
        port: int = 50
        hosts: list[str] = []

        @field_validator("port")
        @classmethod
        def positive(cls, value: int) -> int:
            if value <= 0:
                raise ValueError("positive")
            return value

    assert json.loads(Serving(port=3).model_dump_json()) == {"port": 3, "hosts": []}
    with pytest.raises(ValueError, match="positive"):
        Serving(port=-1)
    with pytest.raises(ValueError, match="unknown"):
        Serving(unknown=1)
    parsed = DeepSpeedConfig({"train_batch_size": 2, "zero_optimization": {"stage": 3}})
    assert parsed.zero_optimization_stage == ZeroStageEnum.weights
    assert DLTS_HOSTFILE == "/job/hostfile"
    assert not fetch_hostfile(str(folder / "none"))
    (folder / "hosts").write_text("one slots=2\ntwo slots=4\n")
    assert dict(fetch_hostfile(str(folder / "hosts"))) == {"one": 2, "two": 4}
    line = "-i localhost:0,1 --master_port 77 --master_addr localhost --no_ssh_check --no_local_rank --no_python"
    found = parse_args([*line.split(), "--force_multi", "python", "-m", "serve"])
    assert (found.include, found.no_ssh_check, found.force_multi) == ("localhost:0,1", True, True)
    assert (found.user_script, found.user_args) == ("python", ["-m", "serve"])
    timer = SynchronizedWallClockTimer()("generate")
    timer.start()
    timer.stop()
    assert timer.elapsed(reset=False) == timer.elapsed(reset=False) >= 0.0
    device = deepspeed.get_accelerator()
    device.set_device(0)
    device.empty_cache()
    device.synchronize()
    assert 0 <= device.current_device() < device.device_count()
    deepspeed.init_distributed(dist_backend="nccl", timeout=timedelta(seconds=60))
    deepspeed.init_distributed("nccl")
    engine = deepspeed.initialize(model=model(), config=settings(0))[0]
    engine.destroy()


refused(
    "mii",
    {
        "deepspeed.init_inference(engine.module, config={})": "the inference engine",
        "deepspeed.inference.build_hf_engine('x')": "the inference engine",
        "deepspeed.inference.InferenceEngineV2": "the inference engine",
        "deepspeed.inference.RaggedInferenceEngineConfig": "the inference engine",
        "deepspeed.inference.engine.InferenceEngine": "the inference engine",
        "engine.profile_model_time()": "the inference engine",
        "engine.model_times()": "the inference engine",
    },
)
