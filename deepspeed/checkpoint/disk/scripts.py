"""The recovery scripts that lie beside checkpoints: the files of ``deepspeed/utils`` of the same names.

Owns: putting them there. Does not own: what they do.
"""

from __future__ import annotations

from pathlib import Path

from deepspeed.checkpoint import names
from deepspeed.checkpoint.disk import durable

_SOURCES = Path(__file__).resolve().parents[2] / "utils"


def copy_scripts(folder: Path) -> None:
    """Put the scripts into ``folder``, executable; those that are there in this form already are left alone."""
    for name in names.RECOVERY_SCRIPTS:
        text = (_SOURCES / name).read_text()
        target = folder / name
        if not target.exists() or target.read_text(errors="replace") != text:
            durable.write_text(target, text)
            target.chmod(target.stat().st_mode | 0o100)
