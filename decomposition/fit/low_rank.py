"""The best approximations of a matrix at every rank, from one decomposition on its smaller side.

For a weight W (out, D) of a layer without a kernel, inputs of second moment S = C C' and a sensitivity
G = R' R, the error of an approximation V is |R (W - V) C|^2. The best V of rank r keeps the r leading
singular pairs of R W C (Eckart & Young 1936; reduced-rank regression, Izenman 1975), so those of all ranks
are nested: one eigendecomposition of R W S W' R' or of C' W' G W C, whichever is smaller, holds the halves
V = A Q of every rank as leading columns and rows, and all errors as sums of its last eigenvalues.
"""

from __future__ import annotations

import torch

from decomposition.calibration.metric import Metric, times, whole
from decomposition.calibration.sensitivity_root import floored, triangular_root

_EPSILON = torch.finfo(torch.float64).eps
# Below it a sum of eigenvalues has fewer digits than an error is wanted to.
_ROUNDING = 1e-9


class LowRank:
    """The best approximations V = A Q of a matrix, of every rank.

    Shapes: weight (out, D), metric (D, D).
    """

    def __init__(self, weight: torch.Tensor, metric: Metric | None, sensitivity: torch.Tensor | None) -> None:
        self._weight, self._metric = weight, metric
        self._sensitivity = None
        if sensitivity is not None:
            raised = floored(sensitivity)
            self._sensitivity = raised / raised.diagonal().mean()
        solve = _by_outputs if weight.shape[0] <= weight.shape[1] else _by_inputs
        self._energies, self._output, self._features = solve(weight, metric, self._sensitivity)

    def halves(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A (out, rank) and Q (rank, D); zeros beyond the smaller side."""
        output, features = self._output[:, :rank], self._features[:rank]
        missing = rank - len(features)
        if missing > 0:
            output = torch.cat([output, output.new_zeros(len(output), missing)], dim=1)
            features = torch.cat([features, features.new_zeros(missing, features.shape[1])])
        return output, features

    def squared_error(self, rank: int) -> float:
        """Return the squared relative error of a rank."""
        squared = float(self._energies[rank:].sum() / self._energies.sum())
        if squared >= _ROUNDING:
            return squared
        output, features = self.halves(rank)
        rest = self._weight - output @ features
        return self._energy(rest) / self._energy(self._weight)

    def terms(self, metric: Metric | None) -> torch.Tensor:
        """Return the norms of the first 1, 2, ... terms A[:, p] Q[p, :], relative to the weight's."""
        sizes = self._output.square().sum(0)
        plain = (sizes * self._features.square().sum(1)).cumsum(0) / self._weight.square().sum()
        if metric is None:
            return plain.sqrt()
        outputs = (times(self._features, metric) * self._features).sum(1).clamp_min(0)
        energy = (times(self._weight, metric) * self._weight).sum()
        return torch.maximum(plain, (sizes * outputs).cumsum(0) / energy).sqrt()

    def squared_error_in(self, rank: int, other: LowRank) -> float:
        """Return the squared relative error of a rank as another problem of the same weight counts it."""
        output, features = self.halves(rank)
        return other._energy(self._weight - output @ features) / other._energy(self._weight)

    def _energy(self, rows: torch.Tensor) -> float:
        seen = rows if self._metric is None else times(rows, self._metric)
        return float(((seen if self._sensitivity is None else self._sensitivity @ seen) * rows).sum())


_Solution = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Energies (k,), descending, A (out, k) and Q (k, D), k the smaller side."""


def _by_outputs(weight: torch.Tensor, metric: Metric | None, sensitivity: torch.Tensor | None) -> _Solution:
    """Decompose R W S W' R' (out, out): A = R^-1 U and Q = U' R W with its eigenvectors U."""
    root = None if sensitivity is None else triangular_root(sensitivity)
    seen = weight if root is None else root @ weight
    energies, vectors = _descending((seen if metric is None else times(seen, metric)) @ seen.T)
    output = vectors if root is None else torch.linalg.solve_triangular(root, vectors, upper=True)
    return energies, output, vectors.T @ seen


def _by_inputs(weight: torch.Tensor, metric: Metric | None, sensitivity: torch.Tensor | None) -> _Solution:
    """Decompose C' W' G W C (D, D): with its eigenpairs (e, v), A = W C v / e^1/2, Q = v' C' W' G W / e^1/2.

    Neither C nor R is inverted, and nothing as large as out x out is decomposed.
    """
    gram = weight.T @ (weight if sensitivity is None else sensitivity @ weight)
    if metric is None:
        energies, vectors = _descending(gram)
    else:
        moments = whole(metric)
        factor, failed = torch.linalg.cholesky_ex((moments + moments.T) / 2)
        if failed.item():  # directions without any energy
            values, axes = _descending(moments)
            factor = axes * values.sqrt()
        energies, vectors = _descending(factor.T @ gram @ factor)
        vectors = factor @ vectors
    # Where there is no energy, both halves vanish but for rounding.
    vectors = vectors / energies.clamp_min(_EPSILON * energies[0]).sqrt()
    return energies, weight @ vectors, vectors.T @ gram


def _descending(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the eigenvalues of a symmetric matrix, in descending order and 0 or more, and its vectors."""
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    return values.clamp_min(0).flip(0), vectors.flip(1)
