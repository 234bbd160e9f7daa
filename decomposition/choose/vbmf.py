"""How many components of a matrix are signal: empirical variational Bayesian matrix factorisation (EVBMF)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from decomposition.errors import DecompositionError

_GRID = 200


@dataclass(frozen=True)
class MatrixRank:
    """What EVBMF finds in a matrix.

    Attributes:
        rank: Components that stand out of the noise, 0 or more.
        noise_variance: Estimated variance of the noise on each element; 0 for a matrix of zeros.
    """

    rank: int
    noise_variance: float


def matrix_rank(matrix: torch.Tensor) -> MatrixRank:
    """Estimate rank and noise variance of a matrix that is low-rank plus white noise.

    The global solution of EVBMF is analytic (Nakajima, Sugiyama, Babacan & Tomioka 2013, "Global analytic
    solution of fully-observed variational Bayesian matrix factorization", JMLR 14): a component is kept when
    its squared singular value exceeds M sigma^2 (1 + tau)(1 + alpha / tau), with L <= M the sides,
    alpha = L / M and tau the zero of phi(tau) + phi(tau / alpha), phi(z) = log(1 + z) / z - 1/2. The one
    unknown, sigma^2, minimises the free energy, a function of one variable with several local minima; it is
    searched on a logarithmic grid and refined.

    Args:
        matrix: Real matrix, either side the longer one.

    Returns:
        Rank and noise variance.

    Raises:
        DecompositionError: If it is no matrix, is empty or is not finite.
    """
    if matrix.ndim != 2 or matrix.numel() == 0:
        raise DecompositionError(f"EVBMF needs a matrix with elements, got shape {tuple(matrix.shape)}")
    if not bool(torch.isfinite(matrix).all()):
        raise DecompositionError("EVBMF needs finite values; the matrix holds NaN or infinite ones")
    short, long = sorted(matrix.shape)
    singular = torch.linalg.svdvals(matrix.detach().double().cpu())
    largest = float(singular[0])
    if largest == 0:
        return MatrixRank(0, 0.0)
    # Singular values below rounding are unknown; as zeros they would make the logarithms infinite.
    squares = singular.clamp_min(largest * long * torch.finfo(torch.float64).eps).square().numpy()
    alpha = short / long
    tau = _threshold_tau(alpha)
    threshold = (1 + tau) * (1 + alpha / tau)
    variance = _noise_variance(squares, long, alpha, threshold)
    return MatrixRank(int((squares > long * variance * threshold).sum()), variance)


def _threshold_tau(alpha: float) -> float:
    """Solve phi(tau) + phi(tau / alpha) = 0; about 2.5129 sqrt(alpha)."""

    def phi(z: float) -> float:
        return math.log1p(z) / z - 0.5

    guess = 2.5129 * math.sqrt(alpha)
    from scipy.optimize import brentq  # takes a third of a second

    return float(brentq(lambda tau: phi(tau) + phi(tau / alpha), guess / 4, guess * 4))


def _noise_variance(squares: np.ndarray, long: int, alpha: float, threshold: float) -> float:
    """Minimise the free energy over the noise variance, between the bounds within which it must lie.

    Shapes: squares (L,).
    """
    short = len(squares)
    upper = float(squares.mean()) / long
    # At most this many components can be signal; the rest are certainly noise.
    signals = max(0, min(math.ceil(short / (1 + alpha)) - 1, short - 1))
    lower = max(float(squares[signals]) / (long * threshold), float(squares[signals:].mean()) / long)

    def free_energy(log_variance: np.ndarray | float) -> np.ndarray:
        x = squares / (long * np.exp(log_variance)[..., None])
        # Below the threshold tau is not used; the bound keeps its square root real.
        middle = np.maximum(x - (1 + alpha), 2 * math.sqrt(alpha))
        tau = (middle + np.sqrt(np.maximum(middle**2 - 4 * alpha, 0))) / 2
        kept = x - tau + np.log((tau + 1) / x) + alpha * np.log(tau / alpha + 1)
        return np.where(x > threshold, kept, x - np.log(x)).sum(-1)

    if upper <= lower:
        return upper
    grid = np.linspace(math.log(lower), math.log(upper), _GRID)
    energies = free_energy(grid)
    best = int(energies.argmin())
    bounds = (grid[max(0, best - 1)], grid[min(_GRID - 1, best + 1)])
    from scipy.optimize import minimize_scalar

    minimum = minimize_scalar(free_energy, bounds=bounds, method="bounded", options={"xatol": 1e-8})
    return math.exp(minimum.x if minimum.fun < energies[best] else grid[best])
