#!/usr/bin/env python
"""``zero_to_fp32.py`` with a choice of dtype: ``python zero_to_torch.py <checkpoints> <output> --dtype bf16``."""

from __future__ import annotations

import sys
from typing import Any


def main(args: Any = None) -> int:
    """Run the command line (``args``: list of arguments, default those of the process)."""
    try:
        from zero_to_fp32 import main as convert  # type: ignore[import-not-found]  # the copy beside this one
    except ImportError:
        from deepspeed.utils.zero_to_fp32 import main as convert
    return int(convert(args, with_dtype=True))


if __name__ == "__main__":
    sys.exit(main())
