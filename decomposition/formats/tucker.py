"""Factorise weights by Tucker-2: channel modes compressed, the kernel left whole (Kim et al., ICLR 2016)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from decomposition.calibration.metric import (
    Metric,
    RowFactor,
    channel_moments,
    channel_products,
    cholesky,
    in_parts,
    products,
    times,
)
from decomposition.formats.layers import StagedLayer
from decomposition.formats.tensor_format import (
    Cores,
    Ranks,
    TensorFormat,
    leading_left_vectors,
    product,
    register_format,
)
from decomposition.formats.tensorly_objects import TensorlyObject, check_sizes, in_tensorly_backend
from decomposition.network.geometry import WeightModes
from decomposition.network.layers import LayerSpec

# Positions of a kernel from which one product for each output rank is as fast as one for all, which copies
# the core and the result.
_LONG_KERNEL = 32
# Sweeps from the truncated HOSVD, which is near the optimum already.
_HOOI_SWEEPS = 10


class _TuckerLayer(StagedLayer):
    """V', C and U as layers."""

    def stage_channels(self) -> tuple[int, int, int]:
        return self.ranks[-1], self.ranks[0], 1

    def weights_from_cores(self, cores: Cores) -> Cores:
        if self.modes.kernel == 1:
            return [cores[1].T, cores[0]]
        return [cores[2].T, cores[1], cores[0]]

    def cores_from_weights(self, weights: Cores) -> Cores:
        if self.modes.kernel == 1:
            return [weights[1], weights[0].T]
        return [weights[2], weights[1], weights[0].T]


