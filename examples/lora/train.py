"""LoRA on a small Llama under ZeRO stage 3, by PEFT and the Hugging Face Trainer; then the adapter on a plain base.

    deepspeed --num_gpus 2 --no_local_rank examples/lora/train.py --folder out
    torchrun --nproc_per_node 2 examples/lora/train.py --folder out     # the same

Needs `pip install transformers accelerate peft`. Each rank keeps its part of the frozen base; the adapters are small
enough to stay whole. What is saved is the adapter alone, at each checkpoint and at the end. `--base FOLDER` takes a
pretrained model instead of the one with random weights that is made here. The text is Python's own library.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments
from transformers.integrations import unset_hf_deepspeed_config

import deepspeed

CONTEXT = 64


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


def make_base(folder: Path) -> None:
    """A base of random weights, for a machine without any pretrained model."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=CONTEXT, pad_token_id=0, bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def loss_of(base: Path, adapter: Path | None) -> float:
    """Loss per byte on the first rows of the text, without DeepSpeed."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    rows = Bytes().rows[:16]
    with torch.no_grad():
        return float(model(input_ids=rows, labels=rows).loss)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("lora_out"))
    parser.add_argument("--base", type=Path, help="folder of a pretrained model")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args(arguments)

    deepspeed.init_distributed()
    first = int(os.environ["RANK"]) == 0
    base = options.base or options.folder / "base"
    if options.base is None and first:
        make_base(base)
    deepspeed.comm.barrier()
    settings = TrainingArguments(
        output_dir=str(options.folder / "run"), deepspeed=str(Path(__file__).with_name("ds_config.json")),
        per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=options.steps, learning_rate=1e-2,
        logging_steps=1, save_strategy="steps", save_steps=options.steps // 2, bf16=options.bf16,
        use_cpu=not torch.accelerator.is_available(), report_to=[], disable_tqdm=True, seed=1,
    )  # fmt: skip
    # After the arguments: they tell transformers that the config says stage 3, so the base is sharded while it is read.
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16 if options.bf16 else torch.float32)
    lora = LoraConfig(
        r=8, lora_alpha=16, target_modules="all-linear",
        modules_to_save=["lm_head"] if options.base is None else None,  # random weights have no head worth keeping
        task_type="CAUSAL_LM",
    )  # fmt: skip
    trainer = Trainer(model=get_peft_model(model, lora), args=settings, train_dataset=Bytes())
    trainer.train()
    trainer.save_model(str(options.folder / "adapter"))
    result: dict[str, Any] = {"losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]}
    deepspeed.comm.barrier()
    if first:
        unset_hf_deepspeed_config()  # from here on models are loaded whole
        result["saved"] = sorted(load_file(options.folder / "adapter" / "adapter_model.safetensors"))
        result["before"] = loss_of(base, None)
        result["after"] = loss_of(base, options.folder / "adapter")
        print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
