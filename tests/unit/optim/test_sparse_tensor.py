"""SparseTensor: rows in, the same tensor out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.runtime.sparse_tensor import SparseTensor


def dense(*rows: int, size: tuple[int, ...] = (6, 3)) -> torch.Tensor:
    tensor = torch.zeros(size)
    for row in rows:
        tensor[row] = torch.arange(tensor[0].numel()).view(size[1:]) - row
    return tensor


def embedding_gradient() -> tuple[torch.Tensor, torch.Tensor]:
    layers = [nn.Embedding(6, 3, sparse=sparse) for sparse in (True, False)]
    for layer in layers:
        layer(torch.tensor([4, 1, 1])).sum().backward()
    sparse, full = (layer.weight.grad for layer in layers)
    assert sparse is not None
    assert full is not None
    return sparse, full


@pytest.mark.parametrize("size", ((6, 3), (6, 2, 2)))
def test_dense_tensor_keeps_its_rows_that_are_not_zero(size: tuple[int, ...]) -> None:
    tensor = dense(1, 4, size=size)
    tensor[2].view(-1)[:2] = torch.tensor([1.0, -1.0])  # a row whose sum is zero
    held = SparseTensor(tensor)
    assert held.indices is not None
    assert held.indices.tolist() == [1, 2, 4]
    assert torch.equal(held.to_dense(), tensor)
    assert torch.equal(held.to_coo_tensor().to_dense(), tensor)


def test_gradient_of_an_embedding_is_merged() -> None:
    sparse, full = embedding_gradient()
    held = SparseTensor(sparse)
    assert held.indices is not None
    assert held.indices.tolist() == [1, 4]
    assert torch.equal(held.to_dense(), full)
    assert held.sparse_size() == (2 + 6, 18)
    assert (held.dense_size, held.dtype, held.is_sparse) == ([6, 3], torch.float32, True)


def test_add_appends_rows_and_equal_rows_add_up() -> None:
    left, right = dense(1, 2), dense(2, 5)
    total = SparseTensor(left)
    total.add(SparseTensor(right))
    assert torch.equal(total.to_dense(), left + right)
    assert torch.equal(total.to_coo_tensor().to_dense(), left + right)
    with pytest.raises(ValueError, match=r"\[6, 3\] and \[5, 3\]"):
        total.add(SparseTensor(torch.zeros(5, 3)))


def test_rows_that_were_sent_are_put_together() -> None:
    made = SparseTensor.from_rows(torch.tensor([0, 0]), torch.ones(2, 3), torch.Size((6, 3)))
    assert made.to_dense()[0].tolist() == [2, 2, 2]
    with pytest.raises(ValueError, match=r"must have shape \(2, 3\); got \(3, 3\)"):
        SparseTensor.from_rows(torch.tensor([0, 0]), torch.ones(3, 3), [6, 3])


def test_all_zero_and_empty_tensors() -> None:
    held = SparseTensor(torch.zeros(6, 3))
    assert held.sparse_size() == (0, 18)
    assert torch.equal(held.to_dense(), torch.zeros(6, 3))
    with pytest.raises(ValueError, match="empty"):
        SparseTensor().to_dense()
    assert "empty" in str(SparseTensor())
    assert "dense_size=[6, 3]" in str(held)
    assert SparseTensor.type() == "deepspeed.SparseTensor"


@pytest.mark.parametrize("bad", (torch.ones(3), torch.ones(2, 3).to_sparse(2)), ids=("one dim", "two sparse dims"))
def test_tensors_without_rows_are_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="rows of a tensor of 2 or more dims"):
        SparseTensor(bad)