@register_format
class Tucker(TensorFormat):
    """W[o,i,k] = sum over r1, r2 of U[o,r1] C[r1,r2,k] V[i,r2]; without a kernel W = U V^T.

    Executed as 1x1 (in to r2), the kernel (r2 to r1) and 1x1 (r1 to out).
    """

    name = "tucker"
    description = "Tucker-2 on the channel modes: 1x1, small kernel, 1x1"
    layer = _TuckerLayer
    own_ranks = True
    starts_in_metric = True

    def max_ranks(self, modes: WeightModes) -> Ranks:
        """Return (out rank, in rank) limits, or the one matrix rank where there is no kernel."""
        out_channels, in_channels = modes.out_channels, modes.in_channels
        if modes.kernel == 1:
            return (min(out_channels, in_channels),)
        return (min(out_channels, modes.columns), min(in_channels, out_channels * modes.kernel))

    def core_shapes(self, modes: WeightModes, ranks: Ranks) -> list[tuple[int, ...]]:
        if modes.kernel == 1:
            return [(modes.out_channels, ranks[0]), (modes.in_channels, ranks[0])]
        return [(modes.out_channels, ranks[0]), (*ranks, modes.kernel), (modes.in_channels, ranks[1])]

    def halves(self, cores: Cores, modes: WeightModes) -> tuple[torch.Tensor, torch.Tensor]:
        if modes.kernel == 1:
            return cores[0], cores[1].T
        output, core, inner = cores
        if modes.kernel >= _LONG_KERNEL:
            return output, torch.bmm(inner.expand(len(core), -1, -1), core).flatten(1)
        by_position = core.transpose(1, 2)
        features = product(by_position.flatten(0, 1), inner.T).reshape(*by_position.shape[:2], -1)
        return output, features.transpose(1, 2).flatten(1)

    def set_output(self, cores: Cores, modes: WeightModes, output: torch.Tensor) -> Cores:
        return [output, *cores[1:]]

    def start(self, weight: torch.Tensor, modes: WeightModes, ranks: Ranks) -> Cores:
        """Higher-order orthogonal iteration (De Lathauwer et al. 2000) from the truncated HOSVD."""
        return self.starter(weight, modes)(ranks)

    def starter(
        self, weight: torch.Tensor, modes: WeightModes, metric: Metric | None = None
    ) -> Callable[[Ranks], Cores]:
        """Decompose the weight's unfoldings once; return the function that starts any ranks from them."""
        if metric is not None and modes.kernel > 1:
            return _InMetric(weight, modes, metric).start
        if modes.kernel == 1:
            matrix = weight.reshape(modes.out_channels, -1)
            vectors = leading_left_vectors(matrix, self.max_ranks(modes)[0])
            features = (vectors.T @ matrix).T
            return lambda ranks: [vectors[:, : ranks[0]], features[:, : ranks[0]]]
        by_input = weight.movedim(1, 0).reshape(modes.in_channels, -1)
        directions = leading_left_vectors(by_input, self.max_ranks(modes)[1])

        def start(ranks: Ranks) -> Cores:
            inner = directions[:, : ranks[1]]
            captured = torch.zeros((), dtype=weight.dtype)
            for _ in range(_HOOI_SWEEPS):
                projected = torch.einsum("oik,ib->obk", weight, inner).flatten(1)
                output = leading_left_vectors(projected, ranks[0])
                projected = torch.einsum("oik,oa->iak", weight, output).flatten(1)
                inner = leading_left_vectors(projected, ranks[1])
                core = torch.einsum("oik,oa,ib->abk", weight, output, inner)
                previous, captured = captured, core.square().sum()
                if captured - previous <= 1e-6 * captured:
                    break
            return [output, core, inner]

        return start

    def from_halves(
        self, output: torch.Tensor, features: torch.Tensor, modes: WeightModes, ranks: Ranks
    ) -> Cores:
        return [output, features.T]

    def spectra(
        self, weight: torch.Tensor, modes: WeightModes, metric: Metric | None, root: torch.Tensor | None
    ) -> list[np.ndarray]:
        """Return the energies along the output's and the input's leading channel directions."""
        if modes.kernel == 1:
            return []
        seen = weight if root is None else torch.einsum("op,pik->oik", root, weight)
        matrix = seen.flatten(1)
        by_output = products(matrix, metric)
        by_input = channel_products(seen)
        if metric is not None:
            inputs = _channel_root(metric, modes)
            by_input = inputs @ by_input @ inputs
        energies = []
        for gram in (by_output, by_input):
            values = torch.linalg.eigvalsh((gram + gram.T) / 2).clamp_min(0).flip(0)
            energies.append((values / values.sum().clamp_min(1e-300)).numpy())
        return energies

    def stage_macs(self, spec: LayerSpec, modes: WeightModes, ranks: Ranks) -> dict[str, int]:
        entering = ranks[-1] * modes.in_channels
        leaving = ranks[0] * modes.out_channels
        if modes.kernel == 1:
            return {"chain": spec.output_positions * (entering + leaving)}
        kernel = ranks[0] * ranks[1] * modes.kernel
        return {"chain": spec.input_positions * entering + spec.output_positions * (kernel + leaving)}

    def rows(self, spec: LayerSpec, modes: WeightModes, ranks: Ranks) -> int:
        return (ranks[-1] if modes.kernel == 1 else sum(ranks)) + modes.out_channels

    def to_tensorly(self, cores: Cores, modes: WeightModes) -> Any:
        """Return a TuckerTensor whose kernel factor, or core without a kernel, is an identity."""
        from tensorly.tucker_tensor import TuckerTensor

        output, inner = cores[0], cores[-1]
        like: dict[str, Any] = {"dtype": output.dtype, "device": output.device}
        if modes.kernel == 1:
            core, factors = torch.eye(output.shape[1], **like), [output, inner]
        else:
            core, factors = cores[1], [output, inner, torch.eye(modes.kernel, **like)]
        return TuckerTensor((in_tensorly_backend(core), [in_tensorly_backend(factor) for factor in factors]))

    def from_tensorly(self, tensor: TensorlyObject, modes: WeightModes) -> tuple[Cores, Ranks, WeightModes]:
        """Read a TuckerTensor or partial_tucker's two factors; the core takes the kernel's factors in."""
        check_sizes(tensor, modes)
        assert tensor.head is not None
        core = tensor.head
        output, inner, *rest = tensor.factors
        for axis, factor in enumerate(rest, start=2):
            core = torch.tensordot(core, factor, dims=([axis], [1])).movedim(-1, axis)
        core = core.reshape(*core.shape[:2], modes.kernel)
        ranks = (core.shape[0], core.shape[1])
        if modes.kernel > 1:
            return [output, core, inner], ranks, modes
        matrix = core[..., 0]
        cores = [output, inner @ matrix.T] if ranks[0] <= ranks[1] else [output @ matrix, inner]
        return cores, (min(ranks),), modes


