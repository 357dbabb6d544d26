"""`SparseTensor`: a gradient of which only some rows are not zero, as an embedding makes it.

Owns: the rows and their numbers, as two plain tensors that can be sent. Does not own: sending them (`comm/sparse.py`).
Invariant: the tensor meant is `to_dense()`: rows with equal numbers add up, rows without a number are zero.
"""

from __future__ import annotations

import torch


class SparseTensor:
    """Rows of a 2-or-more-dim tensor.

    Args:
        dense_tensor: a dense tensor, of which the rows that are not all zero are kept; or a sparse COO tensor with one
            sparse dim (what `nn.Embedding(sparse=True)` gives as gradient); or None, to set the attributes later.

    Attributes:
        indices: row numbers.  # 1D int64, k elements
        values: the rows.  # (k, *row shape)
        dense_size: shape of the dense tensor, a list.
        dtype, is_sparse: of the tensor it was made from.

    Raises:
        ValueError: fewer than 2 dims; more than one sparse dim.
    """

    def __init__(self, dense_tensor: torch.Tensor | None = None) -> None:
        self.indices: torch.Tensor | None = None
        self.values: torch.Tensor | None = None
        self.dense_size: list[int] | None = None
        if dense_tensor is None:
            return
        self.dtype = dense_tensor.dtype
        self.is_sparse = dense_tensor.is_sparse
        self.dense_size = list(dense_tensor.shape)
        if dense_tensor.ndim < 2 or (dense_tensor.is_sparse and dense_tensor.sparse_dim() != 1):
            sparse_dims = f" with {dense_tensor.sparse_dim()} sparse dims" if dense_tensor.is_sparse else ""
            raise ValueError(
                f"SparseTensor holds rows of a tensor of 2 or more dims; got shape {tuple(dense_tensor.shape)}"
                f"{sparse_dims} (expected dense, or sparse in the first dim alone)"
            )
        if dense_tensor.is_sparse:
            merged = dense_tensor.coalesce()
            self.indices, self.values = merged.indices().flatten(), merged.values()
        else:
            self.indices = dense_tensor.flatten(1).ne(0).any(dim=1).nonzero().flatten()
            self.values = dense_tensor[self.indices]

    @classmethod
    def from_rows(
        cls, indices: torch.Tensor, values: torch.Tensor, dense_size: torch.Size | list[int]
    ) -> SparseTensor:
        """Put together what was sent.

        Args:
            indices: row numbers, may repeat.  # 1D int64, k elements
            values: (k, *dense_size[1:]).
            dense_size: shape of the dense tensor.
        """
        if tuple(values.shape) != (indices.numel(), *dense_size[1:]):
            raise ValueError(
                f"SparseTensor: {indices.numel()} rows of a tensor of shape {tuple(dense_size)} must have shape "
                f"{(indices.numel(), *dense_size[1:])}; got {tuple(values.shape)}"
            )
        made = cls()
        made.indices, made.values, made.dense_size = indices, values, list(dense_size)
        made.dtype, made.is_sparse = values.dtype, True
        return made

    def to_coo_tensor(self) -> torch.Tensor:
        """As torch's sparse tensor; rows with equal numbers are not added up yet."""
        indices, values, size = self._parts()
        return torch.sparse_coo_tensor(indices.unsqueeze(0), values, size, check_invariants=True)

    def to_dense(self) -> torch.Tensor:
        """As a dense tensor."""
        indices, values, size = self._parts()
        return values.new_zeros(size).index_add_(0, indices, values)

    @staticmethod
    def type() -> str:
        return "deepspeed.SparseTensor"

    def sparse_size(self) -> tuple[int, int]:
        """(elements stored, elements of the dense tensor)."""
        indices, values, size = self._parts()
        return indices.numel() + values.numel(), torch.Size(size).numel()

    def add(self, b: SparseTensor) -> None:
        """Add another one of the same shape, in place: its rows are appended.

        Raises:
            ValueError: the shapes differ.
        """
        indices, values, size = self._parts()
        other_indices, other_values, other_size = b._parts()
        if other_size != size:
            raise ValueError(f"SparseTensor.add: shapes differ: {size} and {other_size}")
        self.indices = torch.cat([indices, other_indices])
        self.values = torch.cat([values, other_values])

    def _parts(self) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        if self.indices is None or self.values is None or self.dense_size is None:
            raise ValueError("SparseTensor is empty: it was made from nothing and its attributes were not set")
        return self.indices, self.values, self.dense_size

    def __str__(self) -> str:
        if self.indices is None or self.values is None:
            return "DeepSpeed.SparseTensor(empty)"
        stored, dense = self.sparse_size()
        return (
            f"DeepSpeed.SparseTensor(indices_size={tuple(self.indices.shape)}, values_size={tuple(self.values.shape)}, "
            f"dense_size={self.dense_size}, device={self.values.device}, reduction_factor={dense / max(1, stored):.3g})"
        )

    __repr__ = __str__
