"""Universal folders (``zero/<parameter>/fp32.pt``, ...): written from any tag, read as any tag."""
