"""The search for the cores of a format with a kernel, from several starting points."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import torch

from decomposition.fit.fit_options import FitOptions
from decomposition.fit.least_squares import LEAST_PENALTY, LeastSquares, Stop
from decomposition.formats import Cores, Ranks

# Terms larger than this, relative to what they add up to, cancel one another and are lost in float32.
LARGEST_AMPLIFICATION = 30.0
_FIRST_BOUNDING_PENALTY = 1e-10
_LAST_BOUNDING_PENALTY = 1e-2
# The share of the start's squared error that a minimisation leaves, for CP: .4 to .8 over the layers of three
# networks.
_LEFT_AT_THE_END = 0.5
# Where less than this share is left, the size of the terms counted for too much.
_MUCH_CLOSER = 0.1


def best_cores(problem: LeastSquares, ranks: Ranks, options: FitOptions) -> Cores:
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
    """Minimise the size of the terms besides the error, in proportion to it: close fits stay close."""
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


def bounded_cores(problem: LeastSquares, ranks: Ranks, options: FitOptions) -> Cores:
    """Return the better of two solutions that have other terms, among those that are bounded."""
    plain = problem.algebraic(ranks)
    solutions = [plain]
    if problem.root is not None:  # what a sensitivity does not see may grow as it likes
        cores = best_cores(problem.even, ranks, options)
        solutions.append(problem.rescale(problem.even.unscale(cores)))
    bounded = [cores for cores in solutions if problem.amplification(cores) <= LARGEST_AMPLIFICATION]
    # Of the weight itself the algebraic solution has terms that are no larger than the weight.
    return min(bounded, key=problem.squared_error, default=plain)


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
