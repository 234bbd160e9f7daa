"""A critic of whole plans: from what each layer loses to the plan's reward."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

# Grid of hyper-parameters: length scale a dimension, weight of the linear part, noise variance.
_LENGTHS = (1.0, 2.0, 4.0)
_LINEAR = (0.3, 3.0)
_NOISES = (0.003, 0.01, 0.03, 0.1)
# Plans between two searches of the grid, and plans remembered at most: solving costs their third power.
_PERIOD = 10
_CAPACITY = 600


@dataclass(frozen=True)
class _Kernel:
    length: float = 2.0
    linear: float = 0.3
    noise: float = 0.03

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        scale = 2 * self.length**2 * a.shape[1]
        return torch.exp(-torch.cdist(a, b).square() / scale) + self.linear * (a @ b.T) / a.shape[1]


class PlanCritic:
    """Gaussian-process regression (Rasmussen & Williams 2006, algorithm 2.1) of rewards on layer losses.

    The reward depends on a plan through what every layer loses; the actions stand for that only through the
    allocation, which is neither smooth nor one to one. Seen from the losses the reward is smooth and nearly
    linear, so that some tens of plans teach what networks on actions need hundreds for.

    The kernel, a squared exponential plus a linear one, is chosen from a small grid by the likelihood.
    """

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._rewards: list[float] = []
        self._kernel = _Kernel()
        self._chosen_at = 0

    def __len__(self) -> int:
        return len(self._rewards)

    def add(self, losses: Tensor, reward: float) -> None:
        """Remember a plan.

        Args:
            losses: Root of what each layer loses at the network's output, shape (layers,).
            reward: The plan's reward.
        """
        self._losses.append(losses.double())
        self._rewards.append(reward)
        if len(self._rewards) > _CAPACITY:  # what is known of the worst plans helps least
            worst = min(range(len(self._rewards)), key=lambda j: self._rewards[j])
            del self._losses[worst], self._rewards[worst]

    def values(self, losses: Tensor) -> tuple[Tensor, Tensor]:
        """Predict rewards.

        Args:
            losses: Of N plans, shape (N, layers).

        Returns:
            Mean and standard deviation of each plan's reward, both (N,); 0 and 1 while no plan is known.
        """
        if not self._rewards:
            return torch.zeros(len(losses)).double(), torch.ones(len(losses)).double()
        known = torch.stack(self._losses)
        rewards = torch.tensor(self._rewards, dtype=torch.float64)
        middle, spread = rewards.mean(), rewards.std(correction=0).clamp_min(1e-9)
        targets = (rewards - middle) / spread
        centre, scale = known.mean(0), known.std(0, correction=0)
        # Layers that never changed tell nothing; without the floor a first change would be off any scale.
        scale = scale.clamp_min(1e-2 * float(scale.max()) + 1e-12)
        known, wanted = (known - centre) / scale, (losses.double() - centre) / scale
        if len(self) >= self._chosen_at + _PERIOD:
            self._kernel, self._chosen_at = _most_likely(known, targets), len(self)
        factor = _cholesky(self._kernel, known)
        solved = torch.cholesky_solve(targets[:, None], factor)
        cross = self._kernel(wanted, known)
        mean = (cross @ solved)[:, 0]
        explained = torch.linalg.solve_triangular(factor, cross.T, upper=False).square().sum(0)
        prior = 1 + self._kernel.linear * wanted.square().mean(1)
        deviation = (prior - explained).clamp_min(0).sqrt()
        return mean * spread + middle, deviation * spread

    def state(self) -> dict[str, Tensor]:
        """Return everything as tensors."""
        kernel = self._kernel
        return {
            "losses": torch.stack(self._losses) if self._losses else torch.zeros(0, 0, dtype=torch.float64),
            "rewards": torch.tensor(self._rewards, dtype=torch.float64),
            "kernel": torch.tensor(
                [kernel.length, kernel.linear, kernel.noise, self._chosen_at], dtype=torch.float64
            ),
        }

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take over what `state` returned."""
        self._losses = list(state["losses"].clone().unbind(0))
        self._rewards = [float(reward) for reward in state["rewards"]]
        length, linear, noise, chosen_at = state["kernel"].tolist()
        self._kernel, self._chosen_at = _Kernel(length, linear, noise), int(chosen_at)


def _most_likely(known: Tensor, targets: Tensor) -> _Kernel:
    """Return the kernel of the grid under which the targets are most likely."""
    kernels = [_Kernel(*values) for values in itertools.product(_LENGTHS, _LINEAR, _NOISES)]

    def log_likelihood(kernel: _Kernel) -> float:
        factor = _cholesky(kernel, known)
        whitened = torch.linalg.solve_triangular(factor, targets[:, None], upper=False)
        return float(-0.5 * whitened.square().sum() - factor.diagonal().log().sum())  # up to a constant

    return max(kernels, key=log_likelihood)


def _cholesky(kernel: _Kernel, known: Tensor) -> Tensor:
    matrix = kernel(known, known)
    matrix.diagonal().add_(kernel.noise)
    return torch.linalg.cholesky(matrix)
