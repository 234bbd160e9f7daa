"""Factorise weights into two matrices: spatial SVD and pivoting factorisation (PIFA, arXiv:2501.19090)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from decomposition.formats.layers import FactorisedLayer, full_precision
from decomposition.formats.tensor_format import (
    Cores,
    Ranks,
    TensorFormat,
    leading_left_vectors,
    register_format,
)
from decomposition.network.geometry import WeightModes
from decomposition.network.layers import DecomposableModule, LayerSpec


class _SpatialLayer(FactorisedLayer):
    """B and A as layers; without a width the first slides along both axes and the second mixes channels."""

    def make_parts(self, dense: DecomposableModule) -> None:
        like: dict[str, Any] = {"device": dense.weight.device, "dtype": dense.weight.dtype}
        geometry, rank = self.geometry, self.ranks[0]
        both = height_and_width(self.modes)[1] == 1
        first = geometry if both else geometry.along(0)
        last = geometry.pointwise if both else geometry.along(1).layer
        self.vertical: nn.Module = first.layer(geometry.in_channels, rank, bias=False, **like)
        self.horizontal: nn.Module = last(rank, geometry.out_channels, bias=geometry.bias, **like)

    def output_stage(self, cores: Cores) -> tuple[nn.Module, torch.Tensor]:
        return self.horizontal, cores[0]

    @property
    def bias(self) -> torch.Tensor | None:
        return self.horizontal.bias  # type: ignore[return-value]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.horizontal(self.vertical(x))
        return result

    def cores(self) -> Cores:
        output, inner = self.tensor_format.core_shapes(self.modes, self.ranks)
        weights: Cores = [self.horizontal.weight, self.vertical.weight]  # type: ignore[list-item]
        return [weights[0].reshape(output), weights[1].reshape(inner)]

    def set_cores(self, cores: Cores) -> None:
        for layer, core in zip((self.horizontal, self.vertical), cores, strict=True):
            parameter: torch.Tensor = layer.weight  # type: ignore[assignment]
            parameter.copy_(core.reshape(parameter.shape))


@register_format
class SpatialSVD(TensorFormat):
    """W[o,i,y,x] = sum over r of A[o,r,x] B[r,i,y]; a kernel of one axis is all in B, without one W = A B.

    Executed as a kernel of height y and width 1 (in to r), then one of height 1 and width x (r to out). The
    weight's unfolding (out * width, in * height) has rank r, so the algebraic solution is a truncated SVD
    (Tai et al., ICLR 2016, theorem 1).
    """

    name = "spatial_svd"
    description = "spatial SVD: a vertical convolution, then a horizontal one"
    layer = _SpatialLayer
    splits_kernel = True

    def max_ranks(self, modes: WeightModes) -> Ranks:
        height, width = height_and_width(modes)
        return (min(modes.out_channels * width, modes.in_channels * height),)

    def core_shapes(self, modes: WeightModes, ranks: Ranks) -> list[tuple[int, ...]]:
        height, width = height_and_width(modes)
        return [(modes.out_channels, ranks[0], width), (ranks[0], modes.in_channels, height)]

    def halves(self, cores: Cores, modes: WeightModes) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A as a matrix (out, r * width) and B at every horizontal offset, zero elsewhere."""
        output, inner = cores
        if output.shape[2] == 1:
            return output.flatten(1), inner.reshape(-1, modes.columns)
        offsets = torch.eye(output.shape[2], dtype=inner.dtype, device=inner.device)
        features = torch.einsum("riy,wx->rwiyx", inner, offsets)
        return output.flatten(1), features.reshape(-1, modes.columns)

    def set_output(self, cores: Cores, modes: WeightModes, output: torch.Tensor) -> Cores:
        return [output.reshape(cores[0].shape), cores[1]]

    def start(self, weight: torch.Tensor, modes: WeightModes, ranks: Ranks) -> Cores:
        """Return the truncated SVD of the unfolding (out * width, in * height), the best of its rank."""
        height, width = height_and_width(modes)
        by_axis = weight.reshape(modes.out_channels, modes.in_channels, height, width)
        unfolding = by_axis.permute(0, 3, 1, 2).reshape(modes.out_channels * width, -1)
        vectors = leading_left_vectors(unfolding, ranks[0])
        output = vectors.reshape(modes.out_channels, width, ranks[0]).transpose(1, 2)
        inner = (vectors.T @ unfolding).reshape(ranks[0], modes.in_channels, height)
        return [output.contiguous(), inner]

    def from_halves(
        self, output: torch.Tensor, features: torch.Tensor, modes: WeightModes, ranks: Ranks
    ) -> Cores:
        return [output[:, :, None], features.reshape(len(features), modes.in_channels, -1)]

    def stage_macs(self, spec: LayerSpec, modes: WeightModes, ranks: Ranks) -> dict[str, int]:
        """Count both stages; the map between them has the output's height and the input's width."""
        height, width = height_and_width(modes)
        between = spec.output_positions
        if width > 1:
            sizes = zip(spec.output_sizes, spec.input_sizes, strict=True)
            between = sum(math.prod(output[:-1]) * inp[-1] for output, inp in sizes)
        entering = between * modes.in_channels * height
        leaving = spec.output_positions * modes.out_channels * width
        return {"chain": ranks[0] * (entering + leaving)}

    def rows(self, spec: LayerSpec, modes: WeightModes, ranks: Ranks) -> int:
        return ranks[0] + modes.out_channels


def height_and_width(modes: WeightModes) -> tuple[int, int]:
    """Return the kernel's height and width; a Conv1d's kernel and joint positions count as height."""
    height, width = (*modes.kernel_size, 1, 1)[:2]
    return height, width


