"""Accelerate: train a small Llama on bytes of text, save in the middle, resume, export, and ask the export.

    cd examples/accelerate
    accelerate launch --config_file deepspeed.yaml train.py --folder out

Needs `pip install accelerate transformers safetensors`. `deepspeed.yaml` is what `accelerate config` writes, and
`ds_config.json` the file it names: ZeRO stage 3, every "auto" filled in by Accelerate. The same script runs with the
plugin's fields alone, its optimizer and schedule then made here:

    accelerate launch --use_deepspeed --num_processes 2 --zero_stage 2 --gradient_accumulation_steps 2 \
        --gradient_clipping 1.0 --mixed_precision no train.py --folder out

Runs on GPUs when there are any, else on the CPU. The text is Python's own library, as installed.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DummyOptim, DummyScheduler
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.integrations import unset_hf_deepspeed_config

CONTEXT, MICRO_BATCH, RATE = 64, 4, 3e-3


class Bytes(Dataset):
    """Windows of CONTEXT bytes of a text; each byte is a token."""

    def __init__(self) -> None:
        text = "".join(inspect.getsource(module) for module in (argparse, inspect, json)).encode()
        count = len(text) // CONTEXT
        self.rows = torch.frombuffer(bytearray(text[: count * CONTEXT]), dtype=torch.uint8).view(count, CONTEXT).long()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def build(accelerator: Accelerator, steps: int) -> tuple[Any, Any, Any, Any]:
    """Engine, optimizer, loader, schedule: dummies where the config file has the real ones."""
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=CONTEXT, bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)  # at stage 3 each rank keeps its part of the weights alone
    loader = DataLoader(Bytes(), batch_size=MICRO_BATCH)
    settings = accelerator.state.deepspeed_plugin.deepspeed_config
    if "optimizer" in settings:
        optimizer: Any = DummyOptim(model.parameters(), lr=RATE, weight_decay=0.01)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    total, warmup = steps * accelerator.num_processes, 2 * accelerator.num_processes  # Accelerate counts per process
    if "scheduler" in settings:
        schedule: Any = DummyScheduler(optimizer, total_num_steps=total, warmup_num_steps=warmup)
    else:
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda n: min((n + 1) / warmup, 1.0) * max(0.0, 1 - n / total)
        )
    return accelerator.prepare(model, optimizer, loader, schedule)


def train(accelerator: Accelerator, parts: tuple[Any, ...], first: int, last: int) -> list[float]:
    """Micro-steps `first` to `last` of the data; the mean loss of all ranks of each."""
    model, optimizer, loader, schedule = parts
    model.train()
    losses = []
    for batch in accelerator.skip_first_batches(loader, first):
        if first + len(losses) == last:
            break
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.gather(loss.detach()).mean()))
    return losses


def asked(folder: str) -> float:
    """Loss per byte of the exported model, loaded by transformers alone, on the first rows of the text."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = Bytes().rows[:16]
    with torch.no_grad():
        return float(model(input_ids=rows, labels=rows).loss)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("accelerate_out"))
    parser.add_argument("--steps", type=int, default=8, help="updates of the weights")
    options = parser.parse_args(arguments)

    if not torch.accelerator.is_available():
        PartialState(cpu=True)  # Accelerate takes the CPU for a DeepSpeed device only when told so first
    accelerator = Accelerator()
    parts = build(accelerator, options.steps)
    total = options.steps * accelerator.gradient_accumulation_steps
    losses = train(accelerator, parts, 0, total // 2)
    accelerator.save_state(str(options.folder / "state"))
    losses += train(accelerator, parts, total // 2, total)

    accelerator.load_state(str(options.folder / "state"))
    again = train(accelerator, parts, total // 2, total)

    state = accelerator.get_state_dict(parts[0])  # whole on the main process
    accelerator.unwrap_model(parts[0]).save_pretrained(
        options.folder / "export", is_main_process=accelerator.is_main_process, state_dict=state
    )
    result: dict[str, Any] = {"stage": parts[0].zero_optimization_stage(), "losses": losses, "resumed": again}
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    unset_hf_deepspeed_config()  # from here on models are loaded whole
    if PartialState().is_main_process:
        result["exported"] = asked(str(options.folder / "export"))
        assert math.isfinite(result["exported"])
        print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
