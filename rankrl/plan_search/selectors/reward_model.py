"""A Gaussian process from what a plan's layers lose to the plan's reward."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from threadpoolctl import ThreadpoolController
from torch import Tensor

if TYPE_CHECKING:  # scikit-learn takes most of a second to import: only where a process is fitted
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import Kernel

# Plans between two searches for the kernel's hyper-parameters, and plans remembered at most: solving costs
# their third power.
_PERIOD = 10
_CAPACITY = 600


class RewardModel:
    """Gaussian-process regression (Rasmussen & Williams 2006) of rewards on layer losses, by scikit-learn.

    The reward depends on a plan through what every layer loses; the actions stand for that only through the
    allocation, which is neither smooth nor one to one. Seen from the losses the reward is smooth and nearly
    linear, so that some tens of plans teach what networks on actions need hundreds for. The kernel is a
    squared exponential plus a linear one and noise; its hyper-parameters are those of the highest likelihood.

    What the process learns may be what is left of an additive model's guess, its mean function (section 2.7
    there): a plan loses the sum of what its layers lose, each counted as `counts` says.
    """

    def __init__(self, counts: np.ndarray | None = None) -> None:
        self._counts = counts
        self._roots: list[np.ndarray] = []
        self._rewards: list[float] = []
        self._theta: np.ndarray | None = None
        self._chosen_at = 0
        self._process: GaussianProcessRegressor | None = None  # fitted to the plans known now

    def __len__(self) -> int:
        return len(self._rewards)

    def add(self, roots: np.ndarray, reward: float) -> None:
        """Remember a plan."""
        self._process = None
        self._roots.append(np.asarray(roots, dtype=float))
        self._rewards.append(reward)
        if len(self._rewards) > _CAPACITY:  # what is known of the worst plans helps least
            worst = int(np.argmin(self._rewards))
            del self._roots[worst], self._rewards[worst]

    def predict(self, roots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Predict rewards.

        Shapes: roots (N, layers); returns (N,).
        """
        if not self._rewards:
            return np.zeros(len(roots)), np.ones(len(roots))
        known, rewards = np.stack(self._roots), np.array(self._rewards)
        centre, scale = known.mean(0), known.std(0)
        # Layers that never changed tell nothing; without the floor a first change would be off any scale.
        scale = np.maximum(scale, 1e-2 * scale.max() + 1e-12)
        expected, guess = self._guesses(known, rewards, roots)
        left = rewards - expected
        spread = max(float(left.std()), 1e-9)
        with _quiet():
            if self._process is None:
                self._process = self._fitted((known - centre) / scale, (left - left.mean()) / spread)
            mean, deviation = self._process.predict((roots - centre) / scale, return_std=True)
        return guess + mean * spread + left.mean(), deviation * spread

    def state(self) -> dict[str, Tensor]:
        """Return everything as tensors."""
        theta = np.zeros(0) if self._theta is None else self._theta
        roots = np.stack(self._roots) if self._roots else np.zeros((0, 0))
        return {
            "roots": torch.from_numpy(roots.copy()),
            "rewards": torch.tensor(self._rewards, dtype=torch.float64),
            "theta": torch.from_numpy(theta.copy()),
            "chosen_at": torch.tensor(self._chosen_at),
        }

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take over what `state` returned."""
        self._process = None
        self._roots = list(state["roots"].numpy().copy())
        self._rewards = state["rewards"].tolist()
        theta = state["theta"].numpy().copy()
        self._theta = theta if len(theta) else None
        self._chosen_at = int(state["chosen_at"])

    def _guesses(
        self, known: np.ndarray, rewards: np.ndarray, roots: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return what the additive model says of the known plans and of others, each but for a constant.

        How much reward a unit of loss costs is fitted to the known plans: by least squares, never below 0.
        """
        if self._counts is None:
            return np.zeros(len(known)), np.zeros(len(roots))
        losses = known**2 @ self._counts
        excess = losses - losses.mean()
        price = max(0.0, -float(excess @ rewards) / max(float(excess @ excess), 1e-300))
        return -price * losses, -price * (roots**2 @ self._counts)

    def _fitted(self, known: np.ndarray, targets: np.ndarray) -> GaussianProcessRegressor:
        from sklearn.gaussian_process import GaussianProcessRegressor

        due = len(self) >= self._chosen_at + _PERIOD
        kernel = _kernel(known.shape[1])
        if self._theta is not None:
            kernel = kernel.clone_with_theta(self._theta)
        process = GaussianProcessRegressor(kernel, alpha=1e-8, optimizer="fmin_l_bfgs_b" if due else None)
        process.fit(known, targets)
        if due:
            self._theta, self._chosen_at = process.kernel_.theta.copy(), len(self)
        return process


@cache
def _libraries() -> ThreadpoolController:
    """Find the process's libraries that keep threads, once: it takes milliseconds."""
    return ThreadpoolController()


@contextmanager
def _quiet() -> Iterator[None]:
    """Compute on one thread, on whose number the last bits of a result must not depend, without warnings.

    scikit-learn warns of hyper-parameters at their bounds, which are there to be reached.
    """
    from sklearn.exceptions import ConvergenceWarning

    with _libraries().limit(limits=1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.filterwarnings("ignore", message="Predicted variances smaller than 0")
        yield


def _kernel(layers: int) -> Kernel:
    """Return the kernel before any plan is known; lengths grow with the root of the number of layers."""
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct, WhiteKernel

    length = 2 * layers**0.5
    smooth = ConstantKernel(1.0, (1e-2, 1e2)) * RBF(length, (0.2 * length, 5 * length))
    linear = ConstantKernel(0.3 / layers, (1e-4 / layers, 1e2 / layers)) * DotProduct(0.0, "fixed")
    return smooth + linear + WhiteKernel(0.03, (1e-3, 1.0))
