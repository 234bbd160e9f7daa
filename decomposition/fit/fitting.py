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
from operator import itemgetter
from typing import Any

import torch

from decomposition.calibration.metric import Metric, in_float64, is_finite, times
from decomposition.errors import DecompositionError
from decomposition.fit.least_squares import LEAST_PENALTY, LeastSquares, Stop
from decomposition.fit.low_rank import LowRank
from decomposition.formats import Cores, Ranks, TensorFormat
from decomposition.network.modes import WeightModes

# Terms larger than this, relative to what they add up to, cancel one another and are lost in float32.
LARGEST_AMPLIFICATION = 30.0
_FIRST_BOUNDING_PENALTY = 1e-10
_LAST_BOUNDING_PENALTY = 1e-2
_COLUMNS_WORTH_THREADS = 1024
# The share of the start's squared error that a minimisation leaves, for CP: .4 to .8 over the layers of three
# networks.
_LEFT_AT_THE_END = 0.5
# Where less than this share is left, the size of the terms counted for too much.
_MUCH_CLOSER = 0.1


@dataclass(frozen=True)
class FitOptions:
    """How much work a fit may do.

    Attributes:
        iterations: L-BFGS iterations from the best start, 0 or more; it stops earlier when converged. With
            `stability` half as many again.
        starts: Starting points at most, 1 or more: the algebraic solution, then random ones, until one ends
            where nothing is left to gain. Worth more than 1 for tensor rings and CP, whose problems have
            several minima.
        tolerance: Stop when an iteration lowers the squared relative error by less than this fraction of it.
        patience: Number of iterations over which that gain is averaged, 1 or more.
        seed: Seed of the random starting points.
        enough: Stop when the relative error is at most that, 0 or more. What differs by less is one to who
            chooses ranks by it, and the last iterations of the largest ranks are those that take longest.
        stability: What the size |A|^2 + |Q|^2 of terms that may cancel (CP's) counts beside the squared
            error, as a multiple of it, 0 or more. Terms that cancel on the calibration inputs do not on
            others, nor when they are rounded (Phan et al., ECCV 2020, who minimise their size at a given
            error).
    """

    iterations: int = 60
    starts: int = 1
    tolerance: float = 1e-6
    patience: int = 10
    seed: int = 0
    enough: float = 0.0
    stability: float = 0.03

    def __post_init__(self) -> None:
        limits = (self.tolerance, self.enough, self.stability)
        counts = self.iterations >= 0 and self.starts >= 1 and self.patience >= 1
        if not counts or not all(each >= 0 for each in limits):
            raise DecompositionError(
                "fit options need iterations >= 0, starts >= 1, tolerance >= 0, patience >= 1, enough >= 0 "
                f"and stability >= 0, got {self!r}"
            )


FAST = FitOptions()
CHOOSING = FitOptions(tolerance=1e-3, patience=3, enough=5e-3)
"""For fits that ranks are chosen by; the layers of the plan are fitted anew."""
THOROUGH = FitOptions(iterations=1000, starts=16, tolerance=1e-9)


@dataclass(frozen=True)
class Fit:
    """A fitted layer.

    Attributes:
        cores: The format's cores, float64.
        error: Relative output error sqrt(E|(W - V) x|^2 / E|W x|^2), |y|^2 = y' G y where a sensitivity G is
            given; without data |W - V| / |W|.
        tensor_format: The cores' format; like modes and ranks `None` or `()` in a fit that does not say.
        modes: How the weight is read as a tensor.
        ranks: One rank a bond.
    """

    cores: Cores
    error: float
    tensor_format: TensorFormat | None = None
    modes: WeightModes | None = None
    ranks: Ranks = ()

    def to_tensorly(self) -> Any:
        """Return the cores as a CPTensor, TuckerTensor, TTTensor or TRTensor of shape `modes.sizes`.

        The arrays are copies in tensorly's present backend.

        Raises:
            DecompositionError: If tensorly has no object for the format, or the fit does not say its format.
        """
        tensor_format, modes = self.described()
        return tensor_format.to_tensorly(self.cores, modes)

    def described(self) -> tuple[TensorFormat, WeightModes]:
        """Return the format and how it reads the weight.

        Raises:
            DecompositionError: If the fit does not say.
        """
        if self.tensor_format is None or self.modes is None:
            raise DecompositionError(
                "this fit does not say its format; take that of fit_weight, FitLibrary or from_tensorly"
            )
        return self.tensor_format, self.modes


