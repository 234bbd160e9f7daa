"""Small linear algebra shared by the formats."""

from __future__ import annotations

import torch


def leading_left_vectors(matrix: torch.Tensor, count: int) -> torch.Tensor:
    """Return the `count` leading left singular vectors of `matrix`, as columns.

    They come from the eigenvectors of the smaller Gram matrix, much cheaper than an SVD of the wide
    unfoldings met here; directions lost to rounding belong to singular values below 1e-8 of the largest.
    Where `matrix` has fewer rows than `count`, the columns beyond are zero.
    """
    rows, columns = matrix.shape
    if rows <= columns:
        vectors = torch.linalg.eigh(matrix @ matrix.T).eigenvectors.flip(1)[:, :count]
    else:
        right = torch.linalg.eigh(matrix.T @ matrix).eigenvectors.flip(1)[:, :count]
        vectors = torch.linalg.qr(matrix @ right).Q
    if vectors.shape[1] < count:
        vectors = torch.cat([vectors, vectors.new_zeros(rows, count - vectors.shape[1])], dim=1)
    return vectors


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the product of two matrices that a weight is made of.

    A fit computes it and its gradient in every step, faster than `einsum` would. It is a batched product of
    one: contractions of cores are not counted among a layer's operations (`decomposition.network.cost`).
    """
    return torch.bmm(left[None], right[None])[0]


def contract_chain(cores: list[torch.Tensor]) -> torch.Tensor:
    """Contract a chain of cores (left, size, right) to one core (left, product of sizes, right)."""
    result = cores[0]
    for core in cores[1:]:
        merged = product(result.flatten(0, 1), core.flatten(1))
        result = merged.reshape(result.shape[0], -1, core.shape[2])
    return result


def split_chain(tensor: torch.Tensor, sizes: tuple[int, ...], bonds: tuple[int, ...]) -> list[torch.Tensor]:
    """Split a core (left, product of sizes, right) into a chain by truncated SVDs (TT-SVD, Oseledets 2011).

    Args:
        tensor: Core of shape (left, product of `sizes`, right).
        sizes: Size of every core's middle mode.
        bonds: Bond dimension between neighbouring cores, one fewer than `sizes`.

    Returns:
        Cores (left, size, right) whose contraction approximates `tensor`; bonds wider than a step's rank are
        filled with zeros.
    """
    left, right = tensor.shape[0], tensor.shape[2]
    rest = tensor.reshape(left, -1)
    cores, bond = [], left
    for size, width in zip(sizes[:-1], bonds, strict=True):
        matrix = rest.reshape(bond * size, -1)
        vectors = leading_left_vectors(matrix, width)
        cores.append(vectors.reshape(bond, size, width))
        rest, bond = vectors.T @ matrix, width
    cores.append(rest.reshape(bond, sizes[-1], right))
    return cores
