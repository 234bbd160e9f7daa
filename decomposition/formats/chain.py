"""Factorise weights as tensor trains and tensor rings: open and closed chains of three-way cores."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import nn

from decomposition.errors import DecompositionError
from decomposition.formats.layers import ContractedLayer, FactorisedLayer, StagedLayer
from decomposition.formats.tensor_format import (
    Cores,
    Ranks,
    TensorFormat,
    contract_chain,
    leading_left_vectors,
    register_format,
    split_chain,
)
from decomposition.formats.tensorly_objects import TensorlyObject, in_tensorly_backend, wrong_sizes
from decomposition.network.geometry import WeightModes
from decomposition.network.layers import DecomposableModule, LayerSpec


class ChainFormat(TensorFormat):
    """Cores G_j (bond, mode, next bond) over the modes out..., in..., kernel.

    W[o.., i.., k] is the trace of the product of the cores' slices. In a ring the last bond returns to the
    first core, in a train that bond is 1. Ranks are the bonds left of every core; a train leaves out its
    first, which is 1.
    """

    closed: ClassVar[bool]
    tensorisable = True
    bonds_in_channels = 2
    tensorly_kinds = ("tensor_ring", "tensor_train")

    def max_ranks(self, modes: WeightModes) -> Ranks:
        """Bound each bond by the rank that a train needs there: the smaller side of the unfolding."""
        sizes = modes.sizes
        inner = tuple(
            min(math.prod(sizes[:position]), math.prod(sizes[position:])) for position in range(1, len(sizes))
        )
        if not self.closed:
            return inner
        # The closing bond joins the last mode and the first, as the others join their neighbours.
        return (min(sizes[0], math.prod(sizes[1:])), *inner)

    def bonds(self, modes: WeightModes, ranks: Ranks) -> tuple[int, ...]:
        """Return the bond left of every core and, last, the one that closes the chain."""
        return (*ranks, ranks[0]) if self.closed else (1, *ranks, 1)

    def core_shapes(self, modes: WeightModes, ranks: Ranks) -> list[tuple[int, ...]]:
        bonds = self.bonds(modes, ranks)
        return [(bonds[j], size, bonds[j + 1]) for j, size in enumerate(modes.sizes)]

    def merged(self, cores: Cores, modes: WeightModes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Contract the cores to one for the outputs, one for the inputs and one for the kernel."""
        output, inner = _channels(cores, modes)
        if modes.kernel > 1:
            return output, inner, cores[-1]
        identity = torch.eye(output.shape[0], dtype=output.dtype, device=output.device)
        return output, inner, identity[:, None, :]

    def halves(self, cores: Cores, modes: WeightModes) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output core as a matrix and the contraction of input and kernel cores."""
        output, inner = _channels(cores, modes)
        # Without a kernel no identity is made: for one on the meta device torch would import its compiler.
        features = contract_chain([inner, cores[-1]]) if modes.kernel > 1 else inner
        return (
            output.permute(1, 0, 2).reshape(modes.out_channels, -1),
            features.permute(2, 0, 1).reshape(-1, modes.columns),
        )

    def set_output(self, cores: Cores, modes: WeightModes, output: torch.Tensor) -> Cores:
        left, _, right = cores[0].shape
        return [output.reshape(modes.out_channels, left, right).permute(1, 0, 2).contiguous(), *cores[1:]]

    def start(self, weight: torch.Tensor, modes: WeightModes, ranks: Ranks) -> Cores:
        """TT-SVD for a train (Oseledets 2011), TR-SVD for a ring (Zhao et al. 2016, algorithm 1)."""
        bonds = self.bonds(modes, ranks)
        first, sizes = modes.sizes[0], modes.sizes
        matrix = weight.reshape(first, -1)
        closing, opening = bonds[0], bonds[1]
        vectors = leading_left_vectors(matrix, closing * opening)
        head = vectors.reshape(first, closing, opening).permute(1, 0, 2)
        rest = (vectors.T @ matrix).reshape(closing, opening, -1).movedim(0, -1)
        return [head.contiguous(), *split_chain(rest, sizes[1:], bonds[2:-1])]

    def from_halves(
        self, output: torch.Tensor, features: torch.Tensor, modes: WeightModes, ranks: Ranks
    ) -> Cores:
        left, right = self.bonds(modes, ranks)[:2]
        inner = features.reshape(left, right, modes.in_channels).permute(1, 2, 0)
        return [output.reshape(-1, left, right).permute(1, 0, 2).contiguous(), inner.contiguous()]

    def build(
        self, dense: DecomposableModule, spec: LayerSpec, modes: WeightModes, ranks: Ranks
    ) -> FactorisedLayer:
        """Make the cheapest execution of `stage_macs`, of plain layers if every core is a stage."""
        execution = self.execution(spec, modes, ranks)
        staged = modes.plain and (execution == "chain" or (modes.kernel == 1 and execution == "half"))
        return (_ChainLayer if staged else ContractedLayer)(dense, self, modes, ranks, execution)

    def rows(self, spec: LayerSpec, modes: WeightModes, ranks: Ranks) -> int:
        """Count the output channels of the stages, or the first axes of the cores."""
        if not self.form(spec, modes, ranks).in_integers:
            return super().rows(spec, modes, ranks)
        shapes = self.core_shapes(modes, ranks)
        a, b, c = shapes[0][0], shapes[0][2], shapes[1][2]
        return b * c + (0 if modes.kernel == 1 else a) + modes.out_channels

    def stage_macs(self, spec: LayerSpec, modes: WeightModes, ranks: Ranks) -> dict[str, int]:
        """Count three stages (`chain`), input and kernel contracted (`half`), and all (`dense`)."""
        bonds = self.bonds(modes, ranks)
        a, b, c = bonds[0], bonds[len(modes.out)], bonds[len(modes.out) + len(modes.inp)]
        into, out = spec.input_positions, spec.output_positions
        leaving = out * a * b * modes.out_channels
        dense = out * modes.elements
        if modes.kernel == 1:
            return {"half": out * a * b * modes.in_channels + leaving, "dense": dense}
        return {
            "chain": into * b * c * modes.in_channels + out * a * b * c * modes.kernel + leaving,
            "half": out * a * b * modes.columns + leaving,
            "dense": dense,
        }

    def to_tensorly(self, cores: Cores, modes: WeightModes) -> Any:
        from tensorly.tr_tensor import TRTensor
        from tensorly.tt_tensor import TTTensor

        return (TRTensor if self.closed else TTTensor)([in_tensorly_backend(core) for core in cores])

    def from_tensorly(self, tensor: TensorlyObject, modes: WeightModes) -> tuple[Cores, Ranks, WeightModes]:
        """Read a TTTensor or TRTensor over (out, in, kernel), each of them one mode or several."""
        sizes = tensor.sizes
        out = _modes_for(sizes, modes.out_channels)
        inp = _modes_for(sizes[out:], modes.in_channels)
        kernel = sizes[out + inp :]
        known = kernel in (modes.kernel_size, (modes.kernel,)) or (modes.kernel == 1 and not kernel)
        if not (out and inp and known):
            channels = (modes.out_channels, modes.in_channels)
            raise wrong_sizes(tensor, [(*channels, modes.kernel), (*channels, *modes.kernel_size)])
        split = WeightModes(sizes[:out], sizes[out : out + inp], modes.kernel, modes.kernel_size)
        cores = tensor.factors[: out + inp]
        if kernel:
            last = contract_chain(tensor.factors[out + inp :])
            if modes.kernel > 1:
                cores = [*cores, last]
            else:
                cores = [*cores[:-1], torch.einsum("bic,ca->bia", cores[-1], last[:, 0])]
        bonds = tuple(core.shape[0] for core in cores)
        if not self.closed and bonds[0] != 1:
            raise DecompositionError(
                f"a tensor train begins and ends with rank 1, this chain with {bonds[0]}; "
                "read it as a tensor_ring"
            )
        return cores, bonds if self.closed else bonds[1:], split


def _modes_for(sizes: tuple[int, ...], channels: int) -> int:
    """Return how many leading modes multiply to the channels; 0 if none do."""
    product = 1
    for count, size in enumerate(sizes, start=1):
        product *= size
        if product == channels:
            return count
    return 0


def _channels(cores: Cores, modes: WeightModes) -> tuple[torch.Tensor, torch.Tensor]:
    """Contract the output cores to one (a, out, b) and the input cores to one (b, in, c)."""
    split = len(modes.out)
    return contract_chain(cores[:split]), contract_chain(cores[split : split + len(modes.inp)])


class _ChainLayer(StagedLayer):
    """Input, kernel and output core as layers; the bond that the kernel leaves alone is in the batch axis."""

    def _bonds(self) -> tuple[int, int, int]:
        shapes = self.tensor_format.core_shapes(self.modes, self.ranks)
        return shapes[0][0], shapes[0][2], shapes[1][2]

    def stage_channels(self) -> tuple[int, int, int]:
        _, b, c = self._bonds()
        return b * c, b * self._bonds()[0], 1

    @property
    def trains_contracted(self) -> bool:
        """Always: the backward pass of small convolutions on a large batch axis is slower than dense."""
        return True

    def make_kernel(self, **like: Any) -> nn.Module:
        a, _, c = self._bonds()
        return self.geometry.layer(c, a, bias=False, **like)

    def plain_layers(self) -> dict[str, DecomposableModule]:
        """Return none: bonds are in the batch axis, which a row of plain layers cannot express."""
        return {}

    def apply_kernel(self, x: torch.Tensor) -> torch.Tensor:
        _, b, c = self._bonds()
        batch, spatial = x.shape[0], x.shape[2:]
        y = super().apply_kernel(x.reshape(batch * b, c, *spatial))
        return y.reshape(batch, -1, *y.shape[2:])

    def weights_from_cores(self, cores: Cores) -> Cores:
        output, inner = cores[0].permute(1, 2, 0).flatten(1), cores[1].permute(0, 2, 1).flatten(0, 1)
        return [inner, *((cores[2].permute(2, 0, 1),) if len(cores) > 2 else ()), output]

    def cores_from_weights(self, weights: Cores) -> Cores:
        a, b, c = self._bonds()
        inner = weights[0].reshape(b, c, -1).permute(0, 2, 1)
        output = weights[-1].reshape(-1, b, a).permute(2, 0, 1)
        return [output, inner, *((weights[1].permute(1, 2, 0),) if len(weights) > 2 else ())]


@register_format
class TensorTrain(ChainFormat):
    """An open chain of cores (Oseledets 2011; Novikov et al. 2015)."""

    name = "tensor_train"
    description = "tensor train: an open chain of cores over out, in, kernel"
    closed = False


@register_format
class TensorRing(ChainFormat):
    """A closed chain of cores (Zhao et al. 2016; Wang et al., CVPR 2018)."""

    name = "tensor_ring"
    description = "tensor ring: a closed chain of cores over out, in, kernel"
    closed = True
