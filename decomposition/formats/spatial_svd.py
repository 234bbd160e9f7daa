"""Spatial SVD: a vertical convolution, then a horizontal one (Jaderberg et al., BMVC 2014, scheme 2)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from decomposition.formats.algebra import leading_left_vectors
from decomposition.formats.base import Cores, Ranks, TensorFormat, register_format
from decomposition.formats.factorised import FactorisedLayer
from decomposition.network.kinds import DecomposableModule
from decomposition.network.layers import LayerSpec
from decomposition.network.modes import WeightModes


@register_format
class SpatialSVD(TensorFormat):
    """W[o,i,y,x] = sum over r of A[o,r,x] B[r,i,y]; a kernel of one axis is all in B, without one W = A B.

    Executed as a kernel of height y and width 1 (in to r), then one of height 1 and width x (r to out). The
    weight's unfolding (out * width, in * height) has rank r, so the algebraic solution is a truncated SVD
    (Tai et al., ICLR 2016, theorem 1).
    """

    name = "spatial_svd"
    description = "spatial SVD: a vertical convolution, then a horizontal one"
    splits_kernel = True
    two_matrices = True

    def max_ranks(self, modes: WeightModes) -> Ranks:
        """Return the smaller side of the unfolding (out * width, in * height)."""
        height, width = height_and_width(modes)
        return (min(modes.out_channels * width, modes.in_channels * height),)

    def core_shapes(self, modes: WeightModes, ranks: Ranks) -> list[tuple[int, ...]]:
        """Return the shapes of A (out, r, width) and B (r, in, height)."""
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
        """Replace A."""
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
        """Take A and Q as they are."""
        return [output[:, :, None], features[:, :, None]]

    def build(
        self, dense: DecomposableModule, spec: LayerSpec, modes: WeightModes, ranks: Ranks
    ) -> FactorisedLayer:
        """Make the vertical and the horizontal layer."""
        return _SpatialLayer(dense, self, modes, ranks, "chain")

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
        """Count the output channels of both layers."""
        return ranks[0] + modes.out_channels


def height_and_width(modes: WeightModes) -> tuple[int, int]:
    """Return the kernel's height and width; a Conv1d's kernel and joint positions count as height."""
    height, width = (*modes.kernel_size, 1, 1)[:2]
    return height, width


class _SpatialLayer(FactorisedLayer):
    """B and A as layers; without a width the first slides along both axes and the second mixes channels."""

    def __init__(
        self,
        dense: DecomposableModule,
        tensor_format: TensorFormat,
        modes: WeightModes,
        ranks: Ranks,
        execution: str,
    ) -> None:
        super().__init__(dense, tensor_format, modes, ranks, execution)
        like: dict[str, Any] = {"device": dense.weight.device, "dtype": dense.weight.dtype}
        geometry, rank = self.geometry, ranks[0]
        both = height_and_width(modes)[1] == 1
        first = geometry if both else geometry.along(0)
        last = geometry.pointwise if both else geometry.along(1).layer
        self.vertical: nn.Module = first.layer(geometry.in_channels, rank, bias=False, **like)
        self.horizontal: nn.Module = last(rank, geometry.out_channels, bias=geometry.bias, **like)

    def output_stage(self, cores: Cores) -> tuple[nn.Module, torch.Tensor]:
        """Return the horizontal layer and its weight."""
        return self.horizontal, cores[0]

    @property
    def bias(self) -> torch.Tensor | None:
        """The horizontal layer's bias."""
        return self.horizontal.bias  # type: ignore[return-value]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the vertical layer, then the horizontal one."""
        result: torch.Tensor = self.horizontal(self.vertical(x))
        return result

    def cores(self) -> Cores:
        """Read the cores off the layers' weights."""
        output, inner = self.tensor_format.core_shapes(self.modes, self.ranks)
        weights: Cores = [self.horizontal.weight, self.vertical.weight]  # type: ignore[list-item]
        return [weights[0].reshape(output), weights[1].reshape(inner)]

    def set_cores(self, cores: Cores) -> None:
        """Copy the cores into the layers' weights."""
        for layer, core in zip((self.horizontal, self.vertical), cores, strict=True):
            parameter: torch.Tensor = layer.weight  # type: ignore[assignment]
            parameter.copy_(core.reshape(parameter.shape))
