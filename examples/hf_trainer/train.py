"""transformers' Trainer with one config file: a small Llama learns the bytes of real text, is saved and loaded again.

    deepspeed --num_gpus 2 --no_local_rank examples/hf_trainer/train.py --folder out

Needs `pip install transformers accelerate`. The text is the standard library's, as in the quickstart. Runs on GPUs when
there are any, else on two CPU processes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

sys.path.append(str(Path(__file__).resolve().parent.parent / "quickstart"))
from data import Corpus, load_corpus

CONTEXT = 128


class Windows(Dataset):
    """Stretches of the text as the Trainer wants them: the model itself compares each byte with the one before."""

    def __init__(self, text: Any, count: int) -> None:
        self.text, self.count = text, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = index * (len(self.text) - CONTEXT) // self.count
        tokens = torch.from_numpy(self.text[start : start + CONTEXT].astype("int64"))
        return {"input_ids": tokens, "labels": tokens}


def build() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6,
            num_key_value_heads=2, max_position_embeddings=CONTEXT, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Losses on held-out text before and after training, and of the model that was saved and loaded again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(Path(__file__).with_name("ds_config.json")))
    parser.add_argument("--data", type=Path, help="a text file or a folder; default: the standard library")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--folder", default="hf_trainer_out")
    options = parser.parse_args(arguments)

    corpus: Corpus = load_corpus(options.data, Path(options.folder))
    told = TrainingArguments(
        output_dir=options.folder,
        deepspeed=options.config,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=8,
        max_steps=options.steps,
        learning_rate=2e-3,
        warmup_steps=min(10, options.steps // 4),
        logging_steps=10,
        save_strategy="no",
        eval_on_start=True,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
    )
    training = Windows(corpus.train, 4096)
    held_out = Windows(corpus.held_out, 32)
    trainer = Trainer(model=build(), args=told, train_dataset=training, eval_dataset=held_out)
    trainer.train()
    trainer.evaluate()
    before, after = (entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry)
    trainer.save_model(f"{options.folder}/model")
    if not trainer.is_world_process_zero():
        return {}
    return {"before": before, "after": after, "reloaded": _alone(f"{options.folder}/model", held_out)}


def _alone(folder: str, data: Windows) -> float:
    """Loss of the saved model in plain transformers, on this process alone."""
    # What Trainer told transformers about stage 3 would shard this model over all ranks as it is loaded.
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    model = LlamaForCausalLM.from_pretrained(folder).float().eval()
    rows = torch.stack([data[index]["input_ids"] for index in range(len(data))])
    with torch.no_grad():
        return float(model(input_ids=rows, labels=rows).loss)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    found = main()
    if found:
        print(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
