"""Factorise weights by CP (CANDECOMP/PARAFAC), a sum of rank-one terms, with a joint kernel mode.

After Lebedev et al., ICLR 2015, who keep the kernel's axes apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from decomposition.calibration.metric import Metric
from decomposition.formats.layers import StagedLayer
from decomposition.formats.tensor_format import (
    Cores,
    Ranks,
    TensorFormat,
    leading_left_vectors,
    register_format,
)
from decomposition.formats.tensorly_objects import TensorlyObject, check_sizes, in_tensorly_backend
from decomposition.network.geometry import WeightModes
from decomposition.network.layers import LayerSpec

# Least relative size of a term, so that small terms do not scale their factors to nothing.
_SMALLEST_TERM = 1e-2


class _CPLayer(StagedLayer):
    """B', C' (depthwise) and A as layers."""

    def stage_channels(self) -> tuple[int, int, int]:
        return self.ranks[0], self.ranks[0], self.ranks[0]

    def weights_from_cores(self, cores: Cores) -> Cores:
        if self.modes.kernel == 1:
            return [cores[1].T, cores[0]]
        return [cores[1].T, cores[2].T[:, None, :], cores[0]]

    def cores_from_weights(self, weights: Cores) -> Cores:
        if self.modes.kernel == 1:
            return [weights[1], weights[0].T]
        return [weights[2], weights[0].T, weights[1][:, 0, :].T]


@register_format
class CP(TensorFormat):
    """W[o,i,k] = sum over r of A[o,r] B[i,r] C[k,r]; without a kernel W = A B^T.

    Executed as 1x1 (in to r), a depthwise kernel and 1x1 (r to out).
    """

    name = "cp"
    description = "CP: 1x1, depthwise kernel, 1x1"
    layer = _CPLayer
    cancels = True

    def max_ranks(self, modes: WeightModes) -> Ranks:
        """Return the bound on the CP rank of a tensor: the product of all modes but the largest."""
        sizes = sorted((modes.out_channels, modes.in_channels, modes.kernel))
        return (sizes[0] * sizes[1],)

    def core_shapes(self, modes: WeightModes, ranks: Ranks) -> list[tuple[int, ...]]:
        sizes = (modes.out_channels, modes.in_channels, *((modes.kernel,) if modes.kernel > 1 else ()))
        return [(size, ranks[0]) for size in sizes]

    def halves(self, cores: Cores, modes: WeightModes) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A and the Khatri-Rao product of B and C."""
        if modes.kernel == 1:
            return cores[0], cores[1].T
        output, inner, kernel = cores
        return output, torch.einsum("ir,kr->rik", inner, kernel).reshape(output.shape[1], -1)

    def set_output(self, cores: Cores, modes: WeightModes, output: torch.Tensor) -> Cores:
        return [output, *cores[1:]]

    def start(self, weight: torch.Tensor, modes: WeightModes, ranks: Ranks) -> Cores:
        """Start from rank-one terms of the slices of a Tucker-compressed weight."""
        return self.starter(weight, modes)(ranks)

    def starter(
        self, weight: torch.Tensor, modes: WeightModes, metric: Metric | None = None
    ) -> Callable[[Ranks], Cores]:
        """Decompose the weight's slices once; return the function that starts any rank from them."""
        matrix = weight.reshape(modes.out_channels, -1)
        if modes.kernel == 1:
            vectors = leading_left_vectors(matrix, self.max_ranks(modes)[0])
            features = (vectors.T @ matrix).T
            return lambda ranks: [vectors[:, : ranks[0]], features[:, : ranks[0]]]
        directions = leading_left_vectors(weight.movedim(2, 0).reshape(modes.kernel, -1), modes.kernel)
        slices = torch.einsum("oik,kd->doi", weight, directions)
        left, values, right = torch.linalg.svd(slices, full_matrices=False)
        order = values.flatten().argsort(descending=True, stable=True)

        def start(ranks: Ranks) -> Cores:
            largest = order[: ranks[0]]
            slice_index, pair = largest // values.shape[1], largest % values.shape[1]
            cores = [
                left[slice_index, :, pair].T * values[slice_index, pair],
                right[slice_index, pair, :].T,
                directions[:, slice_index],
            ]
            return self._filled(cores, weight, ranks[0])

        return start

    def _filled(self, cores: Cores, weight: torch.Tensor, rank: int) -> Cores:
        """Add small random terms if the slices have fewer singular pairs than the rank."""
        missing = rank - cores[0].shape[1]
        if missing <= 0:
            return cores
        generator = torch.Generator().manual_seed(rank)
        filled = []
        for position, core in enumerate(cores):
            noise = torch.randn(core.shape[0], missing, generator=generator, dtype=core.dtype)
            scale = 1e-2 * weight.square().mean().sqrt() if position == 0 else 1.0
            filled.append(torch.cat([core, noise * scale], dim=1))
        return filled

    def from_halves(
        self, output: torch.Tensor, features: torch.Tensor, modes: WeightModes, ranks: Ranks
    ) -> Cores:
        return [output, features.T]

    def conditioned(self, cores: Cores) -> Cores:
        """Scale the columns of B and C to the terms' sizes: then all terms have the same curvature."""
        if len(cores) < 3:
            return cores
        output, inner, kernel = self.normalised(cores)
        sizes = output.norm(dim=0)
        sizes = (sizes / sizes.max().clamp_min(1e-300)).clamp_min(_SMALLEST_TERM)
        return [output / sizes.square(), inner * sizes, kernel * sizes]

    def normalised(self, cores: Cores) -> Cores:
        """Scale the columns of B and C to norm 1."""
        if len(cores) < 3:
            return cores
        output, inner, kernel = cores
        lengths = [core.norm(dim=0).clamp_min(1e-300) for core in (inner, kernel)]
        return [output * lengths[0] * lengths[1], inner / lengths[0], kernel / lengths[1]]

    def stage_macs(self, spec: LayerSpec, modes: WeightModes, ranks: Ranks) -> dict[str, int]:
        rank = ranks[0]
        if modes.kernel == 1:
            return {"chain": spec.output_positions * rank * (modes.in_channels + modes.out_channels)}
        entering = spec.input_positions * rank * modes.in_channels
        return {"chain": entering + spec.output_positions * rank * (modes.kernel + modes.out_channels)}

    def rows(self, spec: LayerSpec, modes: WeightModes, ranks: Ranks) -> int:
        return (1 if modes.kernel == 1 else 2) * ranks[0] + modes.out_channels

    def to_tensorly(self, cores: Cores, modes: WeightModes) -> Any:
        from tensorly.cp_tensor import CPTensor

        weights = torch.ones_like(cores[0][0])
        return CPTensor((in_tensorly_backend(weights), [in_tensorly_backend(core) for core in cores]))

    def from_tensorly(self, tensor: TensorlyObject, modes: WeightModes) -> tuple[Cores, Ranks, WeightModes]:
        """Read a CPTensor: A takes the weights in, several kernel factors become their Khatri-Rao product."""
        check_sizes(tensor, modes)
        output, inner, *rest = tensor.factors
        rank = output.shape[1]
        kernel = output.new_ones(1, rank) if tensor.head is None else tensor.head[None]
        for factor in rest:
            kernel = torch.einsum("pr,qr->pqr", kernel, factor).reshape(-1, rank)
        cores = [output * kernel, inner] if modes.kernel == 1 else [output, inner, kernel]
        return cores, (rank,), modes
