"""Shared by the config tests: parse and return what went wrong."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

BATCH: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1}


def parse(config: dict[str, Any], **options: Any) -> DeepSpeedConfig:
    return DeepSpeedConfig.parse({**BATCH, **config}, **options)


def problems(config: dict[str, Any], **options: Any) -> list[str]:
    """The problem lines of a config, empty when it is accepted."""
    try:
        parse(config, **options)
    except DeepSpeedConfigError as error:
        return [str(problem) for problem in error.problems] or [str(error)]
    return []


def only_problem(config: dict[str, Any], **options: Any) -> str:
    found = problems(config, **options)
    assert len(found) == 1, found
    return found[0]