class _InMetric:
    """Starting points in the metric of the inputs, all ranks from one decomposition.

    V spans the leading row space of the input unfolding in the channels' second moments; for a given V, U and
    C are a regression of reduced rank on the inputs that V lets through (Izenman 1975).
    """

    def __init__(self, weight: torch.Tensor, modes: WeightModes, metric: Metric) -> None:
        self.modes = modes
        root = _channel_root(metric, modes)
        rows = channel_products(weight)
        directions = torch.linalg.eigh(root @ rows @ root).eigenvectors.flip(1)
        self.basis = torch.linalg.qr(rows @ root @ directions).Q
        self.metric = metric if isinstance(metric, RowFactor) else None
        if isinstance(metric, RowFactor):  # turned for each ranks, of which few need all of it
            self.outputs, self.weight = metric.rows @ weight.flatten(1).T, weight.flatten(1)
        else:
            self.moments = self._turned(self._turned(metric).T)
            self.cross = self._turned(times(weight.flatten(1), metric))

    def start(self, ranks: Ranks) -> Cores:
        outputs, inputs = ranks
        if self.metric is None:
            output, core = self._by_moments(outputs, inputs * self.modes.kernel)
        else:
            output, core = self._by_rows(self.metric, outputs, inputs)
        return [output, core.reshape(*ranks, self.modes.kernel), self.basis[:, :inputs].contiguous()]

    def _by_moments(self, outputs: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        gram, cross = self.moments[:columns, :columns].clone(), self.cross[:, :columns]
        # Moments of few or dependent inputs are singular.
        gram.diagonal().add_(1e-10 * gram.diagonal().mean() + 1e-300)
        factor = cholesky(gram)
        white = torch.linalg.solve_triangular(factor, cross.T, upper=False)
        output = leading_left_vectors(white.T, outputs)
        return output, torch.linalg.solve_triangular(factor.T, white @ output, upper=True).T

    def _by_rows(self, metric: RowFactor, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Solve the reduced-rank regression from the Gram matrix of the rows, fewer than the columns."""
        rows, weight = self._turned(metric.rows, inputs), self._turned(self.weight, inputs)
        # The basis is orthonormal, so the ridge stays.
        ridge = metric.ridge + 1e-10 * float(rows.norm().square()) / rows.shape[1] + 1e-300
        gram = rows @ rows.T
        gram.diagonal().add_(ridge)
        rest = torch.cholesky_solve(self.outputs - rows @ weight.T, cholesky(gram))
        best = weight.addmm_(rest.T, rows)
        if len(best) > sum(rows.shape):
            output = leading_left_vectors(torch.cat([best @ rows.T, ridge**0.5 * best], 1), outputs)
        else:  # without a copy as large as the weight
            seen = products(best, RowFactor(rows, ridge))
            output = torch.linalg.eigh(seen).eigenvectors.flip(1)[:, :outputs]
        return output, output.T @ best

    def _turned(self, rows: torch.Tensor, inputs: int | None = None) -> torch.Tensor:
        """Return patches (n, in * kernel) in the basis of the channels, or of the first `inputs` of it."""
        basis = self.basis[:, :inputs]
        patches = rows.reshape(len(rows), self.modes.in_channels, self.modes.kernel)
        turned = rows.new_empty(len(rows), basis.shape[1], self.modes.kernel)
        for part, result in zip(in_parts(patches), in_parts(turned, like=patches), strict=True):
            result.copy_((part.transpose(1, 2) @ basis).transpose(1, 2))
        return turned.flatten(1)


def _channel_root(metric: Metric, modes: WeightModes) -> torch.Tensor:
    """Return the symmetric root of the channels' second moments, averaged over the kernel."""
    values, vectors = torch.linalg.eigh(channel_moments(metric, modes.in_channels, modes.kernel))
    return (vectors * values.clamp_min(0).sqrt()) @ vectors.T
