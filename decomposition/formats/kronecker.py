"""Factorise weights as sums of Kronecker products (Van Loan and Pitsianis, 1993)."""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn

from decomposition.formats.layers import FactorisedLayer, Reshape
from decomposition.formats.tensor_format import (
    Cores,
    Ranks,
    TensorFormat,
    leading_left_vectors,
    product,
    register_format,
)
from decomposition.network.geometry import WeightModes
from decomposition.network.layers import DecomposableModule, LayerSpec


class _Blocks(NamedTuple):
    """Rows and columns of A, and rows and columns of B, which holds the kernel as well."""

    rows: int
    columns: int
    inner_rows: int
    inner_columns: int


@cache
def _blocks(modes: WeightModes) -> _Blocks:
    """Split the channels so that a term takes the fewest numbers and, with as many, the fewest operations."""
    splits = (
        _Blocks(modes.out_channels // rows, modes.in_channels // columns, rows, columns)
        for rows in _divisors(modes.out_channels)
        for columns in _divisors(modes.in_channels)
    )

    def expense(blocks: _Blocks) -> tuple[int, int]:
        first, second = blocks.rows * blocks.columns, blocks.inner_rows * blocks.inner_columns * modes.kernel
        return first + second, blocks.columns * second + blocks.inner_rows * first

    return min(splits, key=expense)


def _divisors(count: int) -> list[int]:
    return [each for each in range(1, count + 1) if count % each == 0]


class _KroneckerLayer(FactorisedLayer):
    """B with the groups of channels in the batch axis, then A with the rows of B among the positions."""

    def make_parts(self, dense: DecomposableModule) -> None:
        like: dict[str, Any] = {"device": dense.weight.device, "dtype": dense.weight.dtype}
        rows, columns, inner_rows, inner_columns = _blocks(self.modes)
        rank, spatial, out = self.ranks[0], self.geometry.spatial, self.modes.out_channels
        bias = nn.Parameter(dense.weight.new_zeros(out)) if self.geometry.bias else None
        mixing = self.geometry.pointwise if spatial else partial(nn.Conv1d, kernel_size=1)
        self.split = Reshape((-1, inner_columns, *[0] * spatial))
        self.inner = self.geometry.layer(inner_columns, rank * inner_rows, bias=False, **like)
        by_row = (0, rank, -1, *[0] * (spatial - 1))
        self.gather = Reshape(by_row, (-1, columns * rank, *[0] * max(1, spatial)))
        self.outer = mixing(columns * rank, rows, bias=False, **like)
        self.join = Reshape((0, out, -1, *[0] * (spatial - 1)) if spatial else (-1, out), bias=bias)

    @property
    def bias(self) -> torch.Tensor | None:
        return self.join.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.join(self.outer(self.gather(self.inner(self.split(x)))))
        return y if self.geometry.spatial else y.reshape(*x.shape[:-1], -1)

    def plain_layers(self) -> dict[str, DecomposableModule]:
        """Return none: nothing but reshapes joins the stages."""
        return {}

    def row(self) -> list[nn.Module]:
        return list(self.children())

    def cores(self) -> Cores:
        first, second = self.tensor_format.core_shapes(self.modes, self.ranks)
        weights: Cores = [self.outer.weight, self.inner.weight]  # type: ignore[list-item]
        return [weights[0].reshape(*first[1:], first[0]).permute(2, 0, 1), weights[1].reshape(second)]

    def set_cores(self, cores: Cores) -> None:
        for stage, core in ((self.outer, cores[0].permute(1, 2, 0)), (self.inner, cores[1])):
            weight: torch.Tensor = stage.weight  # type: ignore[assignment]
            weight.copy_(core.reshape(weight.shape))


@register_format
class Kronecker(TensorFormat):
    """W = sum over r of A_r kron B_r; A_r (out / p, in / q), B_r (p, q, kernel).

    Executed as B on groups of q input channels, then A on what has the same place in each group. Rearranged
    to a row an element of A and a column an element of B, the weight has rank r, so the algebraic solution is
    a truncated SVD (Van Loan and Pitsianis, section 3).
    """

    name = "kronecker"
    description = "a sum of Kronecker products: a small kernel on groups of channels, then a small matrix"
    layer = _KroneckerLayer

    def max_ranks(self, modes: WeightModes) -> Ranks:
        blocks = _blocks(modes)
        return (min(math.prod(blocks[:2]), math.prod(blocks[2:]) * modes.kernel),)

    def core_shapes(self, modes: WeightModes, ranks: Ranks) -> list[tuple[int, ...]]:
        blocks = _blocks(modes)
        return [(ranks[0], *blocks[:2]), (ranks[0], *blocks[2:], modes.kernel)]

    def reconstruct(self, cores: Cores, modes: WeightModes) -> torch.Tensor:
        (rows, columns), (inner_rows, inner_columns) = cores[0].shape[1:], cores[1].shape[1:3]
        pairs = product(cores[0].flatten(1).T, cores[1].flatten(1))
        pairs = pairs.reshape(rows, columns, inner_rows, inner_columns, modes.kernel)
        return pairs.transpose(1, 2).reshape(modes.out_channels, modes.in_channels, modes.kernel)

    def start(self, weight: torch.Tensor, modes: WeightModes, ranks: Ranks) -> Cores:
        """Return the truncated SVD of the rearranged weight, the best of its rank."""
        first, second = self.core_shapes(modes, ranks)
        rows, columns, inner_rows, inner_columns = _blocks(modes)
        by_block = weight.reshape(rows, inner_rows, columns, inner_columns, modes.kernel).transpose(1, 2)
        rearranged = by_block.reshape(rows * columns, -1)
        vectors = leading_left_vectors(rearranged, ranks[0])
        return [vectors.T.reshape(first), (vectors.T @ rearranged).reshape(second)]

    def stage_macs(self, spec: LayerSpec, modes: WeightModes, ranks: Ranks) -> dict[str, int]:
        """Count B at every group of inputs and A at every row of B."""
        first, second = map(math.prod, self.core_shapes(modes, ranks))
        blocks, positions = _blocks(modes), spec.output_positions
        chain = positions * (blocks.columns * second + blocks.inner_rows * first)
        return {"chain": chain, "dense": positions * modes.elements}

    def rows(self, spec: LayerSpec, modes: WeightModes, ranks: Ranks) -> int:
        """Count the output channels of both stages, or the first axes of the cores."""
        if not self.form(spec, modes, ranks).in_integers:
            return super().rows(spec, modes, ranks)
        return ranks[0] * _blocks(modes).inner_rows + _blocks(modes).rows
