"""Alternating and damped least squares of cores in a data metric."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import torch
from threadpoolctl import ThreadpoolController

from decomposition.calibration.metric import Metric, RowFactor, converted, scaled, symmetric_root, times
from decomposition.formats import Cores, Ranks, TensorFormat
from decomposition.network.modes import WeightModes


@dataclass(frozen=True)
class Products:
    """What a weight W and a metric S make of one Q, shape (features, D).

    Shapes: slope (features, D).
    """

    gram: torch.Tensor
    cross: torch.Tensor
    slope: Callable[[torch.Tensor], torch.Tensor]


class Quadratic:
    """A weight in a metric.

    Shapes: weight (out, D).
    """

    def __init__(
        self, weight: torch.Tensor, metric: Metric | None, target: torch.Tensor | None = None
    ) -> None:
        self.weight, self.metric = weight, metric
        self.target = self.apply(weight) if target is None else target
        self._images = weight @ metric.rows.T if isinstance(metric, RowFactor) else weight

    def apply(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows S for rows (m, D)."""
        return rows if self.metric is None else times(rows, self.metric)

    @cached_property
    def in_float32(self) -> Quadratic:
        """The same in float32, in which a product takes half as long."""
        metric = None if self.metric is None else converted(self.metric, torch.float32)
        return Quadratic(self.weight.float(), metric, self.target.float())

    def products(self, features: torch.Tensor) -> Products:
        """Return the products for Q, in the weight's precision."""
        cross = self.target @ features.T
        if isinstance(self.metric, RowFactor):
            rows, ridge = self.metric.rows, self.metric.ridge
            images = features @ rows.T
            gram = images @ images.T
            if ridge:
                gram += ridge * (features @ features.T)

            def slope(output: torch.Tensor) -> torch.Tensor:
                rest = (output @ images - self._images) @ rows
                if ridge:
                    rest += ridge * (output @ features - self.weight)
                return output.T @ rest

        else:
            weighted = self.apply(features)
            gram = weighted @ features.T

            def slope(output: torch.Tensor) -> torch.Tensor:
                return output.T @ (output @ weighted - self.target)

        return Products(gram, cross, slope)


LEAST_PENALTY = 1e-14
_HISTORY = 20
# Numbers in the steps and gradients that L-BFGS remembers: 1 GiB. Larger problems remember fewer steps.
_REMEMBERED = 2**27
# A fit gets all of its iterations while a step takes no more multiply-accumulates than that, this share of
# them at least; the first ones gain the most.
_FULL_STEP = 1e9
_LEAST_SHARE = 1 / 3
# A start that knows the inputs is so near that fewer will do.
_FULL_STEP_IN_METRIC = 1e8
_LEAST_SHARE_IN_METRIC = 1 / 15
# Ranks are chosen by errors to some percent, which the first iterations give.
_FULL_COARSE_STEP = 2e8
_LEAST_COARSE_SHARE = 1 / 7
# Of an error that is wanted to no more than that, products in float32 lose nothing and take half as long.
_COARSE = 1e-4
_NOTHING_LEFT = 1e-15
# A squared relative error below that has too few digits left as the difference of sums near 1.
_CANCELLED = 1e-8


@dataclass(frozen=True)
class Stop:
    """When a minimisation may stop before its last iteration."""

    tolerance: float
    patience: int
    squared_error: float = 0.0

    def reached(self, squared_error: float) -> bool:
        """Tell whether a squared error is small enough, or nothing but rounding."""
        return squared_error < max(self.squared_error, _NOTHING_LEFT)


