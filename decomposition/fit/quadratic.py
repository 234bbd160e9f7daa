"""The squared error of V = A Q as a quadratic function of A: the products that a minimiser needs of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from decomposition.calibration.metric import Metric, RowFactor, converted, times


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
