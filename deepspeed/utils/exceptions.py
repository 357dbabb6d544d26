"""Exception classes shared by several layers.

Owns: exceptions that have no better home. An error of one subsystem lives beside that subsystem (for example
``deepspeed.runtime.config.DeepSpeedConfigError``).
"""

__all__ = ["DeprecatedException"]


class DeprecatedException(Exception):
    """An interface that was removed has been called; the message names what replaces it."""
