"""Newton–Schulz orthogonalisation: the nearest semi-orthogonal matrix, by matrix products only.

Owns: the iteration in its two forms. Does not own: momentum, learning rates.
Invariant: for G = U S V^T the result is about U V^T: its singular values lie between about 0.7 and 1.2, whatever S is.

Each step applies an odd polynomial to the singular values, X <- a X + b (X X^T) X + c (X X^T)^2 X, with coefficients
that have the largest slope at 0 among those that stay near 1 (K. Jordan et al., "Muon: An optimizer for hidden layers
in neural networks", 2024; the iteration: Bernstein and Newhouse, "Old Optimizer, New Norm", 2024).

*Gram form.* X stays Q X0 with a symmetric Q that is a polynomial of R0 = X0 X0^T. With Z = a I + b R + c R^2 a step is
Q <- Z Q, R <- Z R Z; all of these are n x n for an n x m matrix with n <= m, and the long side is touched twice only.
The products of polynomials of one matrix commute, which is why R can be updated without X. It is run in fp32: small
singular values are squared in R, and bf16 would drown them.

Shapes: the last two dims are the matrix, leading dims a batch.
"""

from __future__ import annotations

import torch

NS_METHODS = {"gram", "standard"}

_A, _B, _C = 3.4445, -4.7750, 2.0315
# Keeps a zero matrix at zero.
_NORM_EPS = 1e-7


def ns_compute_dtype(ns_method: str = "gram") -> torch.dtype:
    """The dtype the iteration is computed in and its result has: fp32 for `gram`, bf16 for `standard`.

    Raises:
        ValueError: an unknown method.
    """
    check_ns_method(ns_method)
    return torch.float32 if ns_method == "gram" else torch.bfloat16


def check_ns_method(ns_method: str) -> None:
    if ns_method not in NS_METHODS:
        raise ValueError(f"ns_method = {ns_method!r}; expected one of {sorted(NS_METHODS)}")


def zeropower_via_newtonschulz5(G: torch.Tensor, steps: int) -> torch.Tensor:
    """`steps` iterations on the matrix itself, in bf16.

    Args:
        G: (..., rows, cols), any floating dtype.
        steps: 5 is usual.

    Returns:
        (..., rows, cols), bf16.
    """
    X = _normalised(_wide(G), torch.bfloat16)
    for _ in range(steps):
        gram = X @ X.mT
        X = _A * X + (_B * gram + _C * gram @ gram) @ X
    return X.mT if _is_tall(G) else X


def zeropower_via_gram_newtonschulz(G: torch.Tensor, steps: int) -> torch.Tensor:
    """The same iteration on the Gram matrix of the short side, in fp32.

    Args:
        G: (..., rows, cols), any floating dtype.
        steps: 5 is usual.

    Returns:
        (..., rows, cols), fp32.
    """
    X = _normalised(_wide(G), torch.float32)
    gram = X @ X.mT
    eye = torch.eye(X.size(-2), dtype=X.dtype, device=X.device)
    Q: torch.Tensor | None = None
    for step in range(steps):
        Z = _A * eye + _B * gram + _C * gram @ gram
        Q = Z if Q is None else Z @ Q
        if step + 1 < steps:
            gram = Z @ gram @ Z
    if Q is not None:
        X = Q @ X
    return X.mT if _is_tall(G) else X


def _is_tall(G: torch.Tensor) -> bool:
    if G.ndim < 2:
        raise ValueError(f"Newton-Schulz needs a matrix; got a tensor of shape {tuple(G.shape)}")
    return G.size(-2) > G.size(-1)


def _wide(G: torch.Tensor) -> torch.Tensor:
    return G.mT if _is_tall(G) else G


def _normalised(X: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """X over its Frobenius norm, so that its largest singular value is at most 1, where the iteration converges."""
    X = X.to(dtype)
    return X / (X.norm(dim=(-2, -1), keepdim=True) + _NORM_EPS)
