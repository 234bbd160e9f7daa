"""Fit cores to a weight in the metric of its inputs and outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any

import torch

from decomposition.calibration.metric import (
    Metric,
    converted,
    floored,
    is_finite,
    powers,
    products,
    triangular_root,
    whole,
)
from decomposition.errors import DecompositionError
from decomposition.fit.fit_options import FAST, FitOptions
from decomposition.fit.least_squares import LEAST_PENALTY, LeastSquares, Stop
from decomposition.formats import Cores, Ranks, TensorFormat
from decomposition.network.geometry import WeightModes
from decomposition.public_calls import public_call

# Terms that are larger than this, relative to their sum, cancel and lose too many digits in float32.
LARGEST_AMPLIFICATION = 30.0
_FIRST_BOUNDING_PENALTY = 1e-10
_LAST_BOUNDING_PENALTY = 1e-2
# Share of the start's squared error that a minimisation leaves, for CP: 0.4 to 0.8 over the layers of three
# networks.
_LEFT_AT_THE_END = 0.5
# If less than this share is left, the penalty was too large in proportion, and is lowered.
_MUCH_CLOSER = 0.1


def best_cores(problem: LeastSquares, ranks: Ranks, options: FitOptions) -> Cores:
    """Minimise from all starts and return the best cores; if terms cancel, penalise their size."""
    iterations = options.iterations
    stop = Stop(options.tolerance, options.patience, options.enough**2)
    starts = _starting_points(problem, ranks, options)
    if problem.format.cancels and options.stability > 0:
        starts[0] = problem.minimise(starts[0], 0, stop)
        best = _steady(problem, starts, options, stop)
    else:
        best = _race(problem, starts, iterations, stop, LEAST_PENALTY)
    penalty = _FIRST_BOUNDING_PENALTY
    while problem.amplification(best) > LARGEST_AMPLIFICATION and penalty < _LAST_BOUNDING_PENALTY:
        candidates = [problem.minimise(cores, iterations, stop, penalty) for cores in starts]
        best = min(candidates, key=problem.squared_error)
        penalty *= 100
    return best


def _race(
    problem: LeastSquares, starts: Sequence[Cores], iterations: int, stop: Stop, penalty: float
) -> Cores:
    """Minimise from all starts; of several, continue only the best quarter (at least two) of short runs."""
    if len(starts) > 1:
        count = max(2, len(starts) // 4)
        starts = _ends(problem, starts, min(iterations, 30), stop, penalty)[:count]
    return _ends(problem, starts, iterations, stop, penalty)[0]


def _ends(
    problem: LeastSquares, starts: Sequence[Cores], iterations: int, stop: Stop, penalty: float
) -> list[Cores]:
    """Minimise from the starts until one reaches the wanted error; return the results, best first."""
    if len(starts) == 1:  # for a large weight, computing the error takes as long as a step
        return [problem.minimise(starts[0], iterations, stop, penalty)]
    ends: list[tuple[float, Cores]] = []
    for start in starts:
        end = problem.minimise(start, iterations, stop, penalty)
        ends.append((float(problem.squared_error(end)), end))
        if stop.reached(ends[-1][0]):
            break
    return [end for _, end in sorted(ends, key=itemgetter(0))]


def _steady(problem: LeastSquares, starts: Sequence[Cores], options: FitOptions, stop: Stop) -> Cores:
    """Minimise error plus size of terms, in proportion to the error so that close fits stay close."""
    (best, *_), squared = starts, float(problem.squared_error(starts[0]))
    while squared > max(stop.squared_error, LEAST_PENALTY):
        before = squared
        penalty = max(options.stability * _LEFT_AT_THE_END * before, LEAST_PENALTY)
        # The penalty slows convergence.
        best = _race(problem, starts, options.iterations * 3 // 2, stop, penalty)
        starts, squared = [best], float(problem.squared_error(best))
        if squared > _MUCH_CLOSER * before:
            break
    return best


def bounded_cores(problem: LeastSquares, ranks: Ranks, options: FitOptions) -> Cores:
    """Return the better bounded solution of two: algebraic, or fitted with equal output channels."""
    plain = problem.algebraic(ranks)
    solutions = [plain]
    if problem.root is not None:  # directions without sensitivity are unbounded
        cores = best_cores(problem.even, ranks, options)
        solutions.append(problem.rescale(problem.even.unscale(cores)))
    bounded = [cores for cores in solutions if problem.amplification(cores) <= LARGEST_AMPLIFICATION]
    # The algebraic solution is bounded: its terms are no larger than the weight.
    return min(bounded, key=problem.squared_error, default=plain)


def _spread(core: torch.Tensor) -> torch.Tensor:
    """Return the standard deviation of a core's entries; the size of a single one, such as Tucker's 1 x 1."""
    return core.std() if core.numel() > 1 else core.abs().squeeze()


def _starting_points(problem: LeastSquares, ranks: Ranks, options: FitOptions) -> list[Cores]:
    algebraic = problem.start(ranks)
    generator = torch.Generator().manual_seed(options.seed)
    # A zero core has a zero gradient: ranks beyond the weight's own start small instead of dead.
    noise = 1e-3 if any(bool((core.flatten(1) == 0).any()) for core in algebraic) else 0.0
    starts = [
        [
            core + noise * _spread(core) * torch.randn(core.shape, generator=generator, dtype=core.dtype)
            for core in algebraic
        ]
        if noise
        else algebraic
    ]
    shapes = [core.shape for core in algebraic]
    for _ in range(options.starts - 1):
        cores = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        size = problem.format.reconstruct(cores, problem.modes).norm()
        starts.append([core * float(size) ** (-1 / len(cores)) for core in cores])
    return starts


_EPSILON = torch.finfo(torch.float64).eps
# Below this share rounding spoils a sum of eigenvalues, so the error is computed from the residual.
_ROUNDING = 1e-9


class LowRank:
    """Best approximations A Q, of every rank, of a weight (out, D) in a metric (D, D) and a sensitivity."""

    def __init__(self, weight: torch.Tensor, metric: Metric | None, sensitivity: torch.Tensor | None) -> None:
        self._weight, self._metric = weight, metric
        self._sensitivity = None
        if sensitivity is not None:
            raised = floored(sensitivity)
            self._sensitivity = raised / raised.diagonal().mean()
        solve = _by_outputs if weight.shape[0] <= weight.shape[1] else _by_inputs
        self._energies, self._output, self._features = solve(weight, metric, self._sensitivity)

    def halves(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A (out, rank) and Q (rank, D); zeros beyond the smaller side."""
        output, features = self._output[:, :rank], self._features[:rank]
        missing = rank - len(features)
        if missing > 0:
            output = torch.cat([output, output.new_zeros(len(output), missing)], dim=1)
            features = torch.cat([features, features.new_zeros(missing, features.shape[1])])
        return output, features

    def squared_error(self, rank: int) -> float:
        squared = float(self._energies[rank:].sum() / self._energies.sum())
        if squared >= _ROUNDING:
            return squared
        output, features = self.halves(rank)
        rest = self._weight - output @ features
        return self._energy(rest) / self._energy(self._weight)

    def terms(self, metric: Metric | None) -> torch.Tensor:
        """Return the norms of the first 1, 2, ... terms A[:, p] Q[p, :], relative to the weight's."""
        sizes = self._output.square().sum(0)
        plain = (sizes * self._features.square().sum(1)).cumsum(0) / self._weight.square().sum()
        if metric is None:
            return plain.sqrt()
        outputs, energy = powers(self._features, metric).clamp_min(0), powers(self._weight, metric).sum()
        return torch.maximum(plain, (sizes * outputs).cumsum(0) / energy).sqrt()

    def squared_error_in(self, rank: int, other: LowRank) -> float:
        """Return the squared relative error of a rank in the metric of another problem of the same weight."""
        output, features = self.halves(rank)
        return other._energy(self._weight - output @ features) / other._energy(self._weight)

    def _energy(self, rows: torch.Tensor) -> float:
        if self._sensitivity is None:
            return float(powers(rows, self._metric).sum())
        return float((self._sensitivity * products(rows, self._metric)).sum())


