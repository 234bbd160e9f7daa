"""Square roots of a sensitivity, whose small eigenvalues are raised: it is only an estimate."""

from __future__ import annotations

import torch

from decomposition.calibration.metric import cholesky

# Share of its mean power that every output direction keeps at least.
_FLOOR = 0.01


def floored(sensitivity: torch.Tensor) -> torch.Tensor:
    """Return a sensitivity (out, out) with its small eigenvalues raised, positive definite.

    Rounding may leave negative eigenvalues; those larger than what is added count as zero.
    """
    matrix = (sensitivity.double() + sensitivity.double().T) / 2
    raised = matrix.clone()
    raised.diagonal().add_((_FLOOR * matrix.diagonal().mean()).clamp_min(1e-300))
    if torch.linalg.cholesky_ex(raised).info.item():
        root = symmetric_root(sensitivity)
        return root @ root
    return raised


def symmetric_root(sensitivity: torch.Tensor) -> torch.Tensor:
    """Return the symmetric square root of a sensitivity (out, out), its small eigenvalues raised."""
    matrix = (sensitivity.double() + sensitivity.double().T) / 2
    values, vectors = torch.linalg.eigh(matrix)
    floor = _FLOOR * values.clamp_min(0).mean().clamp_min(1e-300)
    return (vectors * (values.clamp_min(0) + floor).sqrt()) @ vectors.T


def triangular_root(matrix: torch.Tensor) -> torch.Tensor:
    """Return the upper triangular R with R' R = `matrix` (out, out), positive definite.

    It costs a tenth of the symmetric root, and serves as well where only R' R counts.
    """
    return cholesky(matrix).T
