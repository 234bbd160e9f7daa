"""Encode observations: normalised layer descriptors and features of the partial plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import get_args

import numpy as np

from decomposition.choose.candidates import MEASURES, CandidateSet
from decomposition.formats import list_formats
from decomposition.operations import Factorise, Quantise
from rankrl.errors import ConfigError
from rankrl.options.selectors import Feature
from rankrl.plan_search.space.problem import SearchProblem

CURVE_POINTS = 6

# Logarithms of ratios are clipped to plus or minus this before they are scaled to [0, 1].
_RANGE = 4.0
# Scales of the descriptors of a network's depth and size; larger networks are clipped to 1.
_MOST_LAYERS, _MOST_PARAMETERS = 256, 1e8

_OF_A_LAYER = (
    "depth",
    "first",
    "last",
    "place_in_block",
    "widening",
    "stride",
    "kernel",
    "cost_share",
    "params_share",
    "macs_share",
    "importance",
    "loss_share",
    "loss_before",
    "preset_kept",
    "preset_error",
    "preset_dense",
    "preset_least",
    "slope_up",
    "slope_down",
    *(f"error_at_{point}" for point in range(CURVE_POINTS)),
)
_OF_NEIGHBOURS = ("place_in_block", "cost_share", "importance", "loss_share", "preset_kept", "preset_error")
_OF_THE_TASK = ("rounded", *(f"budget_{measure}" for measure in MEASURES), "layers", "params", "mean_error")
_FORMAT = "format_"


def descriptor_names() -> tuple[str, ...]:
    return (
        *_OF_A_LAYER,
        *(f"previous_{name}" for name in _OF_NEIGHBOURS),
        *(f"next_{name}" for name in _OF_NEIGHBOURS),
        *(f"{_FORMAT}{name}" for name in list_formats()),
        *_OF_THE_TASK,
    )


def layer_descriptors(problem: SearchProblem) -> np.ndarray:
    """Return the descriptors of every layer, in [0, 1], shape (layers, descriptors).

    Shares are logarithms relative to an even share. They are of the layer, of its neighbours, and of the
    task: format, rounding, budgets and size of the network.
    """
    names = descriptor_names()
    own = _own(problem)
    columns = {
        **own,
        **{f"previous_{name}": np.array([0.5, *own[name][:-1]]) for name in _OF_NEIGHBOURS},
        **{f"next_{name}": np.array([*own[name][1:], 0.5]) for name in _OF_NEIGHBOURS},
        **_task(problem, [name for name in names if name.startswith(_FORMAT)]),
    }
    return np.stack([columns[name] for name in names], axis=1).clip(0.0, 1.0)


def _own(problem: SearchProblem) -> dict[str, np.ndarray]:
    sites, preset = problem.sites, problem.preset
    specs, count = [site.spec for site in sites], len(sites)
    costs = [site.cost(problem.measure).astype(float) for site in sites]
    losses = np.array([site.losses[choice] for site, choice in zip(sites, preset, strict=True)])
    slopes = np.array([_slopes(*layer) for layer in zip(sites, costs, preset, strict=True)])
    curves = np.array([_curve(site, cost) for site, cost in zip(sites, costs, strict=True)])
    lost = losses / max(float(losses.sum()), 1e-300)  # greedy may lose nothing
    return {
        "depth": np.arange(count) / max(1, count - 1),
        "first": np.eye(count)[0],
        "last": np.eye(count)[-1],
        "place_in_block": _place_in_block([site.name for site in sites]),
        "widening": _unit(np.log([spec.out_channels / spec.in_channels for spec in specs])),
        "stride": np.array([1 - 1 / max(1, *spec.stride) if spec.stride else 0.0 for spec in specs]),
        "kernel": np.array([1 - 1 / spec.kernel_elements for spec in specs]),
        "cost_share": _relative_to_even(np.array([cost[-1] for cost in costs])),
        "params_share": _relative_to_even(np.array([float(spec.params) for spec in specs])),
        "macs_share": _relative_to_even(np.array([float(spec.macs) for spec in specs])),
        "importance": _relative_to_even(np.array([site.importance for site in sites])),
        "loss_share": _relative_to_even(losses),
        "loss_before": np.cumsum(lost) - lost,
        "preset_kept": np.array([c[j] / c[-1] for c, j in zip(costs, preset, strict=True)]),
        "preset_error": np.array([site.errors[j] for site, j in zip(sites, preset, strict=True)]),
        "preset_dense": np.array([float(j == s.dense) for s, j in zip(sites, preset, strict=True)]),
        "preset_least": np.array([float(c[j] == c.min()) for c, j in zip(costs, preset, strict=True)]),
        "slope_up": _relative_to_mean(slopes[:, 0]),
        "slope_down": _relative_to_mean(slopes[:, 1]),
        **{f"error_at_{point}": curves[:, point] for point in range(CURVE_POINTS)},
    }


def _task(problem: SearchProblem, of_formats: Sequence[str]) -> dict[str, np.ndarray]:
    count = len(problem.sites)
    operations = [
        site.candidates[choice].operations for site, choice in zip(problem.sites, problem.preset, strict=True)
    ]
    formats = [
        {_FORMAT + one.format for one in of_layer if isinstance(one, Factorise)} for of_layer in operations
    ]
    errors = [site.errors[choice] for site, choice in zip(problem.sites, problem.preset, strict=True)]
    return {
        **{name: np.array([float(name in names) for names in formats]) for name in of_formats},
        "rounded": np.array(
            [float(any(isinstance(one, Quantise) for one in of_layer)) for of_layer in operations]
        ),
        **{
            f"budget_{measure}": np.full(count, fraction)
            for measure, fraction in zip(MEASURES, _fractions(problem), strict=True)
        },
        "layers": np.full(count, np.log(count) / np.log(_MOST_LAYERS)),
        "params": np.full(count, np.log(max(1, problem.params)) / np.log(_MOST_PARAMETERS)),
        "mean_error": np.full(count, np.mean(errors)),
    }


def _fractions(problem: SearchProblem) -> list[float]:
    """Return the fraction that may be kept by each measure, 1 without a limit."""
    limits = () if problem.budget is None else problem.budget.limits
    fractions = {limit.measure: limit.fraction for limit in limits}
    return [fractions.get(measure, 1.0) for measure in MEASURES]


def _slopes(site: CandidateSet, cost: np.ndarray, choice: int) -> tuple[float, float]:
    """Return the steepest slope of the loss to dearer, the flattest to cheaper candidates; 0 for none."""
    extra, gain = cost - cost[choice], site.losses[choice] - site.losses
    dearer, cheaper = extra > 0, extra < 0
    up = float((gain[dearer] / extra[dearer]).max()) if dearer.any() else 0.0
    down = float((gain[cheaper] / extra[cheaper]).min()) if cheaper.any() else 0.0
    return max(0.0, up), max(0.0, down)


def _curve(site: CandidateSet, cost: np.ndarray) -> np.ndarray:
    """Interpolate the layer's error at equal steps of log-cost, from the cheapest to the dense candidate."""
    logs = np.log(np.maximum(cost, 1e-12))
    order = np.argsort(logs, kind="stable")
    points = logs.min() + (np.arange(CURVE_POINTS) + 0.5) / CURVE_POINTS * (logs[-1] - logs.min())
    return np.interp(points, logs[order], site.errors[order])


