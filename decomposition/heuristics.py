"""One-shot rank heuristics: simple rules that spend a budget over all layers without a search.

`uniform`, `energy` and `vbmf` raise one common level over all layers: every candidate of every layer has a
level from which it is taken, and the levels are climbed in order until the next step breaks the budget.
What remains unspent is less than one such step. `greedy` minimises the sum of the errors instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from decomposition.allocation import Budget, allocate
from decomposition.cost import count_macs, count_parameters
from decomposition.curves import RankCurve, plan_from_choices
from decomposition.errors import DecompositionError
from decomposition.fitting import FAST, FitOptions
from decomposition.latency import LatencyTable
from decomposition.layers import inspect_layers
from decomposition.library import FitLibrary
from decomposition.moments import collect_moments
from decomposition.plan import CompressionPlan
from decomposition.sensitivity import collect_sensitivities
from decomposition.vbmf import matrix_rank

Choose = Callable[[FitLibrary, Sequence[RankCurve], Budget], np.ndarray]


@dataclass(frozen=True)
class Heuristic:
    """A registered rule that chooses ranks.

    Attributes:
        name: Name in the registry, in plans and on the command line.
        description: One line for listings.
        choose: `choose(library, curves, budget)` returns the index of a candidate for every curve and raises
            `DecompositionError` if no plan can reach the budget.
    """

    name: str
    description: str
    choose: Choose


_HEURISTICS: dict[str, Heuristic] = {}


def register_heuristic(name: str, description: str) -> Callable[[Choose], Choose]:
    """Function decorator: add a heuristic to the registry.

    Raises:
        DecompositionError: If the name is taken.
    """

    def register(choose: Choose) -> Choose:
        if name in _HEURISTICS:
            raise DecompositionError(f"heuristic {name!r} is registered already; choose another name")
        _HEURISTICS[name] = Heuristic(name, description, choose)
        return choose

    return register


def list_heuristics() -> list[str]:
    """Return the names of all registered heuristics."""
    return sorted(_HEURISTICS)


def get_heuristic(name: str) -> Heuristic:
    """Return the heuristic called `name`.

    Raises:
        DecompositionError: If there is none of that name.
    """
    if name not in _HEURISTICS:
        raise DecompositionError(f"unknown heuristic {name!r}; choose from {', '.join(list_heuristics())}")
    return _HEURISTICS[name]


@register_heuristic("uniform", "the same kept share in every layer")
def uniform(library: FitLibrary, curves: Sequence[RankCurve], budget: Budget) -> np.ndarray:
    """Keep the same share of every layer's own cost, the largest that meets the budget.

    Equal ranks, or equal fractions of the largest rank, would starve a ring's small layers: a ring's
    parameters grow with the square of its rank.

    Args:
        library: The fits that the curves come from.
        curves: One curve a layer.
        budget: The budget; it always holds for the result.

    Returns:
        Index of the chosen candidate of every curve, shape (layers,).

    Raises:
        DecompositionError: If no plan can reach the budget.
    """
    costs = [curve.cost(budget.measure).astype(float) for curve in curves]
    return _climb(curves, budget, [cost / cost[-1] for cost in costs])


@register_heuristic("energy", "the same share of output energy in every layer")
def energy(library: FitLibrary, curves: Sequence[RankCurve], budget: Budget) -> np.ndarray:
    """Give every layer the smallest rank that retains a common share of its energy, the largest that fits.

    The share that a candidate retains is 1 - error^2 of its fit: the classical spectral energy where the fit
    is a truncated SVD, and that of the layer's real outputs where the library knows the data.

    Args:
        library: The fits that the curves come from.
        curves: One curve a layer.
        budget: The budget; it always holds for the result.

    Returns:
        Index of the chosen candidate of every curve, shape (layers,).

    Raises:
        DecompositionError: If no plan can reach the budget.
    """
    # A candidate is needed from the share on that the one before it cannot retain.
    levels = [np.array([0.0, *np.maximum.accumulate(1 - curve.errors[:-1] ** 2)]) for curve in curves]
    return _climb(curves, budget, levels)


@register_heuristic("vbmf", "ranks in proportion to what variational Bayes finds above the noise")
def vbmf(library: FitLibrary, curves: Sequence[RankCurve], budget: Budget) -> np.ndarray:
    """Give every layer the same multiple of its analytic VBMF rank, the largest that meets the budget.

    A layer's VBMF rank is the larger one of its weight's output and input unfoldings (as Kim et al., ICLR
    2016, choose Tucker ranks), at least 1. A candidate's rank is the number of features between the two
    halves of the format, which bounds the rank of the output unfolding; in a ring it is a product of bonds.

    Args:
        library: The fits that the curves come from.
        curves: One curve a layer.
        budget: The budget; it always holds for the result.

    Returns:
        Index of the chosen candidate of every curve, shape (layers,).

    Raises:
        DecompositionError: If no plan can reach the budget.
    """
    levels = []
    for curve in curves:
        weight = library.weights[curve.spec.name]
        unfoldings = (weight.flatten(1), weight.movedim(1, 0).flatten(1))
        signal = max(1, *(matrix_rank(unfolding).rank for unfolding in unfoldings))
        features = [_features(library, curve.spec.name, entry.ranks) for entry in curve.entries[:-1]]
        full = max([min(weight.shape[0], weight[0].numel()), *features])
        # Where bonds have ranks of their own, a larger layer need not have more features.
        levels.append(np.maximum.accumulate([*features, full]) / signal)
    return _climb(curves, budget, levels)


@register_heuristic("greedy", "the least loss at the network's output (Lagrangian allocation)")
def greedy(library: FitLibrary, curves: Sequence[RankCurve], budget: Budget) -> np.ndarray:
    """Minimise the sum of what the layers' errors cost the network's output within the budget (`allocate`).

    Args:
        library: The fits that the curves come from.
        curves: One curve a layer.
        budget: The budget; it always holds for the result.

    Returns:
        Index of the chosen candidate of every curve, shape (layers,).

    Raises:
        DecompositionError: If no plan can reach the budget.
    """
    return allocate(curves, budget)


def plan_by_heuristic(
    model: nn.Module,
    input_shape: Sequence[int],
    tensor_format: str,
    heuristic: str,
    fraction: float,
    *,
    measure: str = "params",
    latency: Callable[[Sequence[RankCurve]], LatencyTable] | None = None,
    calibration: torch.Tensor | Iterable[torch.Tensor] | None = None,
    weigh_outputs: bool = True,
    tensorised: bool = False,
    candidates: int = 16,
    multiple: int = 1,
    options: FitOptions = FAST,
    folder: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> CompressionPlan:
    """Choose ranks for a whole model under a budget: calibrate, fit all candidates, apply the heuristic.

    Args:
        model: The dense model; left as it was.
        input_shape: Shape of one input without the batch axis, for example `(3, 32, 32)`.
        tensor_format: Name of the format (`list_formats`).
        heuristic: Name of the heuristic (`list_heuristics`).
        fraction: Fraction of the whole model's cost to keep, in (0, 1].
        measure: What is kept: `params`, `macs` or `latency`.
        latency: For `measure="latency"`: measures all candidates of the curves, as they will be run.
        calibration: A few hundred real, preprocessed model inputs, as one tensor or as batches; `None` fits
            to the weights alone.
        weigh_outputs: With calibration: weigh channels and layers by what the network's output makes of them.
        tensorised: Split channel counts into small factors (tensor ring and tensor train).
        candidates: Ranks to fit a layer at most.
        multiple: They are multiples of it; 8 suits budgets in time.
        options: How much work each fit may do.
        folder: Where fits are cached for the next call; `None` keeps them in memory.
        progress: Called with each layer's name when its fits are done.

    Returns:
        The plan, for `apply_plan`.

    Raises:
        DecompositionError: If a name is unknown, the calibration set cannot be used, the model has no layer
            to decompose, or no plan can reach the budget.
    """
    chosen = get_heuristic(heuristic)
    all_specs = inspect_layers(model, input_shape)
    specs = [spec for spec in all_specs if spec.refusal is None]
    if not specs:
        reasons = "; ".join(f"{spec.name}: {spec.refusal}" for spec in all_specs[:5])
        raise DecompositionError(
            f"the model has no layer that can be decomposed ({reasons or 'no convolution or linear layer'})"
        )
    if measure not in ("params", "macs", "latency"):
        raise DecompositionError(f"unknown measure {measure!r}; choose from params, macs, latency")
    if (measure == "latency") != (latency is not None):
        raise DecompositionError(
            f"measure={measure!r} {'needs' if measure == 'latency' else 'cannot use'} latency=, the function "
            "that measures the candidates; give it with measure='latency' only"
        )
    moments, sensitivities = None, None
    if calibration is not None:
        batches = [calibration] if isinstance(calibration, torch.Tensor) else list(calibration)
        moments = collect_moments(model, specs, batches)
        sensitivities = collect_sensitivities(model, specs, batches) if weigh_outputs else None
    library = FitLibrary(
        model,
        specs,
        tensor_format,
        moments=moments,
        sensitivities=sensitivities,
        tensorised=tensorised,
        multiple=multiple,
        options=options,
        folder=folder,
    )
    curves = library.curves(limit=candidates, progress=progress)
    if latency is not None:
        table = latency(curves)
        curves = table.attach(curves)
        budget = Budget(fraction, measure, table.total, table.rest)
    else:
        total = count_parameters(model) if measure == "params" else count_macs(model, input_shape)
        covered = sum(spec.params if measure == "params" else spec.macs for spec in specs)
        budget = Budget(fraction, measure, total, total - covered)
    choices = chosen.choose(library, curves, budget)
    return plan_from_choices(curves, choices, all_specs, input_shape, heuristic)


def _features(library: FitLibrary, name: str, ranks: tuple[int, ...]) -> float:
    """Count the features between a layer's two halves; the mean rank where each bond has its own."""
    modes = library.modes[name]
    if library.format.own_ranks:
        return sum(ranks) / len(ranks)
    cores = [torch.empty(shape) for shape in library.format.core_shapes(modes, ranks)]
    return library.format.halves(cores, modes)[0].shape[1]


def _climb(curves: Sequence[RankCurve], budget: Budget, levels: Sequence[np.ndarray]) -> np.ndarray:
    """Raise a common level from the cheapest candidates until the next step would break the budget.

    Args:
        curves: One curve a layer.
        budget: The budget.
        levels: For each curve the level from which each candidate is taken, ascending.

    Returns:
        Index of the chosen candidate of every curve, shape (layers,).
    """
    budget.check(curves)
    costs = [curve.cost(budget.measure) for curve in curves]
    # Only candidates that are cheaper than all larger ones: MACs and latency can exceed the dense layer's.
    useful = [
        [j for j in range(len(cost)) if j == len(cost) - 1 or cost[j] < cost[j + 1 :].min()] for cost in costs
    ]
    choices = np.array([candidates[0] for candidates in useful])
    left = budget.available - sum(float(cost[j]) for cost, j in zip(costs, choices, strict=True))
    steps = sorted(
        (float(levels[layer][candidate]), layer, candidate)
        for layer, candidates in enumerate(useful)
        for candidate in candidates[1:]
    )
    for _, layer, candidate in steps:
        extra = float(costs[layer][candidate] - costs[layer][choices[layer]])
        if extra > left:
            break
        left -= extra
        choices[layer] = candidate
    return choices