class Fitter:
    """Fits of one weight in one format; what all ranks have in common is computed once.

    Args:
        tensor_format: The format.
        weight: Weight (out, in, kernel).
        modes: How the weight is read as a tensor.
        metric: E[x x'] (D, D) of the layer's input patches, D = in * kernel in the order of
            `weight.flatten(1)`, whole or as rows; `None` fits to the weight itself.
        sensitivity: G (out, out) of the network's output to the layer's (`collect_sensitivities`); its scale
            does not matter. `None` counts all output channels alike.

    Raises:
        DecompositionError: If the weight, the metric or the sensitivity is not finite.
    """

    def __init__(
        self,
        tensor_format: TensorFormat,
        weight: torch.Tensor,
        modes: WeightModes,
        metric: Metric | None = None,
        sensitivity: torch.Tensor | None = None,
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
        self._metric = None if metric is None else in_float64(metric)
        self._sensitivity = sensitivity
        # Without a kernel every format is a product of two matrices.
        self._direct = modes.kernel == 1 and modes.plain

    def fit(
        self, ranks: Ranks, options: FitOptions = FAST, start: Sequence[torch.Tensor] | None = None
    ) -> Fit:
        """Fit the format at some ranks.

        Args:
            ranks: One rank a bond, validated.
            options: How much work to do.
            start: Cores at these ranks to begin with, of a problem much like this one; `None` begins with the
                format's own. Without a kernel the best cores are known in any case.

        Returns:
            The best fit of all starts whose terms A[:, p] Q[p, :] do not cancel: together, in the Frobenius
            norm, they are at most `LARGEST_AMPLIFICATION` times the weight, and so are their outputs in the
            metric unless not even those of the algebraic solution are. Its error is no larger than that of
            the point it starts from, unless that one's terms cancel, but for what `stability` gives away.
        """
        with _few_threads(self.modes.columns):
            if self._vanishes:
                cores, error = self._unseen(ranks, options), 0.0
            else:
                cores, error = self._low_rank(ranks) if self._direct else self._search(ranks, options, start)
                cores = self.tensor_format.balanced(cores)
        return Fit(cores, error, self.tensor_format, self.modes, ranks)

    @cached_property
    def _vanishes(self) -> bool:
        if not self._direct:
            return self._problem.vanishes
        rows = self._weight.flatten(1)
        if self._metric is None or not bool(rows.any()):
            return not bool(rows.any())
        # One mixture of all rows has no energy only where none has any.
        mixture = torch.randn(1, len(rows), generator=torch.Generator().manual_seed(0)).double() @ rows
        return not float((times(mixture, self._metric) * mixture).sum()) > 0

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

    @cached_property
    def _solutions(self) -> tuple[LowRank, torch.Tensor]:
        """All ranks' solutions of a weight without a kernel, and how their terms add up."""
        found = LowRank(self._weight.flatten(1), self._metric, self._sensitivity)
        return found, found.terms(self._metric)

    @cached_property
    def _bounded_solutions(self) -> list[tuple[LowRank, torch.Tensor]]:
        """The same, of the weight itself, and of the problem in which all output channels count alike."""
        metrics = [None] if self._metric is None else [None, self._metric]
        found = [LowRank(self._weight.flatten(1), metric, None) for metric in metrics]
        return [(each, each.terms(self._metric)) for each in found]

    def _low_rank(self, ranks: Ranks) -> tuple[Cores, float]:
        first, *_ = self.tensor_format.core_shapes(self.modes, ranks)
        rank = math.prod(first) // self.modes.out_channels  # A's columns, which is free
        best, terms = self._solutions
        chosen, squared = best, 0.0
        if _at(terms, rank) <= LARGEST_AMPLIFICATION:
            squared = best.squared_error(rank)
        else:  # what a sensitivity does not see may grow as it likes
            others = self._bounded_solutions
            bounded = [each for each, sizes in others if _at(sizes, rank) <= LARGEST_AMPLIFICATION]
            # Of the weight itself the solution has terms that are no larger than the weight.
            chosen = min(bounded, key=lambda each: each.squared_error_in(rank, best), default=others[0][0])
            squared = chosen.squared_error_in(rank, best)
        cores = self.tensor_format.from_halves(*chosen.halves(rank), self.modes, ranks)
        return cores, max(0.0, squared) ** 0.5

    def _search(
        self, ranks: Ranks, options: FitOptions, start: Sequence[torch.Tensor] | None
    ) -> tuple[Cores, float]:
        problem = self._problem
        if start is None:
            best = _search(problem, ranks, options)
        else:
            stop = Stop(options.tolerance, options.patience, options.enough**2)
            best = problem.minimise(problem.rescale(list(start)), options.iterations, stop)
        if problem.amplification(best) > LARGEST_AMPLIFICATION:
            best = _bounded(problem, ranks, options)
        return problem.unscale(best), max(0.0, float(problem.squared_error(best))) ** 0.5


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


def _search(problem: LeastSquares, ranks: Ranks, options: FitOptions) -> Cores:
    """Return the best end of all starts, by error alone unless all of its terms cancel."""
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
    """Minimise from all starts, of several only from those that a short run finds worth it."""
    if len(starts) > 1:
        count = max(2, len(starts) // 4)
        starts = _ends(problem, starts, min(iterations, 30), stop, penalty)[:count]
    return _ends(problem, starts, iterations, stop, penalty)[0]


def _ends(
    problem: LeastSquares, starts: Sequence[Cores], iterations: int, stop: Stop, penalty: float
) -> list[Cores]:
    """Minimise from the starts in turn, up to one that leaves nothing to gain; the best end comes first."""
    if len(starts) == 1:  # of a large weight the error takes as long as a step
        return [problem.minimise(starts[0], iterations, stop, penalty)]
    ends: list[tuple[float, Cores]] = []
    for start in starts:
        end = problem.minimise(start, iterations, stop, penalty)
        ends.append((float(problem.squared_error(end)), end))
        if stop.reached(ends[-1][0]):
            break
    return [end for _, end in sorted(ends, key=itemgetter(0))]


def _steady(problem: LeastSquares, starts: Sequence[Cores], options: FitOptions, stop: Stop) -> Cores:
    """Minimise the size of the terms beside the error, in proportion to it, so that close fits stay close."""
    (best, *_), squared = starts, float(problem.squared_error(starts[0]))
    while squared > max(stop.squared_error, LEAST_PENALTY):
        before = squared
        penalty = max(options.stability * _LEFT_AT_THE_END * before, LEAST_PENALTY)
        # A second aim takes longer to reach.
        best = _race(problem, starts, options.iterations * 3 // 2, stop, penalty)
        starts, squared = [best], float(problem.squared_error(best))
        if squared > _MUCH_CLOSER * before:
            break
    return best


def _bounded(problem: LeastSquares, ranks: Ranks, options: FitOptions) -> Cores:
    """Return the better of two solutions that have other terms, among those that are bounded."""
    plain = problem.algebraic(ranks)
    found = [plain]
    if problem.root is not None:  # what a sensitivity does not see may grow as it likes
        cores = _search(problem.even, ranks, options)
        found.append(problem.rescale(problem.even.unscale(cores)))
    bounded = [cores for cores in found if problem.amplification(cores) <= LARGEST_AMPLIFICATION]
    # Of the weight itself the algebraic solution has terms that are no larger than the weight.
    return min(bounded, key=problem.squared_error, default=plain)


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


def _spread(core: torch.Tensor) -> torch.Tensor:
    """Return the standard deviation of a core's entries; the size of a single one, such as Tucker's 1 x 1."""
    return core.std() if core.numel() > 1 else core.abs().squeeze()


def _starting_points(problem: LeastSquares, ranks: Ranks, options: FitOptions) -> list[Cores]:
    algebraic = problem.start(ranks)
    generator = torch.Generator().manual_seed(options.seed)
    # A zero core has a zero gradient: rank the weight does not fill starts small instead of dead.
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
