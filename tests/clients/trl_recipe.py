"""Tiny models, a tokenizer and data for TRL's trainers, and one way to run each of them with and without DeepSpeed.

Owns: `KINDS` (how each trainer is made) and `train`. Does not own: what is compared (the test module).
Invariant: nothing is fetched; models are made from config classes and stored where the trainers load them from.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.clients import recipe

STEPS, ROWS = 3, 16
WORDS = [f"w{number}" for number in range(recipe.VOCAB - 3)]


def tokenizer() -> Any:
    """One token a word; ids 0 to 2 are the special tokens the models know."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {word: number for number, word in enumerate(["<pad>", "<bos>", "<eos>", *WORDS])}
    inner = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    )


def store_models(folder: Path) -> None:
    """`policy`, `tied` (shared embeddings), `other` (another seed), `judge` (a score), each with its tokenizer."""
    from transformers import LlamaForSequenceClassification

    torch.manual_seed(3)
    policy = recipe.llama()
    judge = LlamaForSequenceClassification(policy.config.__class__(**{**policy.config.to_dict(), "num_labels": 1}))
    made = {"policy": policy, "tied": recipe.gpt2(), "other": recipe.llama(seed=4), "judge": judge}
    for name, model in made.items():
        model.save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)


def _text(start: int, count: int, step: int = 1) -> str:
    return " ".join(WORDS[(start + step * number) % len(WORDS)] for number in range(count))


def rows(kind: str) -> Any:
    """Counting upwards is right, counting downwards is wrong."""
    from datasets import Dataset

    starts = [(7 * number) % len(WORDS) for number in range(ROWS)]
    prompts = [_text(start, 4) for start in starts]
    right = [" " + _text(start + 4, 3 + number % 3) for number, start in enumerate(starts)]
    wrong = [" " + _text(start + 4, 4, -1) for start in starts]
    if kind == "sft":
        return Dataset.from_dict({"text": [prompt + text for prompt, text in zip(prompts, right, strict=True)]})
    if kind == "reward":
        both = {"chosen": right, "rejected": wrong}
        whole = {key: [a + b for a, b in zip(prompts, texts, strict=True)] for key, texts in both.items()}
        return Dataset.from_dict(whole)
    if kind == "dpo":
        return Dataset.from_dict({"prompt": prompts, "chosen": right, "rejected": wrong})
    if kind == "kto":
        good = [number % 2 == 0 for number in range(ROWS)]
        chosen = [a if yes else b for a, b, yes in zip(right, wrong, good, strict=True)]
        return Dataset.from_dict({"prompt": prompts, "completion": chosen, "label": good})
    return Dataset.from_dict({"prompt": prompts})


def evenness(completions: list[str], **_: Any) -> list[float]:
    """A reward: the share of words with an even number."""
    shares = []
    for text in completions:
        numbers = [int(word[1:]) for word in text.split() if word[1:].isdigit()]
        shares.append(sum(number % 2 == 0 for number in numbers) / max(1, len(numbers)))
    return shares


def settings(folder: str, config: Any, dtype: str, **changes: Any) -> dict[str, Any]:
    common: dict[str, Any] = {
        "output_dir": f"{folder}/run-{recipe.rank()}", "deepspeed": config, "use_cpu": True, "ddp_backend": "gloo",
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": STEPS, "learning_rate": 1e-3,
        "lr_scheduler_type": "constant", "logging_steps": 1, "bf16": dtype == "bf16", "report_to": [],
        "disable_tqdm": True, "save_strategy": "no", "seed": 7, "logging_nan_inf_filter": False,
    }  # fmt: skip
    return {**common, **changes}


SAMPLED = {"num_generations": 4, "max_completion_length": 6, "beta": 0.1, "temperature": 1.0}


def loaded(folder: Path) -> Any:
    """A reference model; sharded at birth where the arguments, made before, say stage 3."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def _sft(models: Path, given: dict[str, Any]) -> Any:
    from trl import SFTConfig, SFTTrainer

    return SFTTrainer(str(models / "policy"), SFTConfig(**given, max_length=16), train_dataset=rows("sft"))


def _tied(models: Path, given: dict[str, Any]) -> Any:
    from trl import SFTConfig, SFTTrainer

    return SFTTrainer(str(models / "tied"), SFTConfig(**given, max_length=16), train_dataset=rows("sft"))


def _dpo(models: Path, given: dict[str, Any]) -> Any:
    from trl import DPOConfig, DPOTrainer

    arguments = DPOConfig(**given, beta=0.5)
    return DPOTrainer(str(models / "policy"), loaded(models / "other"), arguments, train_dataset=rows("dpo"))


def _dpo_ahead(models: Path, given: dict[str, Any]) -> Any:
    """The reference's log-probabilities are computed before training, by an engine around the policy itself."""
    from datasets import load_from_disk
    from trl import DPOConfig, DPOTrainer

    arguments = DPOConfig(**given, beta=0.5, precompute_ref_log_probs=True)
    shared = str(Path(given["output_dir"]).parent / "data")  # where rank 0 leaves them for the others
    if recipe.rank() == 0:
        rows("dpo").save_to_disk(shared)
    arguments.distributed_state.wait_for_everyone()
    return DPOTrainer(str(models / "policy"), None, arguments, train_dataset=load_from_disk(shared))


