"""What the launcher raises when it refuses to start. Callers inside Python see exceptions; the console scripts print
the text as one message and exit with REFUSED."""

from __future__ import annotations

REFUSED = 2
"""Exit code of a start that was refused before any worker ran (argparse uses the same)."""


class UsageError(ValueError):
    """The command line, the hostfile or an environment variable asks for something that cannot be done."""


class StartError(RuntimeError):
    """The request is fine but this machine or cluster cannot fulfil it (no back end, no ssh, no device)."""
