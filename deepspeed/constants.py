"""The few constants that clients import: ports, names of environment variables, the default time limit."""

import os
from datetime import timedelta

__all__ = [
    "CROSS_RANK",
    "CROSS_SIZE",
    "INFERENCE_GENERIC_MODE",
    "INFERENCE_SPECIALIZED_MODE",
    "LOCAL_RANK",
    "TORCH_DISTRIBUTED_DEFAULT_PORT",
    "default_pg_timeout",
]

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500

INFERENCE_GENERIC_MODE = "generic"
INFERENCE_SPECIALIZED_MODE = "specialized"

CROSS_RANK = "CROSS_RANK"
CROSS_SIZE = "CROSS_SIZE"
LOCAL_RANK = "LOCAL_RANK"


def _timeout_from_environment() -> timedelta:
    text = os.environ.get("DEEPSPEED_TIMEOUT", "10")
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0.0 < minutes < float("inf"):
        raise ValueError(
            f"environment variable DEEPSPEED_TIMEOUT={text!r}: expected the time limit of collectives, "
            "a positive number of minutes"
        )
    return timedelta(minutes=minutes)


default_pg_timeout: timedelta = _timeout_from_environment()
"""How long a collective may wait for other ranks: ``DEEPSPEED_TIMEOUT`` minutes, default 10."""
