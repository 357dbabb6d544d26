"""DeepSpeed's own tags: read as ours are, and written in its order."""
