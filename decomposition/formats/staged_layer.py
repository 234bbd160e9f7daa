"""Plain torch layers in a row in place of a dense one."""

from __future__ import annotations

import math
from abc import abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from decomposition.formats.factorised import FactorisedLayer
from decomposition.network.kinds import DecomposableModule
from decomposition.network.modes import WeightModes

if TYPE_CHECKING:
    from decomposition.formats.base import Cores, Ranks, TensorFormat

_MACS_PER_VALUE = 33
"""Multiply-accumulates that take as long as reading or writing one value between stages.

From training steps of convolutions of 16 channels at 32 x 32 to 256 at 8 x 8 in bfloat16 on an AVX-512 CPU.
"""


class StagedLayer(FactorisedLayer):
    """Plain layers in a row: mix channels, apply the kernel, mix channels.

    Without a kernel (linear layers, 1x1 convolutions) the middle stage is left out and the first carries
    stride and padding.
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
        like: dict[str, Any] = {"device": dense.weight.device, "dtype": dense.weight.dtype}
        geometry = self.geometry
        entering, leaving, self._groups = self.stage_channels()
        first = geometry.layer if modes.kernel == 1 else geometry.pointwise
        self.reduce = first(geometry.in_channels, entering, bias=False, **like)
        self.kernel = self.make_kernel(**like) if modes.kernel > 1 else None
        self.expand = geometry.pointwise(leaving, geometry.out_channels, bias=geometry.bias, **like)

    @abstractmethod
    def stage_channels(self) -> tuple[int, int, int]:
        """Return channels after the first stage, before the last, and the kernel's groups."""

    @abstractmethod
    def weights_from_cores(self, cores: Cores) -> Cores:
        """Turn cores into the stages' weights, kernel positions flattened."""

    @abstractmethod
    def cores_from_weights(self, weights: Cores) -> Cores:
        """Turn the stages' weights, kernel positions flattened, into cores."""

    def make_kernel(self, **like: Any) -> nn.Module:
        """Make the kernel stage."""
        entering, leaving, groups = self.stage_channels()
        return self.geometry.layer(entering, leaving, bias=False, groups=groups, **like)

    def apply_kernel(self, x: torch.Tensor) -> torch.Tensor:
        """Run the kernel stage."""
        return x if self.kernel is None else self.kernel(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the stages in a row, or in training the dense weight where that takes less time."""
        if self.training and not self.rounds_between and self.trains_contracted:
            return self.apply_dense(x)
        x = self.reduce(x)
        if self.kernel is not None:
            x = self.apply_kernel(x)
        return self.expand(x)

    @cached_property
    def trains_contracted(self) -> bool:
        """Whether a training step takes less time with the cores contracted to the dense weight.

        It depends on shapes alone, so that a run is the same on every machine.
        """
        if self.kernel is None:
            return False
        entering = math.prod(self.geometry.stride)  # positions of the input for one of the output
        dense = self.modes.out_channels * self.modes.columns + _MACS_PER_VALUE * (
            entering * self.geometry.in_channels + self.geometry.out_channels
        )
        staged, positions = 0, entering
        for stage in self.stages():
            weight: torch.Tensor = stage.weight  # type: ignore[assignment]
            values = positions * stage.in_channels  # type: ignore[operator]
            positions //= math.prod(stage.stride)  # type: ignore[arg-type]
            staged += positions * weight.numel()
            staged += _MACS_PER_VALUE * int(values + positions * weight.shape[0])
        return staged > dense

    def output_stage(self, cores: Cores) -> tuple[nn.Module, torch.Tensor]:
        """Return the last stage and its weight."""
        return self.expand, self.weights_from_cores(cores)[-1]

    def stages(self) -> list[nn.Module]:
        """Return the two or three layers."""
        return [stage for stage in (self.reduce, self.kernel, self.expand) if stage is not None]

    @property
    def bias(self) -> torch.Tensor | None:
        """The last stage's bias."""
        return self.expand.bias  # type: ignore[return-value]

    def cores(self) -> Cores:
        """Read the cores off the stages' weights."""
        weights: Cores = [stage.weight for stage in self.stages()]  # type: ignore[misc]
        kernels = len(weights) == 3
        flat = [w.flatten(2) if kernels and j == 1 else w.flatten(1) for j, w in enumerate(weights)]
        return self.cores_from_weights(flat)

    def set_cores(self, cores: Cores) -> None:
        """Copy the cores into the stages' weights."""
        for stage, weight in zip(self.stages(), self.weights_from_cores(cores), strict=True):
            parameter: torch.Tensor = stage.weight  # type: ignore[assignment]
            parameter.copy_(weight.reshape(parameter.shape))
