"""Command-line arguments a training script shares with the launcher."""

from __future__ import annotations

import argparse


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed``, ``--deepspeed_config FILE`` and their deprecated aliases; returns ``parser``."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", default=False, action="store_true", help="train through DeepSpeed")
    group.add_argument("--deepspeed_config", default=None, type=str, help="configuration file (JSON)")
    group.add_argument("--deepscale", default=False, action="store_true", help="deprecated, use --deepspeed")
    group.add_argument("--deepscale_config", default=None, type=str, help="deprecated, use --deepspeed_config")
    return parser