def _place_in_block(names: list[str]) -> np.ndarray:
    """Return each layer's position among those of the same module, from 0 to 1; 0.5 for a single one."""
    blocks = [name.rpartition(".")[0] for name in names]
    sizes, seen = Counter(blocks), Counter[str]()
    places = []
    for block in blocks:
        places.append(0.5 if sizes[block] == 1 or not block else seen[block] / (sizes[block] - 1))
        seen[block] += 1
    return np.array(places)


def _relative_to_even(values: np.ndarray) -> np.ndarray:
    """Return the logarithms of shares of the sum relative to an even share, scaled to [0, 1]."""
    total = float(values.sum())
    return _unit(np.log(np.maximum(values * len(values) / max(total, 1e-300), 1e-12)))


def _relative_to_mean(values: np.ndarray) -> np.ndarray:
    """Return the logarithms of the positive values relative to their mean, scaled to [0, 1]; else 0."""
    there = values > 0
    if not there.any():
        return np.full(len(values), 0.5)
    logs = np.log(np.where(there, values, 1.0))
    return np.where(there, _unit(logs - logs[there].mean()), 0.0)


def _unit(logs: np.ndarray) -> np.ndarray:
    """Clip and scale logarithms of ratios to [0, 1]; the ratio 1 becomes 0.5."""
    unit: np.ndarray = (np.asarray(logs) / _RANGE).clip(-1, 1) / 2 + 0.5
    return unit


