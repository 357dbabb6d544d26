"""Config files as clients ship them: each trains as plain torch does, or is refused by the path of every key it needs.

Where a file needs a folder it says FOLDER. What is accepted without being used is named: see `test_union_of_keys.py`.
"""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.runtime.config import STRICT_VARIABLE, DeepSpeedConfig, DeepSpeedConfigError
from tests.harness.offload import apart

FOLDER = Path(__file__).parent / "configs"
CONFIGS = {path.stem: path for path in sorted(FOLDER.iterdir())}
REFUSED = {
    "refused_onebit": ("optimizer.type: .*1-bit optimizers",),
    "refused_onebit_lamb": ("optimizer.type: .*1-bit optimizers",),
    "refused_zero_one_adam": ("optimizer.type: .*1-bit optimizers",),
    "refused_elasticity": ("elasticity.enabled: .*elastic batch sizes",),
    "refused_data_efficiency": ("data_efficiency.enabled: .*random-LTD",),
    "refused_curriculum_metrics": ("data_efficiency.enabled: .*curriculum",),
    "refused_curriculum_legacy": ("curriculum_learning.enabled: .*curriculum",),
    "refused_monitors": (
        "tensorboard.enabled: .*TensorBoard",
        "wandb.enabled: .*Weights & Biases",
        "csv_monitor.enabled: .*CSV",
    ),
    "refused_flops_profiler": ("flops_profiler.enabled: .*flops profiler",),
    "refused_compression": ("compression_training: .*compression",),
    "refused_autotuning": ("autotuning.enabled: .*autotuning",),
    "refused_sparse_attention": ("sparse_attention: .*block-sparse attention",),
    "refused_progressive_layer_drop": ("progressive_layer_drop.enabled: .*progressive layer dropping",),
    "refused_amp": ("amp.enabled: .*torch_autocast",),
    "refused_hybrid_engine": ("hybrid_engine.enabled: .*hybrid engine",),
    "refused_autotp": ("tensor_parallel.autotp_size: .*tensor parallelism",),
    "refused_expert_parallel": ("expert_parallel.enabled: .*expert parallelism",),
    "refused_deepcompile": ("compile.deepcompile: .*DeepCompile",),
    "refused_batch_left_auto": (
        "train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps.*: .*Hugging Face",
    ),
    "refused_misspelt": (
        "gradient_cliping: .*nearest known key: gradient_clipping",
        "zero_optimization.overlap_com: .*nearest known key: zero_optimization.overlap_comm",
        "zero_optimization.stage3_prefetch_buckets_size: .*stage3_prefetch_bucket_size",
    ),
    "refused_compile_of_axolotl": ("compile.disable: unknown key", "compile.backend: unknown key"),
}
LENIENT = {  # keys of other programs at top level: one line names them, DS_CONFIG_STRICT=1 refuses them
    "others_keys": [
        "zero_optimization.reduce_bucket_size", "zero_optimization.stage3_prefetch_bucket_size", "comms_config",
        "monitor_config", "cuda_visible_devices", "msamp", "aio.thread_count",
    ],
}  # fmt: skip
ACCEPTED = [name for name in CONFIGS if name not in REFUSED]
LIKE_TORCH: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "SGD": torch.optim.SGD,
}


def build() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_of(model: Any, dtype: torch.dtype) -> torch.Tensor:
    inputs = torch.linspace(-1.0, 1.0, 12).view(2, 6).to(dtype)
    loss: torch.Tensor = (model(inputs).float() - 1.0).square().mean()
    return loss


def plain(config: dict[str, Any], rate: float) -> list[float]:
    """Two losses in fp32 with one update between them, by torch alone."""
    model = build()
    settings = config["optimizer"]
    words = ("betas", "eps", "weight_decay", "momentum")
    options = {"weight_decay": 0.0} | {key: value for key, value in settings["params"].items() if key in words}
    adam_w = settings["type"] == "Adam" and settings["params"].get("adam_w_mode", True)
    made = LIKE_TORCH["AdamW" if adam_w else settings["type"]](model.parameters(), lr=rate, **options)
    losses = []
    for _ in range(2):
        loss = loss_of(model, torch.float32)
        made.zero_grad()
        loss.backward()
        clip = config.get("gradient_clipping", "auto")
        nn.utils.clip_grad_norm_(model.parameters(), 1.0 if clip == "auto" else float(clip or math.inf))
        made.step()
        losses.append(loss.item())
    return losses


def train(name: str, source: Any, folder: str) -> str:
    """What is wrong with two steps under the config `name`; empty if nothing is."""
    if isinstance(source, str) and os.path.exists(source):
        text = Path(source).read_text().replace("FOLDER", folder)
        if "FOLDER" in Path(source).read_text():
            source = json.loads(text)
    before = os.environ[STRICT_VARIABLE]
    os.environ[STRICT_VARIABLE] = "0" if name in LENIENT else "1"
    try:
        with apart():
            engine: Any = deepspeed.initialize(model=build(), config=source)[0]
    finally:
        os.environ[STRICT_VARIABLE] = before
    found, rates = [], []
    for _ in range(2):
        loss = loss_of(engine, next(engine.module.parameters()).dtype)
        rates.append(engine.get_lr()[0])
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    assert engine.global_steps == 2
    config, exact = DeepSpeedConfig.parse(source)._param_dict, engine.precision.model is torch.float32
    engine.destroy()
    if not all(map(math.isfinite, found)) or (found[0] == found[1] and rates[0] > 0):
        return f"{name}: losses {found}"
    if config["optimizer"]["type"] not in LIKE_TORCH or name == "zenflow":  # which differs from torch by design
        return ""
    wanted = plain(dict(config), rates[0])
    exact = exact and not config.get("torch_autocast")
    tolerance = 1e-5 if exact else 2e-2
    moved = abs((found[0] - found[1]) - (wanted[0] - wanted[1])) <= (tolerance if exact else 0.01)
    near = all(math.isclose(a, b, rel_tol=tolerance) for a, b in zip(found, wanted, strict=True))
    return "" if near and moved else f"{name}: losses {found}, torch has {wanted}"


def train_all(sources: dict[str, Any], folder: str) -> list[str]:
    return [wrong for name, source in sources.items() if (wrong := train(name, source, folder))]


def test_accepted_configs_train(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    sources: dict[str, Any] = {name: str(CONFIGS[name]) for name in ACCEPTED}
    text = base64.urlsafe_b64encode(CONFIGS["bfloat16_alias"].read_bytes()).decode()
    sources["as base64 text"] = text
    assert ranks(train_all, sources, str(tmp_path)) == [[], []]


@pytest.mark.parametrize("name", REFUSED)
def test_refused_configs_name_every_reason(name: str) -> None:
    with pytest.raises(DeepSpeedConfigError) as caught:
        DeepSpeedConfig.parse(json.loads(CONFIGS[name].read_text()), strict=True, dp_world_size=1)
    for pattern in REFUSED[name]:
        assert caught.match(pattern)
    assert len(caught.value.problems) == len(REFUSED[name])


def test_keys_of_others_are_named_and_refused_under_strictness() -> None:
    for name, keys in LENIENT.items():
        config = json.loads(CONFIGS[name].read_text())
        assert DeepSpeedConfig.parse(config, dp_world_size=1).unknown_keys == keys
        with pytest.raises(DeepSpeedConfigError) as caught:
            DeepSpeedConfig.parse(config, strict=True, dp_world_size=1)
        assert sorted(str(problem).partition(":")[0] for problem in caught.value.problems) == sorted(keys)
