"""Collectives over lists of tensors."""