class ObservationEncoder:
    """Encodes a layer's own numbers (patent WO2021102679), static features, the previous action, others."""

    def __init__(self, problem: SearchProblem, features: Sequence[Feature]) -> None:
        for name in features:
            if name not in get_args(Feature):
                known = ", ".join(get_args(Feature))
                raise ConfigError(f"selector.features may hold {known}; got {name!r}")
        self.features = tuple(features)
        columns = _static_features(problem, self.features)
        self.static = np.stack(list(columns.values()), axis=1)
        self.size = len(self(np.zeros(0)))
        changing = {"plan": [f"action_of_layer_{layer}" for layer in range(len(self.static))]}
        shown = (name for name in self.features if name in ("budget_left", "last_reward", "plan"))
        later = [each for name in shown for each in changing.get(name, [name])]
        self.names = (*columns, "previous_action", *later)

    def __call__(self, taken: np.ndarray, budget_left: float = 1.0, last_reward: float = 0.0) -> np.ndarray:
        """Return the observation, float32, after the actions taken; after the last one, the last layer's."""
        layers = len(self.static)
        plan = np.full(layers, 0.5)
        plan[: len(taken)] = (taken + 1) / 2
        changing = {
            "budget_left": [budget_left],
            "last_reward": [min(1.0, max(0.0, last_reward))],
            "plan": plan,
        }
        static = self.static[min(len(taken), layers - 1)]
        previous = plan[[len(taken) - 1]] if len(taken) else [0.5]
        shown = (changing[name] for name in self.features if name in changing)
        return np.concatenate([static, previous, *shown]).astype(np.float32)


def _static_features(problem: SearchProblem, features: Sequence[Feature]) -> dict[str, np.ndarray]:
    """Return the features that no action changes, each (layers,), by name."""
    specs = [site.spec for site in problem.sites]
    count = len(specs)
    kernels = np.array([_two(spec.kernel_size) for spec in specs], dtype=float)
    strides = np.array([_two(spec.stride) for spec in specs], dtype=float)
    columns = {
        "index": np.arange(count) / max(1, count - 1),
        "out_channels": _log_share([spec.out_channels for spec in specs]),
        "in_channels": _log_share([spec.in_channels for spec in specs]),
        **dict(zip(("kernel_height", "kernel_width"), (kernels / kernels.max(0)).T, strict=True)),
        **dict(zip(("stride_height", "stride_width"), (strides / strides.max(0)).T, strict=True)),
        "params": _log_share([spec.params for spec in specs]),
    }
    if "macs" in features:
        columns["macs"] = _log_share([spec.macs for spec in specs])
    if "curve" in features:
        curves = np.array([_resampled(site) for site in problem.sites]).T
        columns |= {f"curve_{point}": errors for point, errors in enumerate(curves)}
    if "descriptors" in features:
        described = zip(descriptor_names(), layer_descriptors(problem).T, strict=True)
        columns |= {f"descriptor_{name}": column for name, column in described}
    if "identity" in features:
        columns |= {f"is_layer_{layer}": column for layer, column in enumerate(np.eye(count))}
    if "budget" in features:
        fractions = zip(MEASURES, _fractions(problem), strict=True)
        columns |= {f"budget_{measure}": np.full(count, fraction) for measure, fraction in fractions}
    return columns


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
