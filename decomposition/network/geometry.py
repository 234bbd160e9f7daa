"""How a layer slides over its input, apart from its weight."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import nn

from decomposition.network.kinds import DecomposableModule
from decomposition.network.patches import padded_input


@dataclass(frozen=True)
class Geometry:
    """Everything of a Conv1d, Conv2d or Linear but its weight and bias values."""

    out_channels: int
    in_channels: int
    kernel_size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] | str = ()
    dilation: tuple[int, ...] = ()
    padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros"
    bias: bool = False

    @classmethod
    def of(cls, module: DecomposableModule) -> Geometry:
        """Read the geometry of a layer."""
        if isinstance(module, nn.Linear):
            return cls(module.out_features, module.in_features, bias=module.bias is not None)
        return cls(
            module.out_channels,
            module.in_channels,
            tuple(module.kernel_size),
            tuple(module.stride),
            module.padding if isinstance(module.padding, str) else tuple(module.padding),
            tuple(module.dilation),
            module.padding_mode,
            module.bias is not None,
        )

    @property
    def spatial(self) -> int:
        """Number of spatial dimensions, 0 for a linear layer."""
        return len(self.kernel_size)

    def along(self, axis: int) -> Geometry:
        """Return the sliding along one spatial axis alone: size 1, stride 1, no padding along the others.

        Convolving along one axis after the other equals convolving along all at once for every padding mode,
        as long as nothing is added in between.
        """

        def only(values: tuple[int, ...], otherwise: int) -> tuple[int, ...]:
            return tuple(value if j == axis else otherwise for j, value in enumerate(values))

        padding = self.padding if isinstance(self.padding, str) else only(self.padding, 0)
        return replace(
            self,
            kernel_size=only(self.kernel_size, 1),
            stride=only(self.stride, 1),
            padding=padding,
            dilation=only(self.dilation, 1),
        )

    def layer(self, inputs: int, outputs: int, *, bias: bool, groups: int = 1, **like: Any) -> nn.Module:
        """Make a layer with this kernel, stride and padding but other channels."""
        if self.spatial == 0:
            return nn.Linear(inputs, outputs, bias=bias, **like)
        convolution = nn.Conv1d if self.spatial == 1 else nn.Conv2d
        return convolution(
            inputs,
            outputs,
            self.kernel_size,  # type: ignore[arg-type]
            stride=self.stride,  # type: ignore[arg-type]
            padding=self.padding,  # type: ignore[arg-type]
            dilation=self.dilation,  # type: ignore[arg-type]
            groups=groups,
            bias=bias,
            padding_mode=self.padding_mode,
            **like,
        )

    def pointwise(self, inputs: int, outputs: int, *, bias: bool, **like: Any) -> nn.Module:
        """Make a layer that mixes channels at every position: kernel and stride 1, no padding."""
        if self.spatial == 0:
            return nn.Linear(inputs, outputs, bias=bias, **like)
        convolution = nn.Conv1d if self.spatial == 1 else nn.Conv2d
        return convolution(inputs, outputs, 1, bias=bias, **like)

    def dense(self, **like: Any) -> DecomposableModule:
        """Make the dense layer of this geometry."""
        layer = self.layer(self.in_channels, self.out_channels, bias=self.bias, **like)
        return cast(DecomposableModule, layer)

    def apply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Convolve `x` with a weight (outputs, inputs, kernel elements) of any channel counts."""
        if self.spatial == 0:
            return F.linear(x, weight.squeeze(-1), bias)
        convolve = F.conv1d if self.spatial == 1 else F.conv2d
        kernel = weight.reshape(*weight.shape[:2], *self.kernel_size)
        padding = self.padding
        if self.padding_mode != "zeros":
            x, padding = padded_input(self, x), (0,) * self.spatial
        return convolve(x, kernel, bias, self.stride, padding, self.dilation)

    def mix(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Mix the channels of `x` with a matrix (outputs, inputs) at every position."""
        if self.spatial == 0:
            return F.linear(x, weight, bias)
        convolve = F.conv1d if self.spatial == 1 else F.conv2d
        return convolve(x, weight.reshape(*weight.shape, *(1,) * self.spatial), bias)
