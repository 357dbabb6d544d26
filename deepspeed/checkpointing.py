"""``deepspeed.checkpointing`` is the module ``deepspeed.runtime.activation_checkpointing.checkpointing`` itself."""

import sys

from deepspeed.runtime.activation_checkpointing import checkpointing as _checkpointing

# The same module object, not a copy of its names: settings made through one name must show under the other.
sys.modules[__name__] = _checkpointing
