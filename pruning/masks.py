"""Define mask layers, group LASSO and hard-concrete gates, and norms that count open channels alone."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pruning.errors import PruningError
from pruning.registry import register_pruner


class ChannelMask(nn.Module, abc.ABC):
    """A layer that multiplies every channel of its input by a learned gate.

    Subclasses define the gates and what an open gate costs. A gate that is closed is zero and stays zero,
    whatever the optimizer does (trapping).

    Args:
        units: the number of gates, one per channel (or per unit of a channel group).

    Raises:
        PruningError: if `units` is no positive integer.
    """

    alive: torch.Tensor
    learning_rate: float
    """The learning rate of Adam at which the mask moves from open to closed in a few hundred steps."""
    absorbs_scale: bool = False
    """Whether the gates may take on any scale, so that the norm of the weights can be moved into them."""

    def __init__(self, units: int) -> None:
        super().__init__()
        if isinstance(units, bool) or not isinstance(units, int) or units < 1:
            raise PruningError(f"a mask needs a positive number of units, got {units!r}")
        self.units = units
        self.register_buffer("alive", torch.ones(units, dtype=torch.bool))

    @abc.abstractmethod
    def deterministic_gates(self) -> torch.Tensor:
        """Return the gates used at evaluation, shape (units,)."""

    @abc.abstractmethod
    def penalty(self) -> torch.Tensor:
        """Return the penalty of each gate at strength 1, shape (units,); 0 for closed gates."""

    @abc.abstractmethod
    def scores(self) -> torch.Tensor:
        """Return how much each unit matters, shape (units,), detached; closed units score 0, the lowest."""

    @abc.abstractmethod
    def reopen(self, units: torch.Tensor) -> None:
        """Move the gates of `units` (boolean, shape (units,)) as little from zero as makes them open."""

    def rescale(self, factors: torch.Tensor) -> None:
        """Multiply the gates by `factors`, a scalar or of shape (units,).

        Raises:
            PruningError: if the gates have a fixed range (see `absorbs_scale`).
        """
        raise PruningError(f"the gates of a {type(self).__name__} cannot be rescaled: their range is fixed")

    @abc.abstractmethod
    def freeze(self) -> None:
        """End the learning: gates that are zero close, and no gate changes any more."""

    def gates(self) -> torch.Tensor:
        """Return the gates of this forward pass, shape (units,)."""
        return self.deterministic_gates()

    def presence(self, gates: torch.Tensor) -> torch.Tensor:
        """Return the weight of each unit in the statistics of norms over channels, shape (units,).

        A gate from 0 to 1 counts as far as it is open. One of any scale is folded into the reading weights in
        the end, which lie behind the norms: its unit counts in full until it is closed.

        Args:
            gates: of the running pass.
        """
        return (gates != 0).to(gates.dtype) if self.absorbs_scale else gates

    def open_units(self) -> torch.Tensor:
        """Return which units the deterministic gates let through, boolean, shape (units,).

        Raises:
            PruningError: if a gate is not a finite number, which means that training has diverged.
        """
        gates = self.deterministic_gates().detach()
        if not torch.isfinite(gates).all():
            diverged = int((~torch.isfinite(gates)).sum())
            raise PruningError(
                f"{diverged} of {self.units} gates of a {type(self).__name__} are not "
                "finite: training has diverged; lower the learning rate of the masks"
            )
        return gates != 0

    def close(self, units: torch.Tensor) -> None:
        """Close the gates of `units` (boolean, shape (units,)) for good.

        Raises:
            PruningError: if no gate would remain open: a layer never loses all its channels.
        """
        alive = self.alive & ~units.to(self.alive.device)
        if not alive.any():
            raise PruningError(
                f"closing {int(units.sum())} units would close all {self.units} of a mask; keep one"
            )
        self.alive.copy_(alive)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Multiply channel c (axis 1) of `features`, shape (batch, units, ...), by gate c.

        Raises:
            PruningError: if the features have another number of channels.
        """
        if features.ndim < 2 or features.shape[1] != self.units:
            raise PruningError(f"a mask of {self.units} units got features of shape {tuple(features.shape)}")
        return scale_channels(features, self.gates())


def scale_channels(features: torch.Tensor, gates: torch.Tensor, axis: int = 1) -> torch.Tensor:
    """Multiply the c-th slice of `features` along an axis by `gates[c]`."""
    shape = [1] * features.ndim
    shape[axis] = -1
    return features * gates.to(features.dtype).view(shape)