class LeastSquares:
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
        # With a free output factor the problem for L W, L' L = G, is one without G: A is turned back at the
        # end. Other formats keep the weight and carry L through every step.
        self.root = None if sensitivity is None else symmetric_root(sensitivity)
        if self.root is not None:
            self.root = self.root / self.root.diagonal().mean()
            if self.free_output:
                weight = (self.root @ weight.flatten(1)).reshape_as(weight)
        self.scale = weight.norm()
        matrix = weight.reshape(modes.out_channels, -1)
        seen = self._seen(matrix)
        target = seen if metric is None else times(seen, metric)
        self.energy = float((target * seen).sum())
        self.vanishes = not (self.scale.item() > 0 and self.energy > 0)
        if self.vanishes:
            return
        self.weight = weight / self.scale
        self.matrix = self.weight.reshape_as(matrix)
        self.metric = None if metric is None else scaled(metric, self.scale.square() / self.energy)
        seen = self.matrix if seen is matrix else seen / self.scale
        target = seen if metric is None else target * (self.scale / self.energy)
        self.quadratic = Quadratic(seen, self.metric, target)
        # 1 but for rounding, and for a sensitivity without inputs
        self.whole = (target * seen).sum()

    def _seen(self, rows: torch.Tensor) -> torch.Tensor:
        """Weigh rows, one an output channel, by the sensitivity; already in the weight where A is free."""
        return rows if self.root is None or self.free_output else self.root @ rows

    @cached_property
    def original_energy(self) -> float:
        """Energy of the weight itself, whatever the output's sensitivity."""
        return self.energy if self.root is None else _energy(self.original.flatten(1), self.original_metric)

    def squared_error(self, cores: Cores) -> torch.Tensor:
        """E|(W - V) x|^2 / E|W x|^2."""
        output, features = self.format.halves(cores, self.modes)
        if len(features) < len(self.matrix):  # fewer rows for the metric than the difference has
            left, products = self._seen(output), self.quadratic.products(features)
            value = self.whole - 2 * (left * products.cross).sum() + ((left.T @ left) * products.gram).sum()
            if value > _CANCELLED:
                return value
        rest = self._seen(self.matrix - output @ features)
        return (self.quadratic.apply(rest) * rest).sum()

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
        energy = self.original_energy
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

    @cached_property
    def even(self) -> LeastSquares:
        """The problem in which all output channels count alike."""
        return LeastSquares(self.format, self.original, self.modes, self.original_metric)

    def algebraic(self, ranks: Ranks) -> Cores:
        """Return the algebraic solution of the weight itself, which knows neither inputs nor sensitivity."""
        return self.rescale(self.format.start(self.original, self.modes, ranks))

    @cached_property
    def start(self) -> Callable[[Ranks], Cores]:
        """What returns the first point at given ranks.

        It is the algebraic solution of the problem's weight; where the largest ranks do not get all of their
        iterations, that in the metric for a format that has one.
        """
        return self.format.starter(self.weight, self.modes, self.metric if self._starts_in_metric else None)

    @property
    def _starts_in_metric(self) -> bool:
        largest = self._step(self.modes.out_channels, self.modes.columns)
        return self.format.starts_in_metric and self.metric is not None and largest > _FULL_STEP

    def _step(self, features: int, columns: int) -> int:
        """Return the multiply-accumulates of one step."""
        inputs = len(self.metric.rows) * 2 if isinstance(self.metric, RowFactor) else columns
        return features * columns * (inputs + features + 3 * self.modes.out_channels)

    def affordable(self, cores: Cores, iterations: int, stop: Stop) -> int:
        """Return how many iterations the size of the problem leaves of those asked for."""
        step = self._step(*self.format.halves(cores, self.modes)[1].shape)
        least, full = _LEAST_SHARE, _FULL_STEP
        if self._starts_in_metric:
            least, full = _LEAST_SHARE_IN_METRIC, _FULL_STEP_IN_METRIC
        elif stop.tolerance >= _COARSE:
            least, full = _LEAST_COARSE_SHARE, _FULL_COARSE_STEP
        return math.ceil(iterations * min(1.0, max(least, full / step)))

    def minimise(
        self,
        cores: Cores,
        iterations: int,
        stop: Stop,
        penalty: float = LEAST_PENALTY,
    ) -> Cores:
        """Run L-BFGS from `cores`; the output factor is eliminated where it is free."""
        fixed = 1 if self.free_output else 0
        if iterations == 0:
            return self._with_best_output(cores, 0.0) if fixed else cores
        cores = self.format.conditioned(cores)
        shapes = [core.shape for core in cores[fixed:]]
        lengths = [core.numel() for core in cores[fixed:]]

        def split(vector: torch.Tensor) -> Cores:
            parts = [part.reshape(s) for part, s in zip(vector.split(lengths), shapes, strict=True)]
            return [*cores[:fixed], *parts]

        objective = self._projected if fixed else self._joint
        # Without a penalty nothing bounds what rounding does to the solution for A.
        coarse = stop.tolerance >= _COARSE and penalty > LEAST_PENALTY and fixed
        quadratic = self.quadratic.in_float32 if coarse else self.quadratic

        flat_enough = _StopWhenFlat(stop)

        def value_and_gradient(flat: np.ndarray) -> tuple[float, np.ndarray]:
            vector = torch.from_numpy(flat).to(quadratic.weight.dtype).requires_grad_()
            squared, size, gradient = objective(quadratic, split, vector, penalty)
            flat_enough.squared_error = squared
            return squared + penalty * size, gradient.double().numpy()

        initial = torch.cat([core.flatten() for core in cores[fixed:]]).numpy()
        from scipy.optimize import minimize  # takes a third of a second

        with _numpy_blas().limit(limits=1, user_api="blas"):
            minimum = minimize(
                value_and_gradient,
                initial,
                jac=True,
                method="L-BFGS-B",
                callback=flat_enough,
                options={
                    "maxiter": self.affordable(cores, iterations, stop),
                    "maxcor": max(1, min(_HISTORY, _REMEMBERED // (2 * len(initial)))),
                    "ftol": 0.0,
                    "gtol": 1e-12,
                },
            )
        result = split(torch.from_numpy(minimum.x))
        # A penalty that is to keep terms from growing has to hold for the last step too.
        held = penalty if penalty > LEAST_PENALTY else 0.0
        return self._with_best_output(result, held) if fixed else result

    def _best_output(self, products: Products, penalty: float) -> torch.Tensor:
        """Solve for A."""
        gram = products.gram.double()
        gram = (gram + gram.T) / 2
        # The penalty is absolute; the other summand only keeps the factorisation stable.
        gram.diagonal().add_(penalty + 1e-14 * gram.diagonal().mean())
        cross = products.cross.double()
        factor, failed = torch.linalg.cholesky_ex(gram)
        if failed.item():
            return torch.linalg.lstsq(gram, cross.T).solution.T
        return torch.cholesky_solve(cross.T, factor).T

    def _with_best_output(self, cores: Cores, penalty: float) -> Cores:
        placeholder = [torch.zeros_like(cores[0]), *cores[1:]]
        features = self.format.halves(placeholder, self.modes)[1]
        output = self._best_output(self.quadratic.products(features), penalty)
        return self.format.set_output(cores, self.modes, output)

    def _projected(
        self,
        quadratic: Quadratic,
        split: Callable[[torch.Tensor], Cores],
        vector: torch.Tensor,
        penalty: float,
    ) -> tuple[float, float, torch.Tensor]:
        """Min over A of squared error + penalty (|A|^2 + |Q|^2): both summands, and the gradient."""
        with torch.enable_grad():
            features = self.format.halves(split(vector), self.modes)[1]
        constant = features.detach()
        products = quadratic.products(constant)
        output = self._best_output(products, penalty)
        output_size = float(output.square().sum())
        size = output_size + float(constant.square().sum())
        squared = 1.0 - float((output * products.cross).sum()) - penalty * output_size
        # At the optimal A only the explicit dependence on Q has a gradient (envelope theorem).
        slope = 2 * (products.slope(output.to(constant.dtype)) + penalty * constant)
        (gradient,) = torch.autograd.grad(features, vector, slope)
        return squared, size, gradient

    def _joint(
        self,
        quadratic: Quadratic,
        split: Callable[[torch.Tensor], Cores],
        vector: torch.Tensor,
        penalty: float,
    ) -> tuple[float, float, torch.Tensor]:
        """Squared error + penalty (|A|^2 + |Q|^2) over all cores: both summands, and the gradient."""
        with torch.enable_grad():
            output, features = self.format.halves(split(vector), self.modes)
        left, right = self._seen(output.detach()), features.detach()
        products = quadratic.products(right)
        fitted = left @ products.gram
        squared = 1.0 - 2 * float((left * products.cross).sum()) + float((left * fitted).sum())
        size = float(left.square().sum() + right.square().sum())
        slopes = (
            2 * self._seen(fitted - products.cross + penalty * left),  # the root is symmetric
            2 * (products.slope(left) + penalty * right),
        )
        (gradient,) = torch.autograd.grad((output, features), vector, slopes)
        return squared, size, gradient


def _energy(rows: torch.Tensor, metric: Metric | None) -> float:
    """Return E|rows x|^2, |rows|^2 without a metric."""
    return float(rows.square().sum() if metric is None else (times(rows, metric) * rows).sum())


@cache
def _numpy_blas() -> ThreadpoolController:
    """Return the BLAS of NumPy and SciPy, in which the minimiser works on vectors; torch brings its own.

    From 10,000 numbers on OpenBLAS adds and multiplies vectors in several threads, which wait for one another
    in busy loops: a step of 16 ms took 270 ms of two cores.
    """
    return ThreadpoolController()


class _StopWhenFlat:
    """Stops the minimiser; at once when the squared error, that of its last step, is small enough."""

    def __init__(self, stop: Stop) -> None:
        self.stop, self.patience = stop, stop.patience
        self.least_gain = stop.patience * stop.tolerance
        self.squared_error = math.inf
        self.values: list[float] = []

    def __call__(self, intermediate_result: object) -> None:
        value = float(intermediate_result.fun)  # type: ignore[attr-defined]
        self.values.append(value)
        if self.stop.reached(self.squared_error):
            raise StopIteration
        if len(self.values) > self.patience:
            gained = self.values[-1 - self.patience] - value
            if gained <= self.least_gain * value:
                raise StopIteration