_Solution = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Energies (k,), descending, A (out, k) and Q (k, D), k the smaller side."""


def _by_outputs(weight: torch.Tensor, metric: Metric | None, sensitivity: torch.Tensor | None) -> _Solution:
    """Decompose R W S W' R' (out, out): A = R^-1 U and Q = U' R W with its eigenvectors U."""
    root = None if sensitivity is None else triangular_root(sensitivity)
    seen = weight if root is None else root @ weight
    energies, vectors = _descending(products(seen, metric))
    output = vectors if root is None else torch.linalg.solve_triangular(root, vectors, upper=True)
    return energies, output, vectors.T @ seen


def _by_inputs(weight: torch.Tensor, metric: Metric | None, sensitivity: torch.Tensor | None) -> _Solution:
    """Decompose C' W' G W C (D, D): of its eigenpairs (e, v), A = W C v / e^1/2, Q = v' C' W' G W / e^1/2."""
    gram = weight.T @ (weight if sensitivity is None else sensitivity @ weight)
    if metric is None:
        energies, vectors = _descending(gram)
    else:
        moments = whole(metric)
        factor, failed = torch.linalg.cholesky_ex((moments + moments.T) / 2)
        if failed.item():  # only directions without energy
            values, axes = _descending(moments)
            factor = axes * values.sqrt()
        energies, vectors = _descending(factor.T @ gram @ factor)
        vectors = factor @ vectors
    # The clamp avoids a division by zero where there is no energy: both halves vanish there anyway.
    vectors = vectors / energies.clamp_min(_EPSILON * energies[0]).sqrt()
    return energies, weight @ vectors, vectors.T @ gram