class PivotedLayer(FactorisedLayer):
    """B as a layer of r outputs, and the rows of A that are not the identity's."""

    pivoted = True
    order: torch.Tensor

    def make_parts(self, dense: DecomposableModule) -> None:
        weight, rank, outputs = dense.weight, self.ranks[0], self.modes.out_channels
        like: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
        self.features = self.geometry.layer(self.modes.in_channels, rank, bias=False, **like)
        self.mixing = nn.Parameter(weight.new_zeros(outputs - rank, rank))
        self.bias_parameter = nn.Parameter(weight.new_zeros(outputs)) if self.geometry.bias else None
        self.register_buffer("order", torch.arange(outputs, dtype=torch.int32, device=weight.device))

    @property
    def bias(self) -> torch.Tensor | None:
        return self.bias_parameter

    def output_half(self) -> torch.Tensor:
        """Return A, shape (out, r)."""
        identity = torch.eye(self.ranks[0], dtype=self.mixing.dtype, device=self.mixing.device)
        return torch.cat([identity, self.mixing]).index_select(0, self.order)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the features and mix them, or contract both factors and convolve."""
        if self.execution == "dense":
            return self.apply_dense(x)
        return self.geometry.mix(self.features(x), self.output_half(), self.bias)

    def contracted(self, dense: DecomposableModule) -> FactorisedLayer:
        return PivotedLayer(dense, self.tensor_format, self.modes, self.ranks, "dense")

    def plain_layers(self) -> dict[str, DecomposableModule]:
        return self.two_layers(*self.cores())

    def decay_shares(self) -> dict[nn.Parameter, float]:
        """Let B alone decay: A has fixed identity rows, and the product decays as B does."""
        weight: nn.Parameter = self.features.weight  # type: ignore[assignment]
        return {weight: 1.0, self.mixing: 0.0}

    def cores(self) -> Cores:
        weight: torch.Tensor = self.features.weight  # type: ignore[assignment]
        return [self.output_half(), weight.flatten(1)]

    def set_cores(self, cores: Cores) -> None:
        """Set the layer to the product of two cores; Gaussian elimination chooses the identity's rows."""
        output, features = (core.double() for core in cores)
        rank = self.ranks[0]
        with full_precision(output):
            # B = R' Q', Q' with orthonormal rows: eliminating A R' selects the same rows as eliminating A B.
            factors, swaps, _ = torch.linalg.lu_factor_ex(output @ torch.linalg.qr(features.T).R.T)
            first = _eliminated(swaps.tolist(), len(output))
            lower = factors[:rank].T
            mixing = torch.linalg.solve_triangular(lower, factors[rank:].T, upper=True, unitriangular=True).T
            weight: torch.Tensor = self.features.weight  # type: ignore[assignment]
            weight.copy_((output[first[:rank]] @ features).reshape(weight.shape))
        self.mixing.copy_(mixing)
        self.order.copy_(torch.tensor(first).argsort())


@register_format
class PivotingFactorisation(TensorFormat):
    """W = A B with r rows of A those of the identity; B (r, in, kernel), A (out, r).

    Any two factors can be written so: A B = (A P^-1)(P B) for r independent rows P of A. It stores r^2
    numbers fewer than A and B have (PIFA, arXiv 2501.19090, section 3). Executed as the dense layer with r
    outputs and a 1x1 (r to out), whose weight is put together when it is used.
    """

    name = "pifa"
    description = "pivoting factorisation: two matrices, one with the rows of an identity inside"
    stores_less_alone = True  # than Tucker or the spatial SVD
    layer = PivotedLayer

    def max_ranks(self, modes: WeightModes) -> Ranks:
        return (min(modes.out_channels, modes.columns),)

    def core_shapes(self, modes: WeightModes, ranks: Ranks) -> list[tuple[int, ...]]:
        return [(modes.out_channels, ranks[0]), (ranks[0], modes.columns)]

    def params(self, modes: WeightModes, ranks: Ranks) -> int:
        """Count B and the rows of A that are not the identity's; the order of the outputs has no weights."""
        return super().params(modes, ranks) - ranks[0] ** 2

    def halves(self, cores: Cores, modes: WeightModes) -> tuple[torch.Tensor, torch.Tensor]:
        return cores[0], cores[1]

    def set_output(self, cores: Cores, modes: WeightModes, output: torch.Tensor) -> Cores:
        return [output, cores[1]]

    def start(self, weight: torch.Tensor, modes: WeightModes, ranks: Ranks) -> Cores:
        """Return the truncated SVD of the matrix (out, in * kernel), the best of its rank."""
        matrix = weight.reshape(modes.out_channels, -1)
        vectors = leading_left_vectors(matrix, ranks[0])
        return [vectors, vectors.T @ matrix]

    def from_halves(
        self, output: torch.Tensor, features: torch.Tensor, modes: WeightModes, ranks: Ranks
    ) -> Cores:
        return [output, features]

    def stage_macs(self, spec: LayerSpec, modes: WeightModes, ranks: Ranks) -> dict[str, int]:
        return {"chain": spec.output_positions * ranks[0] * (modes.columns + modes.out_channels)}

    def rows(self, spec: LayerSpec, modes: WeightModes, ranks: Ranks) -> int:
        return modes.out_channels


def _eliminated(swaps: list[int], rows: int) -> list[int]:
    """Return the rows in LAPACK's order of elimination, from its list of swaps (counted from 1)."""
    order = list(range(rows))
    for row, other in enumerate(swaps):
        order[row], order[other - 1] = order[other - 1], order[row]
    return order
