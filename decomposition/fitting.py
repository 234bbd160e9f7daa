"""Fitting the cores of a format to a weight, in the metric of the layer's real inputs.

The output of a layer with weight W on patches x differs from that of an approximation V by
E|(W - V) x|^2 = tr((W - V) S (W - V)'), S = E[x x']; where the network's sensitivity G to the layer's output
is known, errors count by what they change there: tr(G (W - V) S (W - V)'). Every format is V = A Q, and where
A is free (plain modes) it is eliminated in closed form (variable projection, Golub & Pereyra 1973); a
quasi-Newton method (L-BFGS, Liu & Nocedal 1989) minimises over the remaining cores, starting from the
format's algebraic solution. One step costs features x D^2, independent of the number of images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize

from decomposition.errors import DecompositionError
from decomposition.formats import Cores, Ranks, TensorFormat
from decomposition.metric import Metric, is_finite, scaled, times
from decomposition.modes import WeightModes

# Terms larger than this, relative to what they add up to, cancel one another and are lost in float32.
LARGEST_AMPLIFICATION = 30.0
_LEAST_PENALTY = 1e-14
_FIRST_BOUNDING_PENALTY = 1e-10
_LAST_BOUNDING_PENALTY = 1e-2
_HISTORY = 20
_COLUMNS_WORTH_THREADS = 1024
# Share of its mean power that every output direction keeps at least: the sensitivity is only an estimate.
_SENSITIVITY_FLOOR = 0.01


@dataclass(frozen=True)
class FitOptions:
    """How much work a fit may do.

    Attributes:
        iterations: L-BFGS iterations from the best start, 0 or more; it stops earlier when converged.
        starts: Starting points, 1 or more: the algebraic solution, then random ones. Worth more than 1 for
            tensor rings and CP, whose problems have several minima.
        tolerance: Stop when an iteration lowers the squared relative error by less than this fraction of it.
        seed: Seed of the random starting points.
    """

    iterations: int = 60
    starts: int = 1
    tolerance: float = 1e-6
    seed: int = 0

    def __post_init__(self) -> None:
        if self.iterations < 0 or self.starts < 1 or not self.tolerance >= 0:
            raise DecompositionError(
                f"fit options need iterations >= 0, starts >= 1 and tolerance >= 0, got {self!r}"
            )


FAST = FitOptions()
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


def fit_weight(
    tensor_format: TensorFormat,
    weight: torch.Tensor,
    modes: WeightModes,
    ranks: Ranks,
    metric: Metric | None = None,
    options: FitOptions = FAST,
    *,
    sensitivity: torch.Tensor | None = None,
) -> Fit:
    """Fit a format to a weight.

    Args:
        tensor_format: The format.
        weight: Weight (out, in, kernel).
        modes: How the weight is read as a tensor.
        ranks: One rank a bond, validated.
        metric: E[x x'] (D, D) of the layer's input patches, D = in * kernel in the order of
            `weight.flatten(1)`, whole or as rows; `None` fits to the weight itself.
        options: How much work to do.
        sensitivity: G (out, out) of the network's output to the layer's (`collect_sensitivities`); its scale
            does not matter. `None` counts all output channels alike.

    Returns:
        The best fit of all starts whose terms A[:, p] Q[p, :] do not cancel: together, in the Frobenius norm,
        they are at most `LARGEST_AMPLIFICATION` times the weight, and so are their outputs in the metric
        unless not even those of the algebraic solution are. Its error is no larger than that of the algebraic
        solution, unless that one's terms cancel.

    Raises:
        DecompositionError: If the weight, the metric or the sensitivity is not finite.
    """
    if not bool(torch.isfinite(weight).all()):
        raise DecompositionError("the weight holds NaN or infinite values; repair the checkpoint first")
    if metric is not None and not is_finite(metric):
        raise DecompositionError("the input moments hold NaN or infinite values; check the calibration set")
    if sensitivity is not None and not bool(torch.isfinite(sensitivity).all()):
        raise DecompositionError("the sensitivity holds NaN or infinite values; check the calibration set")
    with _few_threads(modes.columns):
        fit = _fit(_Problem(tensor_format, weight.double(), modes, metric, sensitivity), ranks, options)
    return replace(fit, tensor_format=tensor_format, modes=modes, ranks=ranks)


def symmetric_root(sensitivity: torch.Tensor) -> torch.Tensor:
    """Return the symmetric square root of a sensitivity (out, out), its small eigenvalues raised."""
    matrix = (sensitivity.double() + sensitivity.double().T) / 2
    values, vectors = torch.linalg.eigh(matrix)
    floor = _SENSITIVITY_FLOOR * values.clamp_min(0).mean().clamp_min(1e-300)
    return (vectors * (values.clamp_min(0) + floor).sqrt()) @ vectors.T


def _fit(problem: _Problem, ranks: Ranks, options: FitOptions) -> Fit:
    tensor_format, modes = problem.format, problem.modes
    if problem.vanishes:
        shapes = tensor_format.core_shapes(modes, ranks)
        return Fit([torch.zeros(shape, dtype=torch.float64) for shape in shapes], 0.0)
    best = problem.low_rank(ranks) if problem.direct else _search(problem, ranks, options)
    if problem.amplification(best) > LARGEST_AMPLIFICATION:
        best = _bounded(problem, ranks, options)
    error = max(0.0, float(problem.squared_error(best))) ** 0.5
    return Fit(_balance(problem.unscale(best)), error)


def _search(problem: _Problem, ranks: Ranks, options: FitOptions) -> Cores:
    """Return the best end of all starts, by error alone unless all of its terms cancel."""
    starts = _starting_points(problem, ranks, options)
    if len(starts) > 1:  # a short race picks the start that is worth the long run
        short = replace(options, iterations=min(options.iterations, 30))
        raced = sorted((problem.minimise(cores, short) for cores in starts), key=problem.squared_error)
        starts = raced[: max(2, len(starts) // 4)]
    best = min((problem.minimise(cores, options) for cores in starts), key=problem.squared_error)
    penalty = _FIRST_BOUNDING_PENALTY
    while problem.amplification(best) > LARGEST_AMPLIFICATION and penalty < _LAST_BOUNDING_PENALTY:
        candidates = [problem.minimise(cores, options, penalty) for cores in starts]
        best = min(candidates, key=problem.squared_error)
        penalty *= 100
    return best


def _bounded(problem: _Problem, ranks: Ranks, options: FitOptions) -> Cores:
    """Return the better of two solutions that have other terms, among those that are bounded."""
    plain = problem.algebraic(ranks)
    found = [plain]
    if problem.root is not None:  # what a sensitivity does not see may grow as it likes
        even = problem.without_sensitivity()
        cores = even.low_rank(ranks) if problem.direct else _search(even, ranks, options)
        found.append(problem.rescale(even.unscale(cores)))
    bounded = [cores for cores in found if problem.amplification(cores) <= LARGEST_AMPLIFICATION]
    # Of the weight itself the algebraic solution has terms that are no larger than the weight.
    return min(bounded, key=problem.squared_error, default=plain)


class _Problem:
    """The least-squares problem of one weight, scaled so that weight and output have norm one."""

    def __init__(
        self,
        tensor_format: TensorFormat,
        weight: torch.Tensor,
        modes: WeightModes,
        metric: Metric | None,
        sensitivity: torch.Tensor | None = None,
    ) -> None:
        self.format, self.modes = tensor_format, modes
        self.original, self.original_metric = weight, metric
        self.free_output = modes.plain
        # Without a kernel every format is a product of two matrices.
        self.direct = modes.kernel == 1 and modes.plain
        # With a free output factor the problem for L W, L' L = G, is one without G: A is turned back at the
        # end. Other formats keep the weight and carry L through every step.
        self.root = None if sensitivity is None else symmetric_root(sensitivity)
        if self.root is not None:
            self.root = self.root / self.root.diagonal().mean()
            if self.free_output:
                weight = (self.root @ weight.flatten(1)).reshape_as(weight)
        self.scale = weight.norm()
        matrix = weight.reshape(modes.out_channels, -1)
        self.energy = _energy(self._seen(matrix), metric)
        self.vanishes = not (self.scale.item() > 0 and self.energy > 0)
        if self.vanishes:
            return
        self.weight = weight / self.scale
        self.matrix = matrix / self.scale
        self.metric = None if metric is None else scaled(metric, self.scale.square() / self.energy)
        self.target = self._apply(self._seen(self.matrix))

    def _seen(self, rows: torch.Tensor) -> torch.Tensor:
        """Weigh rows, one an output channel, by the sensitivity; already in the weight where A is free."""
        return rows if self.root is None or self.free_output else self.root @ rows

    def _apply(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.metric is None else times(rows, self.metric)

    def squared_error(self, cores: Cores) -> torch.Tensor:
        """E|(W - V) x|^2 / E|W x|^2."""
        output, features = self.format.halves(cores, self.modes)
        rest = self._seen(self.matrix - output @ features)
        return (self._apply(rest) * rest).sum()

    def amplification(self, cores: Cores) -> float:
        """Norm of the terms A[:, p] Q[p, :] relative to the weight's; 1 when they are orthogonal.

        The larger one of two: of the terms themselves, and of their outputs on the metric's inputs.
        """
        output, features = self.format.halves(self.unscale(cores), self.modes)
        sizes, rows = output.square().sum(0), self.original.flatten(1)
        weight = (sizes * features.square().sum(1)).sum() / rows.square().sum()
        if self.original_metric is None:
            return float(weight) ** 0.5
        energies = (times(features, self.original_metric) * features).sum(1).clamp_min(0)
        energy = _energy(rows, self.original_metric)
        return max(float(weight), float((sizes * energies).sum()) / energy if energy > 0 else 0.0) ** 0.5

    def unscale(self, cores: Cores) -> Cores:
        """Undo the scaling of the weight and of its output channels."""
        cores = [cores[0] * self.scale, *cores[1:]]
        if self.root is None or not self.free_output:
            return cores
        output = self.format.halves(cores, self.modes)[0]
        return self.format.set_output(cores, self.modes, torch.linalg.solve(self.root, output))

    def rescale(self, cores: Cores) -> Cores:
        """Return what `unscale` turns into `cores`."""
        if self.root is not None and self.free_output:
            output = self.format.halves(cores, self.modes)[0]
            cores = self.format.set_output(cores, self.modes, self.root @ output)
        return [cores[0] / self.scale, *cores[1:]]

    def without_sensitivity(self) -> _Problem:
        """Return the problem in which all output channels count alike."""
        return _Problem(self.format, self.original, self.modes, self.original_metric)

    def algebraic(self, ranks: Ranks) -> Cores:
        """Return the algebraic solution of the weight itself, which knows neither inputs nor sensitivity."""
        return self.rescale(self.format.start(self.original, self.modes, ranks))

    def low_rank(self, ranks: Ranks) -> Cores:
        """Solve a matrix without kernel in closed form; every format is a product of two matrices then.

        The best approximation of a rank keeps the outputs' leading directions: V = U U' W with U the leading
        eigenvectors of W S W' (reduced-rank regression; Izenman 1975).
        """
        features = self.format.halves(
            [torch.zeros(s, dtype=torch.float64) for s in self.format.core_shapes(self.modes, ranks)],
            self.modes,
        )[1].shape[0]
        outputs = self.target @ self.matrix.T
        leading = torch.linalg.eigh((outputs + outputs.T) / 2).eigenvectors[:, -features:]
        projected = leading @ (leading.T @ self.matrix)
        return self.format.start(projected.reshape_as(self.weight), self.modes, ranks)

    def minimise(self, cores: Cores, options: FitOptions, penalty: float = _LEAST_PENALTY) -> Cores:
        """Run L-BFGS from `cores`; the output factor is eliminated where it is free."""
        fixed = 1 if self.free_output else 0
        if options.iterations == 0:
            return self._with_best_output(cores, 0.0) if fixed else cores
        shapes = [core.shape for core in cores[fixed:]]
        lengths = [core.numel() for core in cores[fixed:]]

        def split(vector: torch.Tensor) -> Cores:
            parts = [part.reshape(s) for part, s in zip(vector.split(lengths), shapes, strict=True)]
            return [*cores[:fixed], *parts]

        objective = self._projected if fixed else self._joint

        def value_and_gradient(flat: np.ndarray) -> tuple[float, np.ndarray]:
            vector = torch.from_numpy(flat).requires_grad_()
            value, gradient = objective(split, vector, penalty)
            return value, gradient.numpy()

        initial = torch.cat([core.flatten() for core in cores[fixed:]]).numpy()
        found = minimize(
            value_and_gradient,
            initial,
            jac=True,
            method="L-BFGS-B",
            callback=_StopWhenFlat(options.tolerance),
            options={"maxiter": options.iterations, "maxcor": _HISTORY, "ftol": 0.0, "gtol": 1e-12},
        )
        result = split(torch.from_numpy(found.x))
        # A penalty that is to keep terms from growing has to hold for the last step too.
        held = penalty if penalty > _LEAST_PENALTY else 0.0
        return self._with_best_output(result, held) if fixed else result

    def _best_output(
        self, features: torch.Tensor, penalty: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Solve for A; returns A, Q S and W S Q'."""
        weighted = self._apply(features)
        gram = weighted @ features.T
        gram = (gram + gram.T) / 2
        # The penalty is absolute; the other summand only keeps the factorisation stable.
        gram.diagonal().add_(penalty + 1e-14 * gram.diagonal().mean())
        cross = self.target @ features.T
        factor, failed = torch.linalg.cholesky_ex(gram)
        if failed.item():
            output = torch.linalg.lstsq(gram, cross.T).solution.T
        else:
            output = torch.cholesky_solve(cross.T, factor).T
        return output, weighted, cross

    def _with_best_output(self, cores: Cores, penalty: float) -> Cores:
        placeholder = [torch.zeros_like(cores[0]), *cores[1:]]
        features = self.format.halves(placeholder, self.modes)[1]
        return self.format.set_output(cores, self.modes, self._best_output(features, penalty)[0])

    def _projected(
        self, split: Callable[[torch.Tensor], Cores], vector: torch.Tensor, penalty: float
    ) -> tuple[float, torch.Tensor]:
        """Value and gradient of min over A of error + penalty (|A|^2 + |Q|^2)."""
        with torch.enable_grad():
            features = self.format.halves(split(vector), self.modes)[1]
        constant = features.detach()
        output, weighted, cross = self._best_output(constant, penalty)
        value = 1.0 - (output * cross).sum() + penalty * constant.square().sum()
        # At the optimal A only the explicit dependence on Q has a gradient (envelope theorem).
        slope = 2 * (output.T @ (output @ weighted) - output.T @ self.target + penalty * constant)
        (gradient,) = torch.autograd.grad(features, vector, slope)
        return float(value), gradient

    def _joint(
        self, split: Callable[[torch.Tensor], Cores], vector: torch.Tensor, penalty: float
    ) -> tuple[float, torch.Tensor]:
        """Value and gradient of error + penalty (|A|^2 + |Q|^2) over all cores."""
        with torch.enable_grad():
            output, features = self.format.halves(split(vector), self.modes)
        left, right = self._seen(output.detach()), features.detach()
        weighted, cross = self._apply(right), self.target @ right.T
        squares = left.T @ left
        fitted = left @ (weighted @ right.T)
        size = left.square().sum() + right.square().sum()
        value = 1.0 - 2 * (left * cross).sum() + (left * fitted).sum() + penalty * size
        slopes = (
            2 * self._seen(fitted - cross + penalty * left),  # the root is symmetric
            2 * (squares @ weighted - left.T @ self.target + penalty * right),
        )
        (gradient,) = torch.autograd.grad((output, features), vector, slopes)
        return float(value), gradient


def _energy(rows: torch.Tensor, metric: Metric | None) -> float:
    """Return E|rows x|^2, |rows|^2 without a metric."""
    return float(rows.square().sum() if metric is None else (times(rows, metric) * rows).sum())


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


class _StopWhenFlat:
    """Stops the minimiser when ten iterations lower the value by less than ten tolerances of it."""

    _WINDOW = 10

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance
        self.values: list[float] = []

    def __call__(self, intermediate_result: object) -> None:
        value = float(intermediate_result.fun)  # type: ignore[attr-defined]
        self.values.append(value)
        if len(self.values) > self._WINDOW:
            gained = self.values[-1 - self._WINDOW] - value
            if value < 1e-15 or gained <= self._WINDOW * self.tolerance * value:
                raise StopIteration


def _starting_points(problem: _Problem, ranks: Ranks, options: FitOptions) -> list[Cores]:
    algebraic = problem.format.start(problem.weight, problem.modes, ranks)
    generator = torch.Generator().manual_seed(options.seed)
    # A zero core has a zero gradient: rank the weight does not fill starts small instead of dead.
    noise = 1e-3 if any(bool((core.flatten(1) == 0).any()) for core in algebraic) else 0.0
    starts = [
        [
            core + noise * core.std() * torch.randn(core.shape, generator=generator, dtype=core.dtype)
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


def _balance(cores: Cores) -> Cores:
    """Give all cores the same root mean square, so that one learning rate suits them."""
    scales = [core.square().mean().sqrt() for core in cores]
    mean = torch.stack(scales).log().mean().exp()
    if not mean > 0:
        return cores
    return [(core * (mean / scale)).contiguous() for core, scale in zip(cores, scales, strict=True)]