def _descending(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the eigenpairs of a positive semidefinite matrix, descending, eigenvalues clamped to 0."""
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    return values.clamp_min(0).flip(0), vectors.flip(1)


# Below this width threads wait for one another longer than they compute.
_COLUMNS_WORTH_THREADS = 1024


@dataclass(frozen=True)
class Fit:
    """A fitted layer.

    Attributes:
        cores: The format's cores, float64.
        error: Relative output error sqrt(E|(W - V) x|^2 / E|W x|^2), |y|^2 = y' G y where a sensitivity G is
            given; without data |W - V| / |W|.
        tensor_format: The cores' format.
        modes: How the weight is read as a tensor.
        ranks: One rank a bond.
    """

    cores: Cores
    error: float
    tensor_format: TensorFormat
    modes: WeightModes
    ranks: Ranks

    def to_tensorly(self) -> Any:
        """Return the cores as a CPTensor, TuckerTensor, TTTensor or TRTensor of shape `modes.sizes`.

        The arrays are copies in tensorly's present backend.

        Raises:
            DecompositionError: If tensorly has no object for the format.
        """
        return self.tensor_format.to_tensorly(self.cores, self.modes)


class _TwoMatrices:
    """Best products of two matrices of every rank, computed lazily."""

    def __init__(self, weight: torch.Tensor, metric: Metric | None, sensitivity: torch.Tensor | None) -> None:
        self._weight, self._metric, self._sensitivity = weight, metric, sensitivity

    @cached_property
    def vanish(self) -> bool:
        """Whether the weight or its outputs are zero."""
        rows = self._weight
        if self._metric is None or not bool(rows.any()):
            return not bool(rows.any())
        # A random mixture of all rows has no energy only if no row has any.
        mixture = torch.randn(1, len(rows), generator=torch.Generator().manual_seed(0)).double() @ rows
        return not float(powers(mixture, self._metric)) > 0

    @cached_property
    def _solutions(self) -> tuple[LowRank, torch.Tensor]:
        """Solutions of all ranks, and the norms of their terms."""
        solutions = LowRank(self._weight, self._metric, self._sensitivity)
        return solutions, solutions.terms(self._metric)

    @cached_property
    def _bounded_solutions(self) -> list[tuple[LowRank, torch.Tensor]]:
        """Solutions for the weight alone, and in the metric without sensitivity; their terms grow less."""
        metrics = [None] if self._metric is None else [None, self._metric]
        solutions = [LowRank(self._weight, metric, None) for metric in metrics]
        return [(solution, solution.terms(self._metric)) for solution in solutions]

    def of_rank(self, rank: int) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Return A (out, rank), Q (rank, in * kernel) and the relative error."""
        best, terms = self._solutions
        solution, squared = best, 0.0
        if _at(terms, rank) <= LARGEST_AMPLIFICATION:
            squared = best.squared_error(rank)
        else:  # directions without sensitivity are unbounded
            others = self._bounded_solutions
            bounded = [other for other, sizes in others if _at(sizes, rank) <= LARGEST_AMPLIFICATION]
            # Without a metric the terms are no larger than the weight.
            solution = min(
                bounded, key=lambda other: other.squared_error_in(rank, best), default=others[0][0]
            )
            squared = solution.squared_error_in(rank, best)
        return *solution.halves(rank), max(0.0, squared) ** 0.5


class Fitter:
    """Fits of one weight in one format at any ranks, which share one decomposition."""

    def __init__(
        self,
        tensor_format: TensorFormat,
        weight: torch.Tensor,
        modes: WeightModes,
        metric: Metric | None = None,
        sensitivity: torch.Tensor | None = None,
        *,
        like: Fitter | None = None,
    ) -> None:
        if not is_finite(weight):
            raise DecompositionError("the weight holds NaN or infinite values; repair the checkpoint first")
        for what, matrix in (("input moments hold", metric), ("sensitivity holds", sensitivity)):
            if matrix is not None and not is_finite(matrix):
                raise DecompositionError(f"the {what} NaN or infinite values; check the calibration set")
        self.tensor_format, self.modes = tensor_format, modes
        self._weight = weight.double()
        self._metric = None if metric is None else converted(metric, torch.float64)
        self._sensitivity = sensitivity
        self._direct = tensor_format.two_matrices(modes)
        self._matrices: _TwoMatrices = (
            like._matrices
            if like is not None and like._direct and self._direct
            else _TwoMatrices(self._weight.flatten(1), self._metric, sensitivity)
        )

    def fit(
        self, ranks: Ranks, options: FitOptions = FAST, start: Sequence[torch.Tensor] | None = None
    ) -> Fit:
        with _few_threads(self.modes.columns):
            if self._matrices.vanish if self._direct else self._problem.vanishes:
                cores, error = self._unseen(ranks, options), 0.0
            else:
                cores, error = self._low_rank(ranks) if self._direct else self._search(ranks, options, start)
                cores = self.tensor_format.balanced(cores)
        return Fit(cores, error, self.tensor_format, self.modes, ranks)

    def _unseen(self, ranks: Ranks, options: FitOptions) -> Cores:
        """Return the cores nearest to a weight whose outputs all vanish on the data, where all err alike."""
        if not bool(self._weight.any()):
            shapes = self.tensor_format.core_shapes(self.modes, ranks)
            return [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
        return Fitter(self.tensor_format, self._weight, self.modes).fit(ranks, options).cores

    @cached_property
    def _problem(self) -> LeastSquares:
        return LeastSquares(self.tensor_format, self._weight, self.modes, self._metric, self._sensitivity)

    def _low_rank(self, ranks: Ranks) -> tuple[Cores, float]:
        first, *_ = self.tensor_format.core_shapes(self.modes, ranks)
        rank = math.prod(first) // self.modes.out_channels  # the columns of A, the free factor
        output, features, error = self._matrices.of_rank(rank)
        return self.tensor_format.from_halves(output, features, self.modes, ranks), error

    def _search(
        self, ranks: Ranks, options: FitOptions, start: Sequence[torch.Tensor] | None
    ) -> tuple[Cores, float]:
        problem = self._problem
        if start is None:
            best = best_cores(problem, ranks, options)
        else:
            stop = Stop(options.tolerance, options.patience, options.enough**2)
            best = problem.minimise(problem.rescale(list(start)), options.iterations, stop)
        if problem.amplification(best) > LARGEST_AMPLIFICATION:
            best = bounded_cores(problem, ranks, options)
        return problem.unscale(best), max(0.0, float(problem.squared_error(best))) ** 0.5


@public_call()
def fit_weight(
    tensor_format: TensorFormat,
    weight: torch.Tensor,
    modes: WeightModes,
    ranks: Ranks,
    metric: Metric | None = None,
    options: FitOptions = FAST,
    *,
    sensitivity: torch.Tensor | None = None,
    start: Sequence[torch.Tensor] | None = None,
) -> Fit:
    """Fit a format to a weight at some ranks; for several ranks of one weight take a `Fitter`.

    Args:
        tensor_format: The format.
        weight: Weight (out, in, kernel).
        modes: How the weight is read as a tensor.
        ranks: One rank a bond, validated.
        metric: As for `Fitter`.
        options: How much work to do.
        sensitivity: As for `Fitter`.
        start: As for `Fitter.fit`.

    Returns:
        What `Fitter.fit` returns.

    Raises:
        DecompositionError: If the weight, the metric or the sensitivity is not finite.
    """
    return Fitter(tensor_format, weight, modes, metric, sensitivity).fit(ranks, options, start)


def _at(terms: torch.Tensor, rank: int) -> float:
    """Return the entry of a rank, capped at the smaller side of the matrix."""
    return float(terms[min(rank, len(terms)) - 1])


@contextmanager
def _few_threads(columns: int) -> Iterator[None]:
    """Compute in one thread where matrices are too small to gain from more, which wait for one another."""
    threads = torch.get_num_threads()
    if columns > _COLUMNS_WORTH_THREADS:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