def _reward(models: Path, given: dict[str, Any]) -> Any:
    from trl import RewardConfig, RewardTrainer

    return RewardTrainer(str(models / "judge"), RewardConfig(**given), train_dataset=rows("reward"))


def _kto(models: Path, given: dict[str, Any]) -> Any:
    from trl import KTOConfig, KTOTrainer

    arguments = KTOConfig(**given, beta=0.5)
    return KTOTrainer(str(models / "policy"), loaded(models / "other"), arguments, train_dataset=rows("kto"))


def _grpo(models: Path, given: dict[str, Any]) -> Any:
    """Rewards of a function and of a model; the reference model follows the policy."""
    from trl import GRPOConfig, GRPOTrainer

    arguments = GRPOConfig(**given, **SAMPLED, sync_ref_model=True, ref_model_sync_steps=2)
    rewards = [evenness, str(models / "judge")]
    return GRPOTrainer(str(models / "policy"), rewards, arguments, train_dataset=rows("grpo"))


def _rloo(models: Path, given: dict[str, Any]) -> Any:
    from trl import RLOOConfig, RLOOTrainer

    arguments = RLOOConfig(**given, **SAMPLED)
    return RLOOTrainer(str(models / "policy"), evenness, arguments, train_dataset=rows("rloo"))


def _distillation(models: Path, given: dict[str, Any]) -> Any:
    """The teacher is another model, the texts are the policy's own."""
    from trl import DistillationConfig, DistillationTrainer

    arguments = DistillationConfig(**given, max_completion_length=6)
    return DistillationTrainer(
        model=str(models / "policy"), teacher_model=str(models / "other"), args=arguments, train_dataset=rows("grpo")
    )


def _online_dpo(models: Path, given: dict[str, Any]) -> Any:
    """Experimental in TRL: two texts of the policy are judged at every step.

    Without accumulation: this trainer adds the losses of a window under DDP, where DeepSpeed takes their mean.
    """
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    given = {**given, "gradient_accumulation_steps": 1}
    arguments = OnlineDPOConfig(**given, max_new_tokens=6, max_length=16, missing_eos_penalty=1.0, beta=0.5)
    policy, words = loaded(models / "policy"), tokenizer()
    return OnlineDPOTrainer(
        policy, loaded(models / "other"), evenness, arguments, train_dataset=rows("grpo"), processing_class=words
    )


def _orpo(models: Path, given: dict[str, Any]) -> Any:
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    arguments = ORPOConfig(**given, max_length=16, max_completion_length=8)
    return ORPOTrainer(loaded(models / "policy"), arguments, train_dataset=rows("dpo"), processing_class=tokenizer())


def _gkd(models: Path, given: dict[str, Any]) -> Any:
    """Half of the texts are the student's own."""
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    arguments = GKDConfig(**given, max_new_tokens=6, max_length=16, lmbda=0.5)
    turns = [
        {"messages": [{"role": "user", "content": _text(n, 4)}, {"role": "assistant", "content": _text(n + 4, 3)}]}
        for n in range(ROWS)
    ]
    words = tokenizer()
    words.chat_template = (
        "{% for m in messages %}{{ m['content'] }} {% if m['role'] == 'assistant' %}{% generation %}<eos>"
        "{% endgeneration %}{% endif %}{% endfor %}"
    )
    from datasets import Dataset

    return GKDTrainer(
        loaded(models / "policy"), loaded(models / "other"), arguments, train_dataset=Dataset.from_list(turns),
        processing_class=words,
    )  # fmt: skip


KINDS: dict[str, Callable[[Path, dict[str, Any]], Any]] = {
    "sft": _sft, "tied": _tied, "dpo": _dpo, "dpo-ahead": _dpo_ahead, "reward": _reward, "kto": _kto, "grpo": _grpo,
    "rloo": _rloo, "distillation": _distillation, "online-dpo": _online_dpo, "orpo": _orpo, "gkd": _gkd,
}  # fmt: skip
EXPERIMENTAL = ("online-dpo", "orpo", "gkd")  # of TRL; run at stage 3 alone


def make(kind: str, models: str, folder: str, stage: int | None, dtype: str, **changes: Any) -> Any:
    """A trainer; ``stage`` None: without DeepSpeed, with DDP where there are several ranks."""
    config = None if stage is None else recipe.zero_config(stage, optimizer=None, scheduler=None)
    if config is not None:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 100  # norms stay whole, matrices do not
    os.environ.pop("DS_CONFIG_STRICT", None)  # engines of reference models get dotted keys, which are none
    return KINDS[kind](Path(models), settings(folder, config, dtype, **changes))


def train(kind: str, models: str, folder: str, stage: int | None, dtype: str) -> dict[str, Any]:
    """Losses, gradient norms, other logged numbers, and the weights after ``STEPS`` updates (rank 0's)."""
    trainer = make(kind, models, folder, stage, dtype)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    kept = ("loss", "grad_norm", "reward", "kl", "completions/mean_length", "rewards/margins", "accuracy")
    found: dict[str, Any] = {key: [entry[key] for entry in logs] for key in kept if key in logs[0]}
    if stage is None:
        params = trainer.accelerator.unwrap_model(trainer.model).named_parameters()
        found["weights"] = {name: param.detach().clone().float() for name, param in params}
    else:
        found["weights"] = recipe.full_weights(trainer.model)
        trainer.save_model(f"{folder}/export")
        dist.barrier()
        found["model"] = type(trainer.model).__name__
    return found if recipe.rank() == 0 else {}
