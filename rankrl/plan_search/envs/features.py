"""The features of a layer that an agent observes, in [0, 1]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import numpy as np

from decomposition.choose.candidates import CandidateSet
from rankrl.errors import ConfigError
from rankrl.options.agents import Feature
from rankrl.plan_search.envs.descriptors import CURVE_POINTS, layer_descriptors
from rankrl.plan_search.space.problem import SearchProblem

DESCRIBING: tuple[Feature, ...] = ("macs", "curve", "descriptors")
"""Features whose number does not depend on the network: a policy that sees no others serves all networks."""


class ObservationEncoder:
    """Writes observations for many episodes at once.

    An observation holds, in this order: the layer's index, output and input channels, kernel height and
    width, stride height and width, and parameters (the embedding of patent WO2021102679; counts divided by
    the largest layer's, channels and parameters as logarithms since they span decades); then the static
    features asked for; then the previous layer's action; then the changing features asked for.
    """

    def __init__(self, problem: SearchProblem, features: Sequence[Feature]) -> None:
        for name in features:
            if name not in get_args(Feature):
                known = ", ".join(get_args(Feature))
                raise ConfigError(f"selector.features may hold {known}; got {name!r}")
        self.features = tuple(features)
        self.layers = len(problem.sites)
        self.static = _static_features(problem, self.features)
        changing = {"budget_left": 1, "last_reward": 1, "plan": self.layers}
        self.size = self.static.shape[1] + 1 + sum(changing.get(name, 0) for name in features)

    def __call__(
        self, layer: int, actions: np.ndarray, budget_left: float = 1.0, last_reward: float = 0.0
    ) -> np.ndarray:
        """Return the observations before the action of a layer is taken.

        Shapes: actions (E, layers); returns (E, size).
        """
        episodes = len(actions)
        taken = (actions + 1) / 2
        previous = taken[:, [layer - 1]] if layer else np.full((episodes, 1), 0.5)
        static = self.static[min(layer, self.layers - 1)]
        parts = [np.broadcast_to(static, (episodes, len(static))), previous]
        for feature in self.features:
            if feature == "budget_left":
                parts.append(np.full((episodes, 1), budget_left))
            elif feature == "last_reward":
                parts.append(np.full((episodes, 1), min(1.0, max(0.0, last_reward))))
            elif feature == "plan":
                so_far = taken.copy()
                so_far[:, layer:] = 0.5
                parts.append(so_far)
        return np.concatenate(parts, axis=1).astype(np.float32)


def _static_features(problem: SearchProblem, features: Sequence[Feature]) -> np.ndarray:
    """Return the features of every layer that no action changes, shape (layers, features)."""
    specs = [site.spec for site in problem.sites]
    count = len(specs)
    kernels = np.array([_two(spec.kernel_size) for spec in specs], dtype=float)
    strides = np.array([_two(spec.stride) for spec in specs], dtype=float)
    columns = [
        np.arange(count) / max(1, count - 1),
        _log_share([spec.out_channels for spec in specs]),
        _log_share([spec.in_channels for spec in specs]),
        *(kernels / kernels.max(0)).T,
        *(strides / strides.max(0)).T,
        _log_share([spec.params for spec in specs]),
    ]
    if "macs" in features:
        columns.append(_log_share([spec.macs for spec in specs]))
    if "curve" in features:
        columns.extend(np.array([_resampled(site) for site in problem.sites]).T)
    if "descriptors" in features:
        columns.extend(layer_descriptors(problem).T)
    if "identity" in features:
        columns.extend(np.eye(count))
    return np.stack(columns, axis=1)


def _two(sizes: tuple[int, ...]) -> tuple[int, int]:
    """Return (height, width), 1 where a layer has no such axis."""
    padded = (1, 1, *sizes)
    return padded[-2], padded[-1]


def _log_share(values: Sequence[int]) -> np.ndarray:
    logs = np.log1p(np.array(values, dtype=float))
    return logs / logs.max()


def _resampled(site: CandidateSet) -> np.ndarray:
    """Return the layer's error at equally spaced shares of its dense parameters, in [0, 1]."""
    shares = site.params / site.spec.params
    order = np.argsort(shares)
    points = (np.arange(CURVE_POINTS) + 0.5) / CURVE_POINTS
    return np.clip(np.interp(points, shares[order], site.errors[order]), 0, 1)
