"""ZenFlow: the important columns of each weight are updated at once, the rest later and beside training."""
