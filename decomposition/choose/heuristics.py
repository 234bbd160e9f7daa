"""Choose ranks in one shot by a heuristic: uniform, energy, VBMF or greedy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from decomposition.calibration.calibration_set import CalibrationInputs
from decomposition.choose.allocation import allocate, cheapest_choices, check_reachable
from decomposition.choose.budget import Budget, LatencyTable
from decomposition.choose.candidates import MEASURES, Candidate, CandidateSet, plan_from_choices
from decomposition.choose.library import FitLibrary
from decomposition.errors import DecompositionError
from decomposition.network.inputs import ExampleInputs
from decomposition.network.layers import LayerSpec, inspect_layers
from decomposition.network.surgery import unwrapped
from decomposition.operations import Factorise
from decomposition.plan.plan import CompressionPlan
from decomposition.progress import Progress, progress_bar
from decomposition.public_calls import public_call
from decomposition.registry import Registry
from decomposition.rewrites import rewrites_of

# Points of the logarithmic grid, dense enough to bracket each local minimum of the free energy.
_GRID = 200


@dataclass(frozen=True)
class MatrixRank:
    """Rank and noise variance of a matrix, as estimated by EVBMF.

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
    from scipy.optimize import brentq  # importing it takes a third of a second

    return float(brentq(lambda tau: phi(tau) + phi(tau / alpha), guess / 4, guess * 4))


def _noise_variance(squares: np.ndarray, long: int, alpha: float, threshold: float) -> float:
    """Minimise the free energy over the noise variance; `squares` (L,) of singular values, descending."""
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


Choose = Callable[[FitLibrary, Sequence[CandidateSet], Budget], np.ndarray]


@dataclass(frozen=True)
class Heuristic:
    """A registered rule that chooses ranks.

    Attributes:
        name: Name in the registry, in plans and on the command line.
        description: One line for listings.
        choose: `choose(library, sites, budget)` takes the fits that candidates come from, the candidates of
            every site and the budget. It returns the index of a candidate for every site, shape (sites,),
            within the budget, and raises `DecompositionError` if no plan can reach it.
    """

    name: str
    description: str
    choose: Choose


_HEURISTICS: Registry[Heuristic] = Registry("heuristic", DecompositionError)


def register_heuristic(name: str, description: str) -> Callable[[Choose], Choose]:
    """Function decorator: add a heuristic to the registry.

    Raises:
        DecompositionError: If the name is taken.
    """

    def register(choose: Choose) -> Choose:
        _HEURISTICS.add(name, Heuristic(name, description, choose), description)
        return choose

    return register


def list_heuristics() -> list[str]:
    """Return the names of all registered heuristics."""
    return _HEURISTICS.names()


def get_heuristic(name: str) -> Heuristic:
    """Return the heuristic called `name`.

    Raises:
        DecompositionError: If there is none of that name.
    """
    return _HEURISTICS[name]


@register_heuristic("uniform", "the same kept share in every layer")
def uniform(library: FitLibrary, sites: Sequence[CandidateSet], budget: Budget) -> np.ndarray:
    """Keep the same share of every layer's own cost, the largest that meets the budget."""
    costs = [site.cost(budget.measure).astype(float) for site in sites]
    return _climb(sites, budget, [cost / cost[-1] for cost in costs])


@register_heuristic("energy", "the same share of output energy in every layer")
def energy(library: FitLibrary, sites: Sequence[CandidateSet], budget: Budget) -> np.ndarray:
    """Give every layer the smallest rank that retains a common share 1 - error^2 of its energy."""
    # A candidate is needed from the first share that the candidate before it cannot retain.
    levels = [np.array([0.0, *np.maximum.accumulate(1 - site.errors[:-1] ** 2)]) for site in sites]
    return _climb(sites, budget, levels)


@register_heuristic("vbmf", "ranks in proportion to what variational Bayes finds above the noise")
def vbmf(library: FitLibrary, sites: Sequence[CandidateSet], budget: Budget) -> np.ndarray:
    """Give every layer the same multiple of its analytic VBMF rank, the largest that meets the budget."""
    levels = []
    for site in sites:
        weight = library.weights[site.spec.name]
        unfoldings = (weight.flatten(1), weight.movedim(1, 0).flatten(1))
        signal = max(1, *(matrix_rank(unfolding).rank for unfolding in unfoldings))
        features = [_features(library, site.spec, candidate) for candidate in site.candidates]
        # If each bond has its own rank, a larger layer need not have more features.
        levels.append(np.maximum.accumulate([*features[:-1], max(features)]) / signal)
    return _climb(sites, budget, levels)


@register_heuristic("greedy", "the least loss at the network's output (Lagrangian allocation)")
def greedy(library: FitLibrary, sites: Sequence[CandidateSet], budget: Budget) -> np.ndarray:
    """Minimise the sum of the layers' squared errors at the network's output within the budget."""
    return allocate(sites, budget)


