"""Section `datastates_ckpt`: passed on as it is; any value but `false` turns the DataStates engine on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed.runtime.config_utils import DeepSpeedConfigObject

DATASTATES_CHECKPOINTING = "datastates_ckpt"
DATASTATES_CHECKPOINTING_ENABLED = False


class DeepSpeedDataStatesConfig(DeepSpeedConfigObject):
    """`enabled` and the value passed on as `config`."""

    def __init__(self, param_dict: Mapping[str, Any]) -> None:
        """Read the section of a config dictionary."""
        super().__init__()
        value = param_dict.get(DATASTATES_CHECKPOINTING, DATASTATES_CHECKPOINTING_ENABLED)
        self.enabled: bool = value is not False
        self.config: Any = value if self.enabled else None
