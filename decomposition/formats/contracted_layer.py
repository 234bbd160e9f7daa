"""Cores that are contracted to fewer and larger weights whenever they are used."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from decomposition.formats.factorised import FactorisedLayer, full_precision
from decomposition.network.kinds import DecomposableModule
from decomposition.network.modes import WeightModes

if TYPE_CHECKING:
    from decomposition.formats.base import Cores, Ranks, TensorFormat


class ContractedLayer(FactorisedLayer):
    """Cores that are contracted to fewer and larger weights at every forward pass.

    Used if this takes fewer multiply-accumulates than one stage for each core, and for tensorised modes,
    whose cores are no layers. The parameters are the cores.
    """

    def __init__(
        self,
        dense: DecomposableModule,
        tensor_format: TensorFormat,
        modes: WeightModes,
        ranks: Ranks,
        execution: str,
    ) -> None:
        super().__init__(dense, tensor_format, modes, ranks, execution)
        reference = dense.weight
        self.core_list = nn.ParameterList(
            torch.empty(shape, device=reference.device, dtype=reference.dtype)
            for shape in tensor_format.core_shapes(modes, ranks)
        )
        for core in self.core_list:
            if not core.is_meta:  # there torch would load its compiler first, which takes a second
                nn.init.normal_(core)
        self.bias_parameter = (
            nn.Parameter(reference.new_zeros(modes.out_channels)) if self.geometry.bias else None
        )

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias."""
        return self.bias_parameter

    def cores(self) -> Cores:
        """Return the parameters."""
        return list(self.core_list)

    def set_cores(self, cores: Cores) -> None:
        """Copy the cores."""
        for parameter, core in zip(self.core_list, cores, strict=True):
            parameter.copy_(core)

    def weight_holders(self) -> list[nn.Module]:
        """Return the list of cores."""
        return [self.core_list]

    def plain_layers(self) -> dict[str, DecomposableModule]:
        """Return Q and A as layers where they hold as many numbers as the cores, as two matrices do."""
        if self.execution != "half" or not self.modes.plain:
            return {}
        with torch.no_grad():
            output, features = self.tensor_format.halves(self.cores(), self.modes)
        if output.numel() + features.numel() > self.tensor_format.params(self.modes, self.ranks):
            return {}
        return self.two_layers(output, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Contract and convolve."""
        if self.execution == "dense":
            return self.apply_dense(x)
        if self.execution == "half":
            with full_precision(x):
                output, features = self.tensor_format.halves(self.cores(), self.modes)
            kernel = features.reshape(features.shape[0], self.modes.in_channels, self.modes.kernel)
            return self.geometry.mix(self.geometry.apply(x, kernel, None), output, self.bias)
        return self._chain(x)

    def _chain(self, x: torch.Tensor) -> torch.Tensor:
        """Run the merged cores of a train or ring one after the other, as `_ChainLayer` does."""
        with full_precision(x):
            output, inner, kernel = self.tensor_format.merged(self.cores(), self.modes)  # type: ignore[attr-defined]
        b, c = inner.shape[0], inner.shape[2]
        batch, spatial = x.shape[0], x.shape[2:]
        x = self.geometry.mix(x, inner.permute(0, 2, 1).flatten(0, 1), None)
        x = self.geometry.apply(x.reshape(batch * b, c, *spatial), kernel.permute(2, 0, 1), None)
        x = x.reshape(batch, -1, *x.shape[2:])
        return self.geometry.mix(x, output.permute(1, 2, 0).flatten(1), self.bias)