@public_call()
def plan_by_heuristic(
    model: nn.Module,
    input_shape: ExampleInputs,
    tensor_format: str | Sequence[str],
    heuristic: str,
    fraction: float,
    *,
    measure: str = "params",
    latency: Callable[[Sequence[CandidateSet]], LatencyTable] | None = None,
    calibration: CalibrationInputs | None = None,
    candidates: int = 16,
    progress: Progress = None,
    workers: int | None = None,
    **library_options: Any,
) -> CompressionPlan:
    """Choose ranks for a whole model under a budget: calibrate, fit all candidates, apply the heuristic.

    Args:
        model: The dense model; left as it was.
        input_shape: Shape of one input without the batch axis, for example `(3, 32, 32)`, or a batch of
            inputs: a tensor, a tuple of tensors that the forward takes in order, or a dict of those it takes
            by name.
        tensor_format: Name of the format (`list_formats`), or names of several: every layer takes the one
            that serves it best.
        heuristic: Name of the heuristic (`list_heuristics`).
        fraction: Fraction of the whole model's cost to keep, in (0, 1].
        measure: What is kept: `params`, `macs`, `bytes` or `latency`.
        latency: For `measure="latency"`: measures all candidates of the sites, as they will be run.
        calibration: A few hundred real, preprocessed model inputs: one batch of them (a tensor, a tuple or a
            dict of tensors), or batches, such as a data loader, whose labels are left away; `None` fits to
            the weights alone.
        candidates: Ranks to fit a layer at most.
        progress: Where progress goes: `None` draws a bar on a terminal, `False` shows nothing; a function is
            called with "fit layers", the number of layers that are done and the number of all.
        workers: Processes that fit layers side by side (`FitLibrary.all_candidates`); `None` takes none.
        **library_options: Those of `FitLibrary.calibrated`: `precisions`, `skip`, `only`, `folder`, ...

    Returns:
        The plan, for `apply_plan`.

    Raises:
        DecompositionError: If a name is unknown, the calibration set cannot be used, the model has no layer
            to decompose, or no plan can reach the budget.
    """
    rule = get_heuristic(heuristic)
    if measure not in MEASURES:
        raise DecompositionError(f"unknown measure {measure!r}; choose from {', '.join(MEASURES)}")
    if (measure == "latency") != (latency is not None):
        raise DecompositionError(
            f"measure={measure!r} {'needs' if measure == 'latency' else 'cannot use'} latency=, the function "
            "that measures the candidates; give it with measure='latency' only"
        )
    library = FitLibrary.calibrated(model, input_shape, tensor_format, calibration, **library_options)
    with progress_bar("fit layers", len(library.specs), progress=progress) as bar:
        sites = library.all_candidates(limit=candidates, progress=lambda _: bar.advance(), workers=workers)
    if latency is not None:
        table = latency(sites)
        sites = table.attach(sites)
        budget = table.budget(fraction, sites)
    else:
        budget = Budget.of_model(model, sites, input_shape, measure, fraction)
    sites = [site.efficient(measure) for site in sites]
    choices = rule.choose(library, sites, budget)
    return plan_from_choices(
        sites,
        choices,
        inspect_layers(model, input_shape),
        input_shape,
        heuristic,
        preparation=rewrites_of(unwrapped(model)),
    )


def _features(library: FitLibrary, spec: LayerSpec, candidate: Candidate) -> float:
    """Count the features between a layer's halves, all if it is dense; else take the mean of its ranks."""
    if candidate.removed is not None:
        return 0
    operation = next((step for step in candidate.operations if isinstance(step, Factorise)), None)
    if operation is None:
        read = spec.in_channels if candidate.inputs is None else candidate.inputs
        return min(spec.out_channels, read * spec.kernel_elements)
    tensor_format, ranks = operation.tensor_format, operation.ranks
    modes = library.modes(spec.name, tensor_format)
    if tensor_format.own_ranks or (modes.plain and not tensor_format.free_output(modes)):
        return sum(ranks) / len(ranks)
    cores = [torch.empty(shape) for shape in tensor_format.core_shapes(modes, ranks)]
    return tensor_format.halves(cores, modes)[0].shape[1]


def _climb(sites: Sequence[CandidateSet], budget: Budget, levels: Sequence[np.ndarray]) -> np.ndarray:
    """Raise a common level from the cheapest candidates until the next step would break the budget."""
    check_reachable(sites, budget)
    costs = [site.cost(budget.measure) for site in sites]
    # Keep only candidates that are cheaper than all larger ones: MACs and latency can exceed the dense
    # layer's.
    useful = [
        [j for j in range(len(cost)) if j == len(cost) - 1 or cost[j] < cost[j + 1 :].min()] for cost in costs
    ]
    apart = budget.also is None and not budget.coupled(sites)
    choices = np.array([indices[0] for indices in useful]) if apart else cheapest_choices(sites, budget)
    left = budget.left(sites, choices)
    steps = sorted(
        (float(levels[layer][candidate]), layer, candidate)
        for layer, candidates in enumerate(useful)
        for candidate in candidates[1:]
    )
    for _, layer, candidate in steps:
        extra = budget.extra(sites, choices, layer)[:, candidate]
        if (extra > left).any():
            break
        left -= extra
        choices[layer] = candidate
    return choices
