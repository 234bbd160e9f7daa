"""Implement factorised layers, which compute stage by stage or with the contracted weight."""

from __future__ import annotations

import math
from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import nn

from decomposition.errors import DecompositionError
from decomposition.network.geometry import Geometry, WeightModes
from decomposition.network.layers import DecomposableModule, is_decomposable_module

if TYPE_CHECKING:
    from decomposition.formats.tensor_format import Cores, Ranks, TensorFormat


_DESCRIPTION = (
    *("in_features", "out_features", "in_channels", "out_channels", "kernel_size", "stride", "padding"),
    *("dilation", "groups", "padding_mode"),
)


class FactorisedLayer(nn.Module):
    """A layer that computes a convolution or matrix product through the cores of a tensor format.

    It has the dense layer's `in_features`, `out_channels`, `stride`, ... and `weight`, which a network's own
    code may read.

    Attributes:
        geometry: Kernel, stride, padding and channels of the dense layer it replaces.
        tensor_format: The format.
        modes: How the weight is read as a tensor.
        ranks: One rank a bond.
        execution: The way it is executed, a key of `TensorFormat.stage_macs`.
        error: Relative output error of the fit; `None` when the cores were not fitted here.
        rounds_between: Whether what passes between its stages is rounded, so that the contracted weight does
            not compute the same.
        pivoted: Whether the last of its plain layers has the rows of an identity, which are not stored, and
            therefore no factor that a transposed convolution could spread over positions.
    """

    pivoted: ClassVar[bool] = False

    def __init__(
        self,
        dense: DecomposableModule,
        tensor_format: TensorFormat,
        modes: WeightModes,
        ranks: Ranks,
        execution: str,
    ) -> None:
        super().__init__()
        self.geometry = Geometry.of(dense)
        self.tensor_format = tensor_format
        self.modes = modes
        self.ranks = ranks
        self.execution = execution
        self.error: float | None = None
        self.rounds_between = False
        for name in _DESCRIPTION:
            if hasattr(dense, name):
                setattr(self, name, getattr(dense, name))
        # torch's fast path for Transformer layers would read `weight`, the contracted one, instead of calling
        # the layer; it is not taken for layers with hooks.
        self.register_forward_pre_hook(_keep_fast_path_away)
        self.make_parts(dense)

    @abstractmethod
    def make_parts(self, dense: DecomposableModule) -> None:
        """Make the modules and parameters that hold the cores in place of a dense layer."""

    @abstractmethod
    def cores(self) -> Cores:
        """Return the cores in the format's shapes."""

    @abstractmethod
    def set_cores(self, cores: Cores) -> None:
        """Copy cores of the format's shapes into the parameters."""

    @property
    def staged(self) -> bool:
        """Whether all weights are in convolutions and linear layers, so that each can be rounded."""
        held = {id(each) for part in _plain_parts(self).values() for each in part.parameters()}
        return all(id(each) in held for each in self.parameters() if each is not self.bias)

    def weight_holders(self) -> list[nn.Module]:
        """Return the modules whose weights can be stored in integers; none if that is impossible."""
        return list(_plain_parts(self).values()) if self.staged else []

    def plain_layers(self) -> dict[str, DecomposableModule]:
        """Return the convolutions and linear layers whose sequence equals this layer, by name.

        By default they are its own modules, in the order of assignment.
        """
        return _plain_parts(self) if self.staged else {}

    def row(self) -> list[nn.Module]:
        """List the modules whose sequence equals this layer: plain layers, with any `Reshape` between them.

        Those of a linear layer may expect inputs of two axes. Without any the layer cannot be nodes of an
        ONNX graph.
        """
        return list(self.plain_layers().values())

    def contracted(self, dense: DecomposableModule) -> FactorisedLayer:
        """Make the layer in place of `dense` that contracts the same cores in every pass, not yet set."""
        return ContractedLayer(dense, self.tensor_format, self.modes, self.ranks, "dense")

    def two_layers(self, output: torch.Tensor, features: torch.Tensor) -> dict[str, DecomposableModule]:
        """Make two layers from Q (features, in * kernel) and A (out, features)."""
        geometry, rank = self.geometry, len(features)
        like: dict[str, Any] = {"device": output.device, "dtype": output.dtype}
        first = geometry.layer(geometry.in_channels, rank, bias=False, **like)
        last = geometry.pointwise(rank, geometry.out_channels, bias=geometry.bias, **like)
        layers = {"features": cast(DecomposableModule, first), "mixing": cast(DecomposableModule, last)}
        with torch.no_grad():
            for layer, weight in zip(layers.values(), (features, output), strict=True):
                layer.weight.copy_(weight.reshape(layer.weight.shape))
            if layers["mixing"].bias is not None and self.bias is not None:
                layers["mixing"].bias.copy_(self.bias)
        return layers

    def output_stage(self, cores: Cores) -> tuple[nn.Module, torch.Tensor] | None:
        """Return the module that applies A alone, and its weight for these cores; `None` if there is none."""
        return None

    @property
    @abstractmethod
    def bias(self) -> torch.Tensor | None:
        """The layer's bias."""

    @property
    def weight(self) -> torch.Tensor:
        """The dense weight that the cores contract to, in its shape; computed anew each time."""
        weight = self.tensor_format.reconstruct(self.cores(), self.modes)
        return weight.reshape(*weight.shape[:2], *self.geometry.kernel_size)

    def squared_norm(self) -> torch.Tensor:
        """Return |W|^2 of the weight that the cores contract to, differentiable and without contracting it.

        Its gradient is that of weight decay on W itself (Frobenius decay, Khodak et al., ICLR 2021).
        """
        reference = self.cores()[0]
        with full_precision(reference):
            output, features = self.tensor_format.halves(self.cores(), self.modes)
            return ((output.T @ output) * (features @ features.T)).sum()

    def freeze_like(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Make the cores trainable if the weight is, and the bias if the bias is: frozen stays frozen."""
        for parameter in self.parameters():
            parameter.requires_grad_(weight.requires_grad)
        if self.bias is not None and bias is not None:
            self.bias.requires_grad_(bias.requires_grad)

    def decay_shares(self) -> dict[nn.Parameter, float]:
        """Return each core's share of the weight's decay; the full decay on each would multiply it."""
        cores = [parameter for parameter in self.parameters() if parameter is not self.bias]
        return dict.fromkeys(cores, 1 / len(self.cores()))

    def balance(self) -> None:
        """Scale the cores so that one learning rate suits them all; the contracted weight stays the same."""
        with torch.no_grad():
            self.set_cores(self.tensor_format.balanced([core.detach().double() for core in self.cores()]))

    def load(self, cores: Cores, bias: torch.Tensor | None, error: float | None = None) -> None:
        """Set cores, bias and the error of their fit.

        Raises:
            DecompositionError: If shapes do not fit the layer's ranks.
        """
        needed = self.tensor_format.core_shapes(self.modes, self.ranks)
        shapes = [tuple(core.shape) for core in cores]
        if shapes != needed or (bias is None) != (self.bias is None):
            raise DecompositionError(
                f"{self.tensor_format.name} ranks {self.ranks} need cores of shapes {needed} and "
                f"{'a' if self.bias is not None else 'no'} bias, got {shapes}"
            )
        with torch.no_grad():
            self.set_cores(cores)
            if bias is not None and self.bias is not None:
                self.bias.copy_(bias)
        self.error = error

    def apply_dense(self, x: torch.Tensor) -> torch.Tensor:
        """Contract all cores to the dense weight and apply it; differentiable."""
        with full_precision(x):
            weight = self.tensor_format.reconstruct(self.cores(), self.modes)
        return self.geometry.apply(x, weight, self.bias)

    def to_dense(self) -> DecomposableModule:
        """Return the dense layer with the reconstructed weight, contracted in float64."""
        cores = [core.detach().double() for core in self.cores()]
        weight = self.tensor_format.reconstruct(cores, self.modes)
        reference = self.cores()[0]
        dense = self.geometry.dense(device=reference.device, dtype=reference.dtype)
        with torch.no_grad():
            dense.weight.copy_(weight.reshape(dense.weight.shape))
            if dense.bias is not None and self.bias is not None:
                dense.bias.copy_(self.bias)
                dense.bias.requires_grad_(self.bias.requires_grad)
        dense.weight.requires_grad_(reference.requires_grad)
        return dense

    def to_tensorly(self) -> Any:
        """Return the cores as a CPTensor, TuckerTensor, TTTensor or TRTensor of shape `modes.sizes`.

        The arrays are copies in tensorly's present backend.

        Raises:
            DecompositionError: If tensorly has no object for the format.
        """
        return self.tensor_format.to_tensorly([core.detach() for core in self.cores()], self.modes)

    def extra_repr(self) -> str:
        g = self.geometry
        return (
            f"{self.tensor_format.name}, {g.in_channels} -> {g.out_channels}, kernel {g.kernel_size}, "
            f"ranks {self.ranks}, {self.execution}"
        )


class Reshape(nn.Module):
    """Reshapes between stages (0 keeps an axis, -1 takes the rest, as in ONNX), and a bias behind them."""

    def __init__(self, *shapes: tuple[int, ...], bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.shapes, self.bias = shapes, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for shape in self.shapes:
            x = x.reshape([size or x.shape[axis] for axis, size in enumerate(shape)])
        return x if self.bias is None else x + self.bias.reshape(-1, *[1] * (x.ndim - 2))


def plain_layers(module: nn.Module) -> dict[str, DecomposableModule]:
    """Return the convolutions and linear layers that a dense or factorised layer consists of, by name."""
    if isinstance(module, FactorisedLayer):
        return module.plain_layers()
    return _plain_parts(module)


def _plain_parts(module: nn.Module) -> dict[str, DecomposableModule]:
    return {name: part for name, part in module.named_modules() if is_decomposable_module(part)}


def _keep_fast_path_away(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    """No-op hook: `nn.TransformerEncoderLayer` calls its layers one by one if one of them has hooks."""


def full_precision(x: torch.Tensor) -> AbstractContextManager[None]:
    """Disable autocast, so that cores contract in their own precision: more exact, faster if small."""
    active = not x.is_meta and torch.is_autocast_enabled(x.device.type)
    return torch.autocast(x.device.type, enabled=False) if active else nullcontext()


class ContractedLayer(FactorisedLayer):
    """A layer that contracts its cores to fewer, larger weights in every forward pass.

    Used if this takes fewer multiply-accumulates than one stage for each core, and for tensorised modes,
    whose cores are no layers. The parameters are the cores.
    """

    def make_parts(self, dense: DecomposableModule) -> None:
        reference = dense.weight
        self.core_list = nn.ParameterList(
            torch.empty(shape, device=reference.device, dtype=reference.dtype)
            for shape in self.tensor_format.core_shapes(self.modes, self.ranks)
        )
        for core in self.core_list:
            if not core.is_meta:  # on meta torch would first load its compiler, which takes a second
                nn.init.normal_(core)
        self.bias_parameter = (
            nn.Parameter(reference.new_zeros(self.modes.out_channels)) if self.geometry.bias else None
        )

    @property
    def bias(self) -> torch.Tensor | None:
        return self.bias_parameter

    def cores(self) -> Cores:
        return list(self.core_list)

    def set_cores(self, cores: Cores) -> None:
        for parameter, core in zip(self.core_list, cores, strict=True):
            parameter.copy_(core)

    def weight_holders(self) -> list[nn.Module]:
        return [self.core_list]

    def plain_layers(self) -> dict[str, DecomposableModule]:
        """Return Q and A as layers if they hold no more numbers than the cores (formats of two matrices)."""
        if self.execution != "half" or not self.modes.plain:
            return {}
        with torch.no_grad():
            output, features = self.tensor_format.halves(self.cores(), self.modes)
        if output.numel() + features.numel() > self.tensor_format.params(self.modes, self.ranks):
            return {}
        return self.two_layers(output, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
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


_MACS_PER_VALUE = 33
"""Multiply-accumulates that take as long as reading or writing one value between stages.

From training steps of convolutions of 16 channels at 32 x 32 to 256 at 8 x 8 in bfloat16 on an AVX-512 CPU.
"""


class StagedLayer(FactorisedLayer):
    """A sequence of plain layers: mix channels, apply the kernel, mix channels.

    Without a kernel (linear layers, 1x1 convolutions) the middle stage is left out and the first carries
    stride and padding.
    """

    def make_parts(self, dense: DecomposableModule) -> None:
        like: dict[str, Any] = {"device": dense.weight.device, "dtype": dense.weight.dtype}
        geometry = self.geometry
        entering, leaving, self._groups = self.stage_channels()
        first = geometry.layer if self.modes.kernel == 1 else geometry.pointwise
        self.reduce = first(geometry.in_channels, entering, bias=False, **like)
        self.kernel = self.make_kernel(**like) if self.modes.kernel > 1 else None
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
        entering, leaving, groups = self.stage_channels()
        return self.geometry.layer(entering, leaving, bias=False, groups=groups, **like)

    def apply_kernel(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.kernel is None else self.kernel(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the stages in sequence; in training the dense weight, if that is faster."""
        if self.training and not self.rounds_between and self.trains_contracted:
            return self.apply_dense(x)
        x = self.reduce(x)
        if self.kernel is not None:
            x = self.apply_kernel(x)
        return self.expand(x)

    @cached_property
    def trains_contracted(self) -> bool:
        """Whether a training step is faster contracted to the dense weight, by shapes alone."""
        if self.kernel is None:
            return False
        entering = math.prod(self.geometry.stride)  # input positions per output position
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
        return self.expand, self.weights_from_cores(cores)[-1]

    def stages(self) -> list[nn.Module]:
        return [stage for stage in (self.reduce, self.kernel, self.expand) if stage is not None]

    @property
    def bias(self) -> torch.Tensor | None:
        return self.expand.bias  # type: ignore[return-value]

    def cores(self) -> Cores:
        weights: Cores = [stage.weight for stage in self.stages()]  # type: ignore[misc]
        kernels = len(weights) == 3
        flat = [w.flatten(2) if kernels and j == 1 else w.flatten(1) for j, w in enumerate(weights)]
        return self.cores_from_weights(flat)

    def set_cores(self, cores: Cores) -> None:
        for stage, weight in zip(self.stages(), self.weights_from_cores(cores), strict=True):
            parameter: torch.Tensor = stage.weight  # type: ignore[assignment]
            parameter.copy_(weight.reshape(parameter.shape))
