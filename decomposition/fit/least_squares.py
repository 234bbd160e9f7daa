"""Fit cores by least squares in a data metric: L-BFGS, the output factor eliminated where it is free."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import torch
from threadpoolctl import ThreadpoolController

from decomposition.calibration.metric import (
    Metric,
    RowFactor,
    converted,
    powers,
    scaled,
    symmetric_root,
    times,
)
from decomposition.formats import Cores, Ranks, TensorFormat
from decomposition.network.geometry import WeightModes


@dataclass(frozen=True)
class Products:
    """For Q (features, D): `gram` Q S Q', `cross` W S Q' and `slope`, the map from A to A' (A Q - W) S."""

    gram: torch.Tensor
    cross: torch.Tensor
    slope: Callable[[torch.Tensor], torch.Tensor]


class Quadratic:
    """The form |W - A Q|^2 of a weight W (out, D) in a metric S (D, D); of rows F of it, W F' is kept."""

    def __init__(
        self, weight: torch.Tensor, metric: Metric | None, target: torch.Tensor | None = None
    ) -> None:
        self.weight, self.metric = weight, metric
        self._target = self._seen(weight) if target is None else target

    def _seen(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows F' in a metric of rows, else rows S."""
        if isinstance(self.metric, RowFactor):
            return rows @ self.metric.rows.T
        return rows if self.metric is None else times(rows, self.metric)

    @property
    def energy(self) -> torch.Tensor:
        """The energy |W|^2 of the weight in the metric."""
        if isinstance(self.metric, RowFactor):
            return self._target.square().sum() + self.metric.ridge * self.weight.norm().square()
        return (self._target * self.weight).sum()

    def normalised(self, scale: torch.Tensor) -> Quadratic:
        """Return the form of W / scale in the metric in which its energy is 1; W is overwritten."""
        factor = scale.square() / self.energy
        metric = None if self.metric is None else scaled(self.metric, factor)
        if self.metric is None:
            return Quadratic(self.weight.div_(scale), None)
        gain = factor.sqrt() if isinstance(self.metric, RowFactor) else factor
        return Quadratic(self.weight.div_(scale), metric, self._target.mul_(gain / scale))

    @cached_property
    def in_float32(self) -> Quadratic:
        """The quadratic form in float32, in which products take half the time."""
        metric = None if self.metric is None else converted(self.metric, torch.float32)
        return Quadratic(self.weight.float(), metric, self._target.float())

    def products(self, features: torch.Tensor) -> Products:
        """Return the products for Q (features, D), in the weight's precision."""
        seen = self._seen(features)
        if isinstance(self.metric, RowFactor):
            rows, ridge = self.metric.rows, self.metric.ridge
            gram, cross = seen @ seen.T, self._target @ seen.T
            if ridge:
                gram += ridge * (features @ features.T)
                cross += ridge * (self.weight @ features.T)

            def slope(output: torch.Tensor) -> torch.Tensor:
                change = (output.T @ (output @ seen - self._target)) @ rows
                if ridge:  # A' (A Q - W) without A Q, which is as large as W
                    change.addmm_(output.T @ output, features, alpha=ridge)
                    change.addmm_(output.T, self.weight, alpha=-ridge)
                return change

        else:
            gram, cross = seen @ features.T, self._target @ features.T

            def slope(output: torch.Tensor) -> torch.Tensor:
                return output.T @ (output @ seen - self._target)

        return Products(gram, cross, slope)


LEAST_PENALTY = 1e-14
_HISTORY = 20
# Numbers in the steps and gradients that L-BFGS remembers: 1 GiB. Larger problems remember fewer steps.
_REMEMBERED = 2**27
# Numbers that L-BFGS searches: its vectors of a larger problem take gigabytes, and each step seconds.
_SEARCHED = 2**23
# A fit gets all of its iterations up to this many multiply-accumulates a step; beyond, fewer, but at least
# this share: the first ones gain the most.
_FULL_STEP = 1e9
_LEAST_SHARE = 1 / 3
# A start in the metric of the inputs is nearer to the minimum: fewer iterations suffice.
_FULL_STEP_IN_METRIC = 1e8
_LEAST_SHARE_IN_METRIC = 1 / 15
# Ranks are chosen by errors to some percent, which the first iterations give.
_FULL_COARSE_STEP = 2e8
_LEAST_COARSE_SHARE = 1 / 7
# Steps beyond this take up to seconds, those of ranks that cost almost as much as the dense layer.
_LONG_COARSE_STEP = 1e10
_FEWEST_ITERATIONS = 3
# If the error is wanted to no more than this, float32 products suffice and take half the time.
_COARSE = 1e-4
_NOTHING_LEFT = 1e-15
# Below this the squared relative error, a difference of sums near 1, has lost too many digits.
_CANCELLED = 1e-8


@dataclass(frozen=True)
class Stop:
    """Conditions under which a minimisation stops before its last iteration."""

    tolerance: float
    patience: int
    squared_error: float = 0.0

    def reached(self, squared_error: float) -> bool:
        """Tell whether a squared error is small enough, or down to rounding."""
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
        self.free_output = tensor_format.free_output(modes)
        # With a free output factor, L W with L' L = G is a problem without G, and A is transformed back
        # at the end. Other formats keep W and apply L in every step.
        self.root = None if sensitivity is None else symmetric_root(sensitivity)
        if self.root is not None:
            self.root = self.root / self.root.diagonal().mean()
            if self.free_output:
                weight = (self.root @ weight.flatten(1)).reshape_as(weight)
        self.scale = weight.norm()
        matrix = weight.reshape(modes.out_channels, -1)
        seen = self._seen(matrix)
        quadratic = Quadratic(seen.clone() if seen is matrix and weight is self.original else seen, metric)
        self.energy = float(quadratic.energy)
        self.vanishes = not (self.scale.item() > 0 and self.energy > 0)
        if self.vanishes:
            return
        self.quadratic = quadratic.normalised(self.scale)
        self.metric = self.quadratic.metric
        self.matrix = self.quadratic.weight if seen is matrix else matrix / self.scale
        self.weight = self.matrix.reshape_as(weight)
        # 1 but for rounding, and for a sensitivity without inputs
        self.whole = self.quadratic.energy

    def _seen(self, rows: torch.Tensor) -> torch.Tensor:
        """Weigh rows, one an output channel, by the sensitivity; already in the weight where A is free."""
        return rows if self.root is None or self.free_output else self.root @ rows

    @cached_property
    def original_energy(self) -> float:
        """Energy of the weight itself, without the output's sensitivity."""
        if self.root is None:
            return self.energy
        return float(powers(self.original.flatten(1), self.original_metric).sum())

    def squared_error(self, cores: Cores) -> torch.Tensor:
        """E|(W - V) x|^2 / E|W x|^2."""
        output, features = self.format.halves(cores, self.modes)
        if len(features) < len(self.matrix):  # then A Q has fewer rows to multiply by S than W - A Q
            left, products = self._seen(output), self.quadratic.products(features)
            value = self.whole - 2 * (left * products.cross).sum() + ((left.T @ left) * products.gram).sum()
            if value > _CANCELLED:
                return value
        rest = self._seen(torch.addmm(self.matrix, output, features, alpha=-1))
        return powers(rest, self.metric).sum()

    def amplification(self, cores: Cores) -> float:
        """Norm of the terms A[:, p] Q[p, :], or of their outputs if larger, relative to the weight's."""
        output, features = self.format.halves(self.unscale(cores), self.modes)
        sizes, rows = output.square().sum(0), self.original.flatten(1)
        weight = (sizes * features.square().sum(1)).sum() / rows.square().sum()
        if self.original_metric is None:
            return float(weight) ** 0.5
        energies = powers(features, self.original_metric).clamp_min(0)
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
        """Apply the scaling of the weight and of its output channels: the inverse of `unscale`."""
        if self.root is not None and self.free_output:
            output = self.format.halves(cores, self.modes)[0]
            cores = self.format.set_output(cores, self.modes, self.root @ output)
        return [cores[0] / self.scale, *cores[1:]]

    @cached_property
    def even(self) -> LeastSquares:
        """The problem in which all output channels count alike."""
        return LeastSquares(self.format, self.original, self.modes, self.original_metric)

    def algebraic(self, ranks: Ranks) -> Cores:
        """Return the algebraic solution for the weight itself, without metric or sensitivity."""
        return self.rescale(self.format.start(self.original, self.modes, ranks))

    @cached_property
    def start(self) -> Callable[[Ranks], Cores]:
        """The function from ranks to the algebraic solution or, for large problems, the one in the metric."""
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
        """Reduce the number of iterations for large problems."""
        step = self._step(*self.format.halves(cores, self.modes)[1].shape)
        least, full = _LEAST_SHARE, _FULL_STEP
        if self._starts_in_metric:
            least, full = _LEAST_SHARE_IN_METRIC, _FULL_STEP_IN_METRIC
        elif stop.tolerance >= _COARSE:
            least = _LEAST_COARSE_SHARE * min(1.0, _LONG_COARSE_STEP / step)
            full = _FULL_COARSE_STEP
        affordable = math.ceil(iterations * min(1.0, max(least, full / step)))
        return max(min(iterations, _FEWEST_ITERATIONS), affordable)

    def minimise(self, cores: Cores, iterations: int, stop: Stop, penalty: float = LEAST_PENALTY) -> Cores:
        """Run L-BFGS from `cores`; the output factor is eliminated where it is free."""
        fixed = 1 if self.free_output else 0
        if iterations == 0 or sum(core.numel() for core in cores[fixed:]) > _SEARCHED:
            return self._with_best_output(cores, 0.0) if fixed else cores
        cores = self.format.conditioned(cores)
        shapes = [core.shape for core in cores[fixed:]]
        lengths = [core.numel() for core in cores[fixed:]]

        def split(vector: torch.Tensor) -> Cores:
            parts = [part.reshape(s) for part, s in zip(vector.split(lengths), shapes, strict=True)]
            return [*cores[:fixed], *parts]

        objective = self._projected if fixed else self._joint
        # Float32 only with a penalty, which bounds the effect of rounding on the solution for A.
        coarse = stop.tolerance >= _COARSE and penalty > LEAST_PENALTY and fixed
        quadratic = self.quadratic.in_float32 if coarse else self.quadratic

        flat_enough = _StopWhenFlat(stop)

        def value_and_gradient(flat: np.ndarray) -> tuple[float, np.ndarray]:
            vector = torch.from_numpy(flat).to(quadratic.weight.dtype).requires_grad_()
            squared, size, gradient = objective(quadratic, split, vector, penalty)
            flat_enough.squared_error = squared
            return squared + penalty * size, gradient.double().numpy()

        initial = torch.cat([core.flatten() for core in cores[fixed:]]).numpy()
        from scipy.optimize import minimize  # importing it takes a third of a second

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
        # A penalty that bounds the terms has to apply to the last solution for A, too.
        held = penalty if penalty > LEAST_PENALTY else 0.0
        return self._with_best_output(result, held) if fixed else result

    def _best_output(self, products: Products, penalty: float) -> torch.Tensor:
        """Solve the normal equations for A."""
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
        halves = [pair for pair in zip((output, features), slopes, strict=True) if pair[0].requires_grad]
        (gradient,) = torch.autograd.grad(
            [half for half, _ in halves], vector, [slope for _, slope in halves]
        )
        return squared, size, gradient


@cache
def _numpy_blas() -> ThreadpoolController:
    """Return the controller of SciPy's BLAS, whose threads wait in busy loops: 270 ms for a step of 16 ms."""
    return ThreadpoolController()


class _StopWhenFlat:
    """Callback that stops the minimiser when the error is small enough or no longer falls."""

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
