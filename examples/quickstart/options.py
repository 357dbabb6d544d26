"""Command line of the quickstart, and the DeepSpeed config it leads to.

Owns: flags, their defaults, and how flags override the JSON file. Does not own: what is done with them.
Invariant: the JSON file is read, never written; a flag that was not given leaves its key as the file has it.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
from model import ModelConfig

import deepspeed

STAGES = (0, 1, 2, 3)
SIXTEEN_BIT = {"bf16": "bf16", "fp16": "fp16"}  # --dtype -> section of the config


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The flags of this example plus those of `deepspeed.add_config_arguments`."""
    sizes = ModelConfig()
    parser = argparse.ArgumentParser(
        description="Train a byte-level Llama-style model on real text.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--stage", type=int, choices=STAGES, help="ZeRO stage (the config file's when not given)")
    parser.add_argument(
        "--dtype",
        choices=("auto", "fp32", "bf16", "fp16"),
        default="auto",
        help="number format of the weights; auto: bf16 on an accelerator that has it, else what the config file says",
    )
    parser.add_argument(
        "--offload",
        choices=("none", "cpu", "nvme"),
        help="where optimizer states live, and at stage 3 the weights between uses; nvme: files in --out, at stage 3",
    )
    parser.add_argument("--steps", type=int, help="optimizer steps (the config file's schedule when not given)")
    parser.add_argument("--data", type=Path, help="text file or folder (the Python standard library when not given)")
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for cache, checkpoint and report")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and sampled text")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    for name in ("width", "layers", "heads", "ffn", "context"):
        parser.add_argument(f"--{name}", type=int, default=getattr(sizes, name), help="size of the model")
    parser.add_argument("--tied", action="store_true", help="share the weight of embedding and output head")
    # The resume check starts this script again, in new processes, to continue a checkpoint for a few steps.
    parser.add_argument("--replay", type=Path, help=argparse.SUPPRESS)
    # Ranks of the run that wrote the checkpoint, where the replay has another number of them.
    parser.add_argument("--replay_shares", type=int, default=0, help=argparse.SUPPRESS)
    parser = deepspeed.add_config_arguments(parser)
    options = parser.parse_args(arguments)
    if options.deepspeed_config is None:
        options.deepspeed_config = str(Path(__file__).with_name("ds_config.json"))
    if options.steps is not None and options.steps < 1:
        parser.error(f"--steps {options.steps}: expected 1 or more")
    return options


def model_config(options: argparse.Namespace) -> ModelConfig:
    return ModelConfig(
        width=options.width,
        layers=options.layers,
        heads=options.heads,
        ffn=options.ffn,
        context=options.context,
        tied=options.tied,
    )


def deepspeed_config(options: argparse.Namespace, *, prefer_bf16: bool) -> tuple[dict[str, Any], int]:
    """The config for `deepspeed.initialize`, and the number of steps of the run.

    `prefer_bf16`: the device computes well in bf16, so `--dtype auto` takes it.
    """
    config: dict[str, Any] = json.loads(Path(options.deepspeed_config).read_text())
    if options.stage is not None:
        config.setdefault("zero_optimization", {})["stage"] = options.stage
    if options.offload is not None:
        config.setdefault("zero_optimization", {}).update(offload_sections(options))
    dtype = "bf16" if options.dtype == "auto" and prefer_bf16 else options.dtype
    if dtype != "auto":
        for section in SIXTEEN_BIT.values():
            config.pop(section, None)
        if dtype in SIXTEEN_BIT:
            config[SIXTEEN_BIT[dtype]] = {"enabled": True}
    schedule = config.get("scheduler", {}).get("params", {})
    steps = options.steps or schedule.get("total_num_steps") or 160
    if "total_num_steps" in schedule:
        schedule["total_num_steps"] = steps
        # A short run warms up for at most a tenth of it.
        schedule["warmup_num_steps"] = min(schedule.get("warmup_num_steps", 0), max(steps // 10, 2))
    return config, steps


def offload_sections(options: argparse.Namespace) -> dict[str, Any]:
    """The offload keys of `zero_optimization` for `--offload`."""
    home: dict[str, Any] = {"device": options.offload}
    if options.offload == "nvme":
        home["nvme_path"] = str(options.out / "swap")
    return {"offload_optimizer": dict(home), "offload_param": dict(home)}


def at_stage(config: dict[str, Any], stage: int | None = None) -> dict[str, Any]:
    """A copy of `config` for ZeRO stage `stage` (its own when None); other stages go without stage3_* and offload."""
    changed = copy.deepcopy(config)
    zero = changed.setdefault("zero_optimization", {})
    if stage is not None:
        zero["stage"] = stage
    only_here = ("stage3_", "offload_param") if zero.get("stage", 0) != 3 else ()
    if stage is not None:
        only_here = (*only_here, "offload_")
    changed["zero_optimization"] = {key: value for key, value in zero.items() if not key.startswith(only_here)}
    return changed


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
