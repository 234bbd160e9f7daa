"""Fitting the cores of a format to a weight, in the metric of the layer's real inputs.

The output of a layer with weight W on patches x differs from that of an approximation V by
E|(W - V) x|^2 = tr((W - V) S (W - V)'), S = E[x x']; where the network's sensitivity G to the layer's output
is known, errors count by what they change there: tr(G (W - V) S (W - V)'). Every format is V = A Q, and where
A is free (plain modes) it is eliminated in closed form and L-BFGS minimises over the remaining cores,
starting from the format's algebraic solution (`decomposition.fit`). Without a kernel all formats
are products of two matrices, and one decomposition gives the solutions of all ranks
(`decomposition.fit.low_rank`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from decomposition.calibration.metric import Metric, converted, is_finite, times
from decomposition.errors import DecompositionError
from decomposition.fit.fit_options import FAST, FitOptions
from decomposition.fit.least_squares import LeastSquares, Stop
from decomposition.fit.low_rank import LowRank
from decomposition.fit.search import LARGEST_AMPLIFICATION, best_cores, bounded_cores
from decomposition.formats import Cores, Ranks, TensorFormat
from decomposition.network.modes import WeightModes
from decomposition.public_calls import public_call

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
    """The best products of two matrices of every rank, computed when they are asked for."""

    def __init__(self, weight: torch.Tensor, metric: Metric | None, sensitivity: torch.Tensor | None) -> None:
        self._weight, self._metric, self._sensitivity = weight, metric, sensitivity

    @cached_property
    def vanish(self) -> bool:
        """Whether the weight or its outputs are zero."""
        rows = self._weight
        if self._metric is None or not bool(rows.any()):
            return not bool(rows.any())
        # One mixture of all rows has no energy only where none has any.
        mixture = torch.randn(1, len(rows), generator=torch.Generator().manual_seed(0)).double() @ rows
        return not float((times(mixture, self._metric) * mixture).sum()) > 0

    @cached_property
    def _solutions(self) -> tuple[LowRank, torch.Tensor]:
        """All ranks' solutions, and how their terms add up."""
        solutions = LowRank(self._weight, self._metric, self._sensitivity)
        return solutions, solutions.terms(self._metric)

    @cached_property
    def _bounded_solutions(self) -> list[tuple[LowRank, torch.Tensor]]:
        """The same, of the weight itself, and of the problem in which all output channels count alike."""
        metrics = [None] if self._metric is None else [None, self._metric]
        solutions = [LowRank(self._weight, metric, None) for metric in metrics]
        return [(solution, solution.terms(self._metric)) for solution in solutions]

    def of_rank(self, rank: int) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Return A (out, rank), Q (rank, in * kernel) and the relative error."""
        best, terms = self._solutions
        solution, squared = best, 0.0
        if _at(terms, rank) <= LARGEST_AMPLIFICATION:
            squared = best.squared_error(rank)
        else:  # what a sensitivity does not see may grow as it likes
            others = self._bounded_solutions
            bounded = [other for other, sizes in others if _at(sizes, rank) <= LARGEST_AMPLIFICATION]
            # Of the weight itself the solution has terms that are no larger than the weight.
            solution = min(
                bounded, key=lambda other: other.squared_error_in(rank, best), default=others[0][0]
            )
            squared = solution.squared_error_in(rank, best)
        return *solution.halves(rank), max(0.0, squared) ** 0.5


class Fitter:
    """Fits of one weight in one format, which compute once what all ranks have in common.

    Shapes: metric (D, D).
    """

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
        if not bool(torch.isfinite(weight).all()):
            raise DecompositionError("the weight holds NaN or infinite values; repair the checkpoint first")
        if metric is not None and not is_finite(metric):
            raise DecompositionError(
                "the input moments hold NaN or infinite values; check the calibration set"
            )
        if sensitivity is not None and not bool(torch.isfinite(sensitivity).all()):
            raise DecompositionError(
                "the sensitivity holds NaN or infinite values; check the calibration set"
            )
        self.tensor_format, self.modes = tensor_format, modes
        self._weight = weight.double()
        self._metric = None if metric is None else converted(metric, torch.float64)
        self._sensitivity = sensitivity
        # Without a kernel every format is a product of two matrices.
        self._direct = modes.plain and (modes.kernel == 1 or tensor_format.any_matrices)
        self._matrices: _TwoMatrices = (
            like._matrices
            if like is not None and like._direct and self._direct
            else _TwoMatrices(self._weight.flatten(1), self._metric, sensitivity)
        )

    def fit(
        self, ranks: Ranks, options: FitOptions = FAST, start: Sequence[torch.Tensor] | None = None
    ) -> Fit:
        """Fit the format at some ranks."""
        with _few_threads(self.modes.columns):
            if self._vanishes:
                cores, error = self._unseen(ranks, options), 0.0
            else:
                cores, error = self._low_rank(ranks) if self._direct else self._search(ranks, options, start)
                cores = self.tensor_format.balanced(cores)
        return Fit(cores, error, self.tensor_format, self.modes, ranks)

    @property
    def _vanishes(self) -> bool:
        return self._matrices.vanish if self._direct else self._problem.vanishes

    def _unseen(self, ranks: Ranks, options: FitOptions) -> Cores:
        """Return cores where the data tell no weights apart: one input, say, or none that is not zero.

        All of them have the same error, and those nearest the weight are right on other data too.
        """
        if not bool(self._weight.any()):
            shapes = self.tensor_format.core_shapes(self.modes, ranks)
            return [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
        return Fitter(self.tensor_format, self._weight, self.modes).fit(ranks, options).cores

    @cached_property
    def _problem(self) -> LeastSquares:
        return LeastSquares(self.tensor_format, self._weight, self.modes, self._metric, self._sensitivity)

    def _low_rank(self, ranks: Ranks) -> tuple[Cores, float]:
        first, *_ = self.tensor_format.core_shapes(self.modes, ranks)
        rank = math.prod(first) // self.modes.out_channels  # A's columns, which is free
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
    """Return the entry of a rank; those beyond the smaller side add nothing."""
    return float(terms[min(rank, len(terms)) - 1])


@contextmanager
def _few_threads(columns: int) -> Iterator[None]:
    """Compute in one thread where matrices are too small to gain from more.

    Threads that wait for one another at every small product cost more than they bring, many times over when
    the machine is busy with something else.
    """
    threads = torch.get_num_threads()
    if columns > _COLUMNS_WORTH_THREADS:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
