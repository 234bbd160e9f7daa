"""Transposed convolutions as a product, which can be decomposed like others, and a spreading.

A transposed convolution multiplies the channels at every position of its input with a matrix of output
channels times kernel positions, spreads each position over its kernel, and adds up the overlaps (Dumoulin and
Visin, 2016, section 4). The product is a 1x1 convolution, with inputs and fits like any other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import nn

from decomposition.formats.staged_layer import StagedLayer
from decomposition.network.kinds import is_decomposable_module
from decomposition.network.rewriting import rewritten
from decomposition.network.rounding import is_rounded
from decomposition.network.surgery import copied
from decomposition.network.wrappers import unwrapped
from decomposition.public_calls import public_call

Module = TypeVar("Module", bound=nn.Module)
_KINDS = (nn.ConvTranspose1d, nn.ConvTranspose2d)


class PlainTransposed(nn.Module):
    """An `nn.ConvTranspose1d` or `nn.ConvTranspose2d` with a 1x1 convolution for its product.

    It takes and returns the same. In exports the spreading and the product (or its last stage, if the product
    was decomposed) are one transposed convolution, unless the product is rounded.

    Args:
        layer: The transposed convolution; its weights are copied.

    Attributes:
        product: From input channels to output channels times kernel positions, the latter counting fastest.
        bias: The bias (out,), or None.

    Raises:
        ValueError: It has groups, or pads its output by its stride or more.
    """

    def __init__(self, layer: nn.ConvTranspose1d | nn.ConvTranspose2d) -> None:
        super().__init__()
        if layer.groups > 1:
            raise ValueError(f"it has {layer.groups} groups")
        self.in_channels, self.out_channels = layer.in_channels, layer.out_channels
        self.kernel_size, self.stride = tuple(layer.kernel_size), tuple(layer.stride)
        self.padding = cast(tuple[int, ...], tuple(layer.padding))
        self.dilation, self.output_padding = tuple(layer.dilation), tuple(layer.output_padding)
        if any(more >= step for more, step in zip(self.output_padding, self.stride, strict=True)):
            raise ValueError(
                f"its output_padding {self.output_padding} is not below its stride {self.stride}"
            )
        weight = layer.weight
        kind = nn.Conv1d if len(self.kernel_size) == 1 else nn.Conv2d
        rows = self.out_channels * math.prod(self.kernel_size)
        like: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
        self.product: nn.Module = kind(self.in_channels, rows, 1, bias=False, **like)
        with torch.no_grad():
            flat = weight.flatten(1).T
            self.product.weight.copy_(flat.reshape(*flat.shape, *(1,) * len(self.kernel_size)))
        self.product.weight.requires_grad_(weight.requires_grad)
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().clone())
        if self.bias is not None and layer.bias is not None:
            self.bias.requires_grad_(layer.bias.requires_grad)
        self.train(layer.training)

    def forward(self, x: torch.Tensor, output_size: Sequence[int] | None = None) -> torch.Tensor:
        """Map (N, C, L) or (N, C, H, W), or one input without N; `output_size` as for the original layer.

        Raises:
            ValueError: The size asked for cannot come from this input.
        """
        batched = x.ndim == len(self.kernel_size) + 2
        least = self._least_sizes(x)
        more = self.output_padding if output_size is None else self._more(output_size, least)
        y = self._spread(x if batched else x.unsqueeze(0), least, more)
        return y if batched else y.squeeze(0)

    def extra_repr(self) -> str:
        """Show how it spreads."""
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"

    def _least_sizes(self, x: torch.Tensor) -> list[int]:
        """Return the output's positions along each axis, without output padding."""
        sizes = x.shape[-len(self.kernel_size) :]
        along = zip(sizes, self.stride, self.padding, self.dilation, self.kernel_size, strict=True)
        return [
            (size - 1) * step - 2 * padding + dilation * (kernel - 1) + 1
            for size, step, padding, dilation, kernel in along
        ]

    def _more(self, output_size: Sequence[int], least: Sequence[int]) -> tuple[int, ...]:
        """Return the output padding that gives the positions asked for."""
        more = tuple(int(size) - low for size, low in zip(output_size[-len(least) :], least, strict=True))
        if not all(0 <= extra < step for extra, step in zip(more, self.stride, strict=True)):
            raise ValueError(
                f"output_size {tuple(output_size)} is not possible here: the positions along each axis "
                f"are at least {list(least)}, and fewer than {list(self.stride)} more"
            )
        return more

    def _spread(self, x: torch.Tensor, least: Sequence[int], more: Sequence[int]) -> torch.Tensor:
        weight = self._last_stage() if torch.compiler.is_exporting() else None
        if weight is not None:
            if isinstance(self.product, StagedLayer):
                x = self.product.reduce(x)
            return self._transposed(x, weight, more)
        parts: torch.Tensor = self.product(x).flatten(2)
        sizes = [low + extra for low, extra in zip(least, more, strict=True)]
        # Spreading works on two axes; a single axis gets a second one with one position.
        missing = (1,) * (2 - len(self.kernel_size))
        y = F.fold(
            parts,
            (*sizes, *missing),
            (*self.kernel_size, *missing),
            dilation=(*self.dilation, *missing),
            padding=(*self.padding, *(0 for _ in missing)),
            stride=(*self.stride, *missing),
        )
        y = y.squeeze(-1) if missing else y
        return y if self.bias is None else y + self.bias.reshape(-1, *(1,) * len(self.kernel_size))

    def _last_stage(self) -> torch.Tensor | None:
        """Return the weight of the product or of its last stage, or None if they are no plain products."""
        if is_rounded(self.product):
            return None
        if is_decomposable_module(self.product):
            return self.product.weight
        if isinstance(self.product, StagedLayer) and self.product.kernel is None:
            return cast(torch.Tensor, self.product.expand.weight)
        return None

    def _transposed(self, x: torch.Tensor, weight: torch.Tensor, more: Sequence[int]) -> torch.Tensor:
        """Multiply and spread in one operation; `weight` is (out * kernel, in, 1, ...)."""
        kernel = weight.flatten(1).T.reshape(-1, self.out_channels, *self.kernel_size)
        transposed: Any = F.conv_transpose1d if len(self.kernel_size) == 1 else F.conv_transpose2d
        result: torch.Tensor = transposed(
            x, kernel, self.bias, self.stride, self.padding, tuple(more), 1, self.dilation
        )
        return result


@public_call(values=False)
def plain_transposed(model: Module) -> Module:
    """Return a copy of a model whose transposed convolutions multiply in 1x1 convolutions.

    In the copy each `nn.ConvTranspose1d` and `nn.ConvTranspose2d` is a `PlainTransposed`, whose layer
    `product` plans may decompose; the outputs are the same up to rounding. Layers with groups, subclasses,
    layers under weight norm and the like, and the rare layers that `PlainTransposed` does not take stay.

    Args:
        model: Any module; left untouched.
    """
    network = copied(unwrapped(model))
    forms = {name: plain_form(module) for name, module in network.named_modules()}
    layers = {name: layer for name, layer in forms.items() if layer is not None}
    return cast(Module, rewritten(network, "plain_transposed", layers))


def plain_form(module: nn.Module) -> PlainTransposed | None:
    """Return a transposed convolution's plain form, or `None` if it has none."""
    if type(module) not in _KINDS or "weight" not in module._parameters:
        return None  # a weight that is computed at every call may not have been computed yet
    try:
        return PlainTransposed(cast(nn.ConvTranspose1d | nn.ConvTranspose2d, module))
    except ValueError:  # it stays as it is; listings give the reason
        return None
