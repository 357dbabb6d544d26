"""One rank of ``hf_trainer.py``: a small Llama under transformers' Trainer, and bare, in one process.

Runs under any interpreter that has transformers, accelerate and some ``deepspeed``; prints one JSON line on rank 0:
milliseconds per step, wall and CPU time of this process, one entry per step. ``bare``: forward and backward of the same
model on the same batches, before and after the Trainer's steps. ``trainer``: from the end of one step to the end of
the next.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
import warnings
from typing import Any

import torch

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", DS_LOG_LEVEL="error")
warnings.simplefilter("ignore")
VOCAB, LENGTH, BATCH = 512, 8, 1  # short: the model itself is not what is timed
WARM_UP = 4


def llama(hidden: int, layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=hidden, intermediate_size=hidden * 8 // 3 // 16 * 16, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=8, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Rows(torch.utils.data.Dataset):
    def __init__(self, count: int) -> None:
        self.rows = torch.randint(0, VOCAB, (count, LENGTH), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def config_file(stage: int) -> dict[str, Any]:
    """What users of the Trainer start from: whatever the client can fill in is "auto"."""
    adamw = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
    warmup = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}
    zero = {
        "stage": stage, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
    }  # fmt: skip
    return {
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": adamw}, "scheduler": {"type": "WarmupDecayLR", "params": warmup},
        "zero_optimization": zero,
    }  # fmt: skip


class Clock:
    """Wall and CPU milliseconds between calls of :meth:`mark`."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.last: tuple[float, float] | None = None

    def mark(self) -> None:
        now = (time.perf_counter(), time.process_time())
        if self.last is not None:
            self.wall.append(1e3 * (now[0] - self.last[0]))
            self.cpu.append(1e3 * (now[1] - self.last[1]))
        self.last = now


def bare(model: Any, data: Rows, steps: int) -> Clock:
    clock = Clock()
    for step in range(steps + WARM_UP):
        if step >= WARM_UP:
            clock.mark()
        rows = data.rows[step : step + BATCH]
        model(input_ids=rows, labels=rows).loss.backward()
        for param in model.parameters():
            param.grad = None
    clock.mark()
    return clock


def trained(model: Any, data: Rows, stage: int, steps: int, folder: str) -> Clock:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    clock = Clock()

    class Timer(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step >= WARM_UP:
                clock.mark()

    arguments = TrainingArguments(
        output_dir=folder, deepspeed=config_file(stage), per_device_train_batch_size=BATCH, max_steps=steps + WARM_UP,
        learning_rate=1e-4, max_grad_norm=1.0, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no",
        logging_strategy="no", warmup_steps=2,
    )  # fmt: skip
    Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Timer()]).train()
    return clock


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = Rows(2 * (options.steps + WARM_UP) + 2)
    plain = llama(options.hidden, options.layers)
    clocks = {"bare": bare(plain, data, options.steps // 2)}
    with tempfile.TemporaryDirectory() as folder:
        model = llama(options.hidden, options.layers)
        clocks["trainer"] = trained(model, data, options.stage, options.steps, folder)
    after = bare(plain, data, options.steps // 2)
    clocks["bare"].wall += after.wall
    clocks["bare"].cpu += after.cpu
    if os.environ["RANK"] == "0":
        numel = sum(param.numel() for param in plain.parameters())
        print(json.dumps({"parameters": numel, **{name: vars(clock) for name, clock in clocks.items()}}))


if __name__ == "__main__":
    main()
