"""Pivoting factorisation: two matrices without the numbers that their bond holds twice (Zhao et al. 2025)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from decomposition.formats.algebra import leading_left_vectors
from decomposition.formats.base import Cores, Ranks, TensorFormat, register_format
from decomposition.formats.factorised import FactorisedLayer, full_precision
from decomposition.network.kinds import DecomposableModule
from decomposition.network.layers import LayerSpec
from decomposition.network.modes import WeightModes


@register_format
class PivotingFactorisation(TensorFormat):
    """W = A B with r rows of A those of the identity; B (r, in, kernel), A (out, r).

    Any two factors can be written so: A B = (A P^-1)(P B) for r independent rows P of A. It stores r^2
    numbers fewer than A and B have (PIFA, arXiv 2501.19090, section 3). Executed as the dense layer with r
    outputs and a 1x1 (r to out), whose weight is put together when it is used.
    """

    name = "pifa"
    description = "pivoting factorisation: two matrices, one with the rows of an identity inside"
    any_matrices = True
    assembled = True

    def max_ranks(self, modes: WeightModes) -> Ranks:
        """Return the smaller side of the matrix (out, in * kernel)."""
        return (min(modes.out_channels, modes.columns),)

    def core_shapes(self, modes: WeightModes, ranks: Ranks) -> list[tuple[int, ...]]:
        """Return the shapes of A (out, r) and B (r, in * kernel)."""
        return [(modes.out_channels, ranks[0]), (ranks[0], modes.columns)]

    def params(self, modes: WeightModes, ranks: Ranks) -> int:
        """Count B and the rows of A that are not the identity's; the order of the outputs has no weights."""
        return super().params(modes, ranks) - ranks[0] ** 2

    def halves(self, cores: Cores, modes: WeightModes) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A and B."""
        return cores[0], cores[1]

    def set_output(self, cores: Cores, modes: WeightModes, output: torch.Tensor) -> Cores:
        """Replace A."""
        return [output, cores[1]]

    def start(self, weight: torch.Tensor, modes: WeightModes, ranks: Ranks) -> Cores:
        """Return the truncated SVD of the matrix (out, in * kernel), the best of its rank."""
        matrix = weight.reshape(modes.out_channels, -1)
        vectors = leading_left_vectors(matrix, ranks[0])
        return [vectors, vectors.T @ matrix]

    def from_halves(
        self, output: torch.Tensor, features: torch.Tensor, modes: WeightModes, ranks: Ranks
    ) -> Cores:
        """Take A and Q as they are."""
        return [output, features]

    def build(
        self, dense: DecomposableModule, spec: LayerSpec, modes: WeightModes, ranks: Ranks
    ) -> FactorisedLayer:
        """Make both layers."""
        return PivotedLayer(dense, self, modes, ranks, "chain")

    def stage_macs(self, spec: LayerSpec, modes: WeightModes, ranks: Ranks) -> dict[str, int]:
        """Count the products with B and with A."""
        return {"chain": spec.output_positions * ranks[0] * (modes.columns + modes.out_channels)}

    def rows(self, spec: LayerSpec, modes: WeightModes, ranks: Ranks) -> int:
        """Count the rows of B and of A that are stored."""
        return modes.out_channels


class PivotedLayer(FactorisedLayer):
    """B as a layer of r outputs, and the rows of A that are not the identity's."""

    order: torch.Tensor

    def __init__(
        self,
        dense: DecomposableModule,
        tensor_format: TensorFormat,
        modes: WeightModes,
        ranks: Ranks,
        execution: str,
    ) -> None:
        super().__init__(dense, tensor_format, modes, ranks, execution)
        weight, rank, outputs = dense.weight, ranks[0], modes.out_channels
        like: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
        self.features = self.geometry.layer(modes.in_channels, rank, bias=False, **like)
        self.mixing = nn.Parameter(weight.new_zeros(outputs - rank, rank))
        self.bias_parameter = nn.Parameter(weight.new_zeros(outputs)) if self.geometry.bias else None
        self.register_buffer("order", torch.arange(outputs, dtype=torch.int32, device=weight.device))

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias."""
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

    def plain_layers(self) -> dict[str, DecomposableModule]:
        """Return B and A as layers."""
        return self.two_layers(*self.cores())

    def decay_shares(self) -> dict[nn.Parameter, float]:
        """Let B decay alone: A has rows that cannot, and their product decays as B does."""
        weight: nn.Parameter = self.features.weight  # type: ignore[assignment]
        return {weight: 1.0, self.mixing: 0.0}

    def cores(self) -> Cores:
        """Return A and B."""
        weight: torch.Tensor = self.features.weight  # type: ignore[assignment]
        return [self.output_half(), weight.flatten(1)]

    def set_cores(self, cores: Cores) -> None:
        """Write the product of two cores in this form.

        Gaussian elimination of the product's rows chooses those of the identity, so that no row of A outgrows
        them much, and needs no inverse where the product's rank is less than r.
        """
        output, features = (core.double() for core in cores)
        rank = self.ranks[0]
        with full_precision(output):
            # B = R' Q', Q' with orthonormal rows: the rows of A R' are to one another what those of A B are.
            factors, swaps, _ = torch.linalg.lu_factor_ex(output @ torch.linalg.qr(features.T).R.T)
            first = _eliminated(swaps.tolist(), len(output))
            lower = factors[:rank].T
            mixing = torch.linalg.solve_triangular(lower, factors[rank:].T, upper=True, unitriangular=True).T
            weight: torch.Tensor = self.features.weight  # type: ignore[assignment]
            weight.copy_((output[first[:rank]] @ features).reshape(weight.shape))
        self.mixing.copy_(mixing)
        self.order.copy_(torch.tensor(first).argsort())


def _eliminated(swaps: list[int], rows: int) -> list[int]:
    """Return the rows in the order in which LAPACK eliminated them; it says what it swapped, from 1 on."""
    order = list(range(rows))
    for row, other in enumerate(swaps):
        order[row], order[other - 1] = order[other - 1], order[row]
    return order
