"""Learn hard-concrete gates: an L0 penalty that can be trained by gradient descent."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from pruning.errors import PruningError
from pruning.masks import ChannelMask
from pruning.registry import register_pruner

SMALLEST_ALPHA = 1e-8
"""The plain-alpha variant raises smaller (or negative) alphas to this value: such gates are surely closed."""


@register_pruner("hard_concrete", "stochastic gates with an L0 penalty")
class HardConcreteMask(ChannelMask):
    """Multiplies every channel by a stretched, rectified binary concrete gate (Louizos et al. 2018).

    In training a gate is sampled (eq. 10 and 11): s = sigmoid((log u - log(1 - u) + log alpha) / temperature)
    with u uniform on (0, 1), stretched to s (zeta - gamma) + gamma and clamped to [0, 1]. At evaluation it is
    deterministic (eq. 13): sigmoid(log alpha), stretched and clamped. The penalty is the probability that the
    gate is open (eq. 12): sigmoid(log alpha - temperature log(-gamma / zeta)); its sum is the expected number
    of open gates.

    Args:
        units: the number of channels.
        initial_log_alpha: the location to start from; at 2.5 (P(open) = 0.93 at a small temperature) far more
            stays than goes.
        temperature: of the concrete distribution, positive; the smaller, the closer are the gates to 0 and 1.
        gamma: lower end of the stretched interval, negative.
        zeta: upper end of the stretched interval, above 1.
        parametrisation: learn `log_alpha` itself, or `alpha`, whose gradient grows as the gate closes.
        penalty_function: `sigmoid` as in the paper, or `hard_sigmoid`, its piecewise linear approximation
            clamp(x / 6 + 1 / 2, 0, 1), whose gradient does not fade before it ends, at an argument of -3 and
            of 3 (3 is passed at the start if the temperature exceeds 0.2).

    Raises:
        PruningError: if an option is outside its range.
    """

    frozen: torch.Tensor

    def __init__(
        self,
        units: int,
        initial_log_alpha: float = 2.5,
        temperature: float = 0.05,
        gamma: float = -0.1,
        zeta: float = 1.1,
        parametrisation: Literal["log_alpha", "alpha"] = "log_alpha",
        penalty_function: Literal["sigmoid", "hard_sigmoid"] = "sigmoid",
    ) -> None:
        super().__init__(units)
        if not (gamma < 0 and zeta > 1):
            raise PruningError(f"the stretched interval needs gamma < 0 and zeta > 1, got ({gamma}, {zeta})")
        if parametrisation not in ("log_alpha", "alpha"):
            raise PruningError(f"parametrisation is {parametrisation!r}; choose log_alpha or alpha")
        if penalty_function not in ("sigmoid", "hard_sigmoid"):
            raise PruningError(f"penalty_function is {penalty_function!r}; choose sigmoid or hard_sigmoid")
        if not math.isfinite(initial_log_alpha):
            raise PruningError(f"initial_log_alpha must be finite, got {initial_log_alpha}")
        self.gamma, self.zeta = gamma, zeta
        self.parametrisation, self.penalty_function = parametrisation, penalty_function
        self.set_temperature(temperature)
        self.sample_at_evaluation = False
        # alpha has to come down from exp(log alpha), log alpha only from itself.
        self.learning_rate = 0.05 if parametrisation == "log_alpha" else 0.2
        self.register_buffer("frozen", torch.tensor(False))
        start = initial_log_alpha if parametrisation == "log_alpha" else math.exp(initial_log_alpha)
        self.location = nn.Parameter(torch.full((units,), float(start), dtype=torch.float32))

    def set_temperature(self, temperature: float) -> None:
        """Set the temperature of the concrete distribution.

        Raises:
            PruningError: if it is not positive and finite.
        """
        if not (math.isfinite(temperature) and temperature > 0):
            raise PruningError(f"the temperature must be positive and finite, got {temperature}")
        self.temperature = temperature

    def log_alpha(self) -> torch.Tensor:
        """Return the location log alpha of every gate, shape (units,)."""
        if self.parametrisation == "log_alpha":
            return self.location
        return self.location.clamp_min(SMALLEST_ALPHA).log()

    def open_probability(self) -> torch.Tensor:
        """Return P(gate > 0) of the sampled gates (eq. 12), shape (units,)."""
        return torch.sigmoid(self._open_logit())

    def sample(self) -> torch.Tensor:
        """Draw one gate per unit (eq. 10 and 11), shape (units,), differentiable in the location."""
        tiny = torch.finfo(self.location.dtype).tiny
        uniform = torch.rand_like(self.location).clamp_min(tiny)
        # u < 1 always holds for torch.rand, and log1p(-u) is exact near 0.
        noise = uniform.log() - torch.log1p(-uniform)
        return self._stretch(torch.sigmoid((noise + self.log_alpha()) / self.temperature))

    def gates(self) -> torch.Tensor:
        """Return gates, shape (units,): sampled in training, deterministic at evaluation or once frozen."""
        if self.frozen or not (self.training or self.sample_at_evaluation):
            return self.deterministic_gates()
        return torch.where(self.alive, self.sample(), 0.0)

    def deterministic_gates(self) -> torch.Tensor:
        """Return the gates at evaluation (eq. 13), shape (units,), exactly 0 or 1 once frozen."""
        if self.frozen:
            return self.alive.to(self.location.dtype)
        return torch.where(self.alive, self._stretch(torch.sigmoid(self.log_alpha())), 0.0)

    def penalty(self) -> torch.Tensor:
        """Return P(gate > 0), or its hard sigmoid, shape (units,), zero where closed."""
        squash = torch.sigmoid if self.penalty_function == "sigmoid" else F.hardsigmoid
        return torch.where(self.alive, squash(self._open_logit()), 0.0)

    def scores(self) -> torch.Tensor:
        """Return the probability that each gate is open, shape (units,), detached, zero where closed."""
        return torch.where(self.alive, self.open_probability().detach(), 0.0)

    def reopen(self, units: torch.Tensor) -> None:
        """Raise the locations of `units` whose gate is zero to log alpha = 0, a gate of one half."""
        with torch.no_grad():
            closed = units & (self.deterministic_gates() == 0)
            half_open = 0.0 if self.parametrisation == "log_alpha" else 1.0
            self.location.copy_(torch.where(closed, half_open, self.location))
            self.alive |= units

    def freeze(self) -> None:
        """Binarise: gates whose deterministic value is zero close, all others become exactly one."""
        self.close(~self.open_units())
        self.frozen.fill_(True)
        self.location.requires_grad_(False)

    def _open_logit(self) -> torch.Tensor:
        return self.log_alpha() - self.temperature * math.log(-self.gamma / self.zeta)

    def _stretch(self, gates: torch.Tensor) -> torch.Tensor:
        return (gates * (self.zeta - self.gamma) + self.gamma).clamp(0.0, 1.0)