def gated_norm(
    x: Tensor,
    presence: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
    *,
    centred: bool,
) -> Tensor:
    """Normalise the last axis of x (..., C) by statistics weighted by the channels' `presence` (C,)."""
    values = x.float() if x.element_size() < 4 else x  # as torch's own norms do
    presence = presence.to(values.dtype)
    share = torch.where(presence.sum() > 0, presence, torch.ones_like(presence))
    share = share / share.sum()
    if centred:
        values = values - (values * share).sum(-1, keepdim=True)
    variance = (values.square() * share).sum(-1, keepdim=True)
    values = values * torch.rsqrt(variance + (torch.finfo(values.dtype).eps if eps is None else eps))
    if weight is not None:
        values = values * weight
    if bias is not None:
        values = values + bias
    return values.to(x.dtype)


class GatedForward:
    """Replaces a norm's `forward`: the norm functions that it calls use only channels that are present."""

    def __init__(self, module: nn.Module) -> None:
        self._forward: Callable[..., Any] = module.forward
        self.presence: Tensor | None = None
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the norm's own `forward`."""
        if self.presence is None:
            return self._forward(*args, **kwargs)
        with _PresentChannels(self.presence):
            return self._forward(*args, **kwargs)

    @staticmethod
    def remove_from(module: nn.Module) -> None:
        """Restore a norm's own `forward`."""
        gated = module.__dict__.pop("forward")
        if module.forward != gated._forward:  # it had been replaced before
            module.forward = gated._forward


class _PresentChannels(TorchFunctionMode):
    """Runs layer and RMS norm functions as `gated_norm`; norms may permute their input around the call."""

    def __init__(self, presence: Tensor) -> None:
        super().__init__()
        self._presence = presence

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        call = norm_arguments(func, args, kwargs or {})
        if call is None:
            return func(*args, **(kwargs or {}))
        centred = func.__name__ == "layer_norm"
        eps = call.get("eps", 1e-5 if centred else None)
        return gated_norm(
            call["input"], self._presence, call.get("weight"), call.get("bias"), eps, centred=centred
        )


_ARGUMENTS = {
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
}
JOINT_NORMS = frozenset(_ARGUMENTS)
"""Operations that normalise all channels together."""


def norm_arguments(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the arguments of a `layer_norm` or `rms_norm` call by name; None for other calls."""
    names = _ARGUMENTS.get(getattr(function, "__name__", ""))
    return None if names is None else {**dict(zip(names, args, strict=False)), **kwargs}


REOPENED = 1e-2
"""The size of a factor that is moved away from zero."""


@register_pruner("group_lasso", "learned factor per channel with an L1 penalty")
class GroupLassoMask(ChannelMask):
    """Multiplies every channel by a factor beta, on which an L1 penalty lies.

    The factor follows Liu et al. (network slimming, 2017), the name Yuan and Lin (2006):
    if the weights that read channel c are held at a fixed norm, |beta_c| is the norm of the product, and the
    penalty is exactly the group LASSO on the reading weights. Without such a constraint, or a penalty on the
    weights, a ReLU network undoes the mask by scaling weights up as beta goes down.

    Args:
        units: the number of channels.
        initial: the factor to start from.
    """

    absorbs_scale = True
    learning_rate = 0.02

    def __init__(self, units: int, initial: float = 1.0) -> None:
        super().__init__(units)
        self.weight = nn.Parameter(torch.full((units,), float(initial), dtype=torch.float32))

    def deterministic_gates(self) -> torch.Tensor:
        """Return beta, shape (units,), zero where closed."""
        return torch.where(self.alive, self.weight, 0.0)

    def penalty(self) -> torch.Tensor:
        return self.deterministic_gates().abs()

    def scores(self) -> torch.Tensor:
        return self.penalty().detach()

    def reopen(self, units: torch.Tensor) -> None:
        """Set the factors of `units` that are smaller than `REOPENED` to it, keeping their sign."""
        with torch.no_grad():
            sign = torch.where(self.weight < 0, -1.0, 1.0)
            small = units & (self.weight.abs() < REOPENED)
            self.weight.copy_(torch.where(small, sign * REOPENED, self.weight))
            self.alive |= units

    def rescale(self, factors: torch.Tensor) -> None:
        with torch.no_grad():
            self.weight.mul_(factors)

    def freeze(self) -> None:
        self.close(~self.open_units())
        self.weight.requires_grad_(False)


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
