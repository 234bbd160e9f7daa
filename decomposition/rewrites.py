"""Rewrite attention, own layers, transposed convolutions and computed weights so that they compress."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize, prune, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from decomposition.errors import DecompositionError, PlanError
from decomposition.formats.layers import StagedLayer
from decomposition.network.cost import watching
from decomposition.network.geometry import Geometry
from decomposition.network.inputs import ExampleInputs, as_inputs, holds_tensors, random_batch, run_model
from decomposition.network.layers import (
    DecomposableModule,
    computes_weights,
    is_decomposable_module,
    weight_hooks,
)
from decomposition.network.rounding import is_rounded
from decomposition.network.surgery import (
    copied,
    remove_parametrizations,
    replace_module,
    unwrapped,
    warn_lost_attributes,
)
from decomposition.public_calls import public_call
from decomposition.registry import did_you_mean

Module = TypeVar("Module", bound=nn.Module)


@public_call(values=False)
def plain_weights(model: Module) -> Module:
    """Return a copy of a model whose weights are parameters, which plans may replace.

    Weights that `torch.nn.utils.parametrizations`, the older `weight_norm` and `spectral_norm`, or
    `torch.nn.utils.prune` compute at every call keep their present value. Training the copy further changes
    them freely.

    Args:
        model: Any module; left untouched.
    """
    return _rewritten_wherever(model, "plain_weights")


def _rewritten_wherever(model: Module, kind: str) -> Module:
    """Return a copy of a model with one rewrite applied to every layer that has its form."""
    network = copied(unwrapped(model))
    forms = {name: REWRITERS[kind](module) for name, module in network.named_modules()}
    layers = {name: layer for name, layer in forms.items() if layer is not None}
    return cast(Module, rewritten(network, kind, layers))


def plain_form(module: nn.Module) -> nn.Module | None:
    """Make a layer's computed weights parameters, in place; return `None` where it has none."""
    if not computes_weights(module):
        return None
    if parametrize.is_parametrized(module):
        remove_parametrizations(module)
    for hook in weight_hooks(module):
        trained = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        if isinstance(hook, WeightNorm):
            name = hook.name
            remove_weight_norm(module, name)
        elif isinstance(hook, SpectralNorm):
            name = hook.name
            remove_spectral_norm(module, name)
        else:
            name = hook._tensor_name
            prune.remove(module, name)
        cast(Any, module)._parameters[name].requires_grad_(trained)
    return module


_MARK = "_rewrites"


@dataclass(frozen=True)
class Rewrite:
    """Layers that were rewritten into an equivalent form, which plans may change.

    Attributes:
        kind: Name of the function that does it, such as `plain_attention`.
        layers: Names of the layers before.
    """

    kind: str
    layers: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"rewrite": self.kind, "layers": list(self.layers)}

    @classmethod
    def from_dict(cls, entry: Any, kinds: Iterable[str], source: str) -> Rewrite:
        """Read what `to_dict` returned; strict.

        Raises:
            PlanError: It is something else, or of a kind that is unknown here.
        """
        known = isinstance(entry, dict) and set(entry) == {"rewrite", "layers"}
        layers = entry["layers"] if known and isinstance(entry["layers"], list) else []
        named = bool(layers) and all(isinstance(name, str) for name in layers)
        if not known or entry["rewrite"] not in kinds or not named:
            raise PlanError(
                f"{source}: an entry of preparation must have rewrite (one of {', '.join(sorted(kinds))}) "
                f"and layers (a list of names), got {entry!r}"
            )
        return cls(entry["rewrite"], tuple(entry["layers"]))


def rewritten(network: nn.Module, kind: str, layers: Mapping[str, nn.Module]) -> nn.Module:
    """Replace layers in a network, in place, and record the rewrite in it."""
    if not layers:
        return network
    rewrites = (*rewrites_of(network), Rewrite(kind, tuple(layers)))
    modules = dict(network.named_modules())
    warn_lost_attributes(
        network, {name: modules[name] for name, layer in layers.items() if layer is not modules[name]}
    )
    for name, layer in layers.items():
        replace_module(network, modules[name], layer)
        network = layer if name == "" else network
    vars(network)[_MARK] = rewrites
    return network


def rewrites_of(model: nn.Module) -> tuple[Rewrite, ...]:
    return tuple(
        Rewrite(rewrite.kind, tuple(".".join(filter(None, (name, layer))) for layer in rewrite.layers))
        for name, module in model.named_modules()
        for rewrite in vars(module).get(_MARK, ())
    )


class PlainAttention(nn.Module):
    """An `nn.MultiheadAttention` with a linear layer for each projection.

    It takes and returns the same and keeps all attributes except the packed weight, so torch's fast path for
    Transformer layers, which reads that weight, stays off.

    Args:
        attention: The attention; its weights are copied.

    Raises:
        ValueError: It appends keys of its own (`add_bias_kv`, `add_zero_attn`).
    """

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        if attention.bias_k is not None or attention.add_zero_attn:
            raise ValueError("add_bias_kv and add_zero_attn are not supported")
        self.embed_dim, self.num_heads = attention.embed_dim, attention.num_heads
        self.head_dim, self.kdim, self.vdim = attention.head_dim, attention.kdim, attention.vdim
        self.dropout, self.batch_first = attention.dropout, attention.batch_first
        self._qkv_same_embed_dim = False  # disables the fast path of torch's Transformer layers
        self.in_proj_weight, self.in_proj_bias = None, None
        if attention._qkv_same_embed_dim:
            weights = list(attention.in_proj_weight.chunk(3))
        else:
            weights = [attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight]
        bias = attention.in_proj_bias
        biases = [None] * 3 if bias is None else bias.chunk(3)
        self.q_proj, self.k_proj, self.v_proj = map(_linear, weights, biases)
        self.out_proj = _linear(attention.out_proj.weight, attention.out_proj.bias)
        self.train(attention.training)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend; arguments and results are those of `nn.MultiheadAttention`."""
        batched = query.ndim == 3
        if not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = (
            project(x).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for project, x in ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value))
        )
        mask = self._mask(attn_mask, key_padding_mask, q)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = (q * self.head_dim**-0.5) @ k.transpose(-2, -1)
            weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            heads = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            heads = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        output: torch.Tensor = self.out_proj(heads.transpose(1, 2).flatten(-2))
        if not batched:
            return output.squeeze(0), None if weights is None else weights.squeeze(0)
        return output if self.batch_first else output.transpose(0, 1), weights

    def _mask(
        self, attn_mask: torch.Tensor | None, padding: torch.Tensor | None, queries: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the term to add to the scores (N, heads, L, S), or `None`."""
        mask = None
        if attn_mask is not None:
            mask = _additive(attn_mask, queries.dtype)
            mask = mask.unflatten(0, (-1, self.num_heads)) if mask.ndim == 3 else mask
        if padding is not None:
            hidden = _additive(padding, queries.dtype)[:, None, None, :]
            mask = hidden if mask is None else mask + hidden
        return mask


@public_call(values=False)
def plain_attention(model: Module) -> Module:
    """Return a copy of a model whose attention projects with linear layers, which plans may decompose.

    `nn.MultiheadAttention` holds its projections on queries, keys and values as one parameter that no layer
    owns. In the copy they are the layers `q_proj`, `k_proj`, `v_proj` and `out_proj`, and the outputs are the
    same. A model without such attention is copied as it is.

    Args:
        model: Any module; left untouched.

    Raises:
        DecompositionError: An attention appends keys of its own (`add_bias_kv`, `add_zero_attn`).
    """
    network = copied(unwrapped(model))
    layers = {}
    for name, module in network.named_modules():
        try:
            plain = attention_form(module)
        except ValueError as error:
            raise DecompositionError(
                f"the attention {name!r} cannot be made of linear layers: {error}; leave the model as it is"
            ) from error
        if plain is not None:
            layers[name] = plain
    return cast(Module, rewritten(network, "plain_attention", layers))


def attention_form(module: nn.Module) -> PlainAttention | None:
    # A subclass may compute something else.
    return PlainAttention(module) if type(module) is nn.MultiheadAttention else None


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    rows, columns = weight.shape
    layer = nn.Linear(columns, rows, bias=bias is not None, device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
            layer.bias.requires_grad_(bias.requires_grad)
    layer.weight.requires_grad_(weight.requires_grad)
    return layer


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask as a term to add to scores: minus infinity where a boolean mask is true."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))


_SUBCLASSED = (nn.Conv1d, nn.Conv2d, nn.Linear)
# Share of the largest output: equivalent kernels may sum in another order.
_TOLERANCE = 1e-5
_CALLS = 4
"""Calls of a layer that are compared at most."""


@public_call(values=False)
def plain_layers(model: Module, layers: Sequence[str], inputs: ExampleInputs) -> Module:
    """Return a copy of a model with plain layers in place of subclasses that compute the same.

    A subclass of `nn.Conv1d`, `nn.Conv2d` or `nn.Linear` stays dense, because it may compute something else.
    If the caller knows that it does not, this function checks it on the inputs that reach the layer, in
    training and in evaluation mode, and replaces it by a plain layer with the same weights.

    Args:
        model: Any module; left untouched.
        layers: Names of layers, shell-style patterns of such names, or names of their classes: `head`,
            `blocks.*`, `Conv2dSame`.
        inputs: A batch of real inputs, or the shape of one, which then is drawn at random.

    Raises:
        DecompositionError: An entry names no layer of a subclass; or a layer is never called, has parameters
            or buffers besides weight and bias, or computes something else than the plain layer.
    """
    network = copied(unwrapped(model))
    subclassed: dict[str, DecomposableModule] = {}
    known = {
        name: module
        for name, module in network.named_modules()
        if isinstance(module, _SUBCLASSED) and not is_decomposable_module(module)
    }
    for entry in layers:
        matches = {
            name: module
            for name, module in known.items()
            if fnmatchcase(name, entry) or type(module).__name__ == entry
        }
        if not matches:
            names = [*known, *sorted({type(module).__name__ for module in known.values()})]
            raise DecompositionError(
                f"no layer of a subclass matches {entry!r}; "
                + (f"there are {', '.join(names[:8])}" if names else "the model has none")
                + did_you_mean(entry, names)
            )
        subclassed |= matches
    plain = {name: _plain(name, module) for name, module in subclassed.items()}
    _compare(network, subclassed, plain, inputs)
    return cast(Module, rewritten(network, "plain_layers", plain))


def own_layer_form(module: nn.Module) -> DecomposableModule | None:
    """Return the plain layer of a subclass, without comparing it; `None` for other modules."""
    subclassed = isinstance(module, _SUBCLASSED) and not is_decomposable_module(module)
    return _plain(type(module).__name__, module) if subclassed else None  # type: ignore[arg-type]


def _plain(name: str, module: DecomposableModule) -> DecomposableModule:
    state = {*dict(module.named_parameters()), *dict(module.named_buffers())}
    if state - {"weight", "bias"} or "weight" not in state:
        extra = ", ".join(sorted(state - {"weight", "bias"})) or "a computed weight"
        raise DecompositionError(
            f"layer {name!r}, a {type(module).__name__}, has {extra} besides weight and bias, which a plain "
            "layer has not; leave it out"
        )
    geometry, like = Geometry.of(module), {"device": module.weight.device, "dtype": module.weight.dtype}
    inputs, outputs = geometry.in_channels, geometry.out_channels
    groups = 1 if isinstance(module, nn.Linear) else module.groups
    layer = geometry.layer(inputs, outputs, bias=geometry.bias, groups=groups, **like)
    layer.load_state_dict(module.state_dict())
    for own, other in zip(layer.parameters(), module.parameters(), strict=True):
        own.requires_grad_(other.requires_grad)
    return layer.train(module.training)  # type: ignore[return-value]


def _compare(
    network: nn.Module,
    layers: dict[str, DecomposableModule],
    plain: dict[str, DecomposableModule],
    inputs: ExampleInputs,
) -> None:
    reached: dict[str, list[torch.Tensor]] = {name: [] for name in layers}

    def watch(name: str) -> torch.utils.hooks.RemovableHandle:
        def record(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            if len(reached[name]) < _CALLS:
                reached[name].append(args[0].detach().clone())

        return layers[name].register_forward_pre_hook(record)

    batch = as_inputs(inputs) if holds_tensors(inputs) else random_batch(network, inputs, 2)
    with watching(network, [watch(name) for name in layers]):
        run_model(network, batch)
    for name, module in layers.items():
        what = f"layer {name!r}, a {type(module).__name__},"
        if not reached[name]:
            raise DecompositionError(
                f"{what} is not called on these inputs, so they do not show what it does"
            )
        for training in (False, True):
            mode = module.training
            module.train(training)
            for x in reached[name]:
                with torch.no_grad():
                    difference = _difference(plain[name](x), module(x))
                if difference is not None:
                    raise DecompositionError(
                        f"{what} computes something else than the plain layer with its weights "
                        f"({difference} in {'training' if training else 'evaluation'} mode); leave it out"
                    )
            module.train(mode)


def _difference(expected: torch.Tensor, actual: object) -> str | None:
    if not isinstance(actual, torch.Tensor):
        return f"a {type(actual).__name__} instead of a tensor"
    if actual.shape != expected.shape:
        return f"shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    if actual.dtype != expected.dtype:
        return f"{actual.dtype} instead of {expected.dtype}"
    scale = float(expected.abs().max().clamp_min(1e-30)) if expected.numel() else 1.0
    if torch.allclose(actual, expected, rtol=_TOLERANCE, atol=_TOLERANCE * scale):
        return None
    return f"outputs differ by up to {float((actual - expected).abs().max()):.2g}"


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
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"

    def _least_sizes(self, x: torch.Tensor) -> list[int]:
        """Return the output sizes along each axis without output padding."""
        sizes = x.shape[-len(self.kernel_size) :]
        along = zip(sizes, self.stride, self.padding, self.dilation, self.kernel_size, strict=True)
        return [
            (size - 1) * step - 2 * padding + dilation * (kernel - 1) + 1
            for size, step, padding, dilation, kernel in along
        ]

    def _more(self, output_size: Sequence[int], least: Sequence[int]) -> tuple[int, ...]:
        """Return the output padding that gives the requested sizes."""
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
    return _rewritten_wherever(model, "plain_transposed")


def transposed_form(module: nn.Module) -> PlainTransposed | None:
    if type(module) not in _KINDS or "weight" not in module._parameters:
        return None  # a weight that is computed at every call may not have been computed yet
    try:
        return PlainTransposed(cast(nn.ConvTranspose1d | nn.ConvTranspose2d, module))
    except ValueError:  # it stays dense; listings give the reason
        return None


REWRITERS: dict[str, Callable[[nn.Module], nn.Module | None]] = {
    "plain_attention": attention_form,
    "plain_layers": own_layer_form,
    "plain_transposed": transposed_form,
    "plain_weights": plain_form,
}
"""From a layer, which may be changed, to its rewritten form; `None` if it has that form already."""


def prepared(model: nn.Module, rewrites: Sequence[Rewrite]) -> nn.Module:
    """Return a network with the rewrites applied; the network itself if it has them already."""
    if set(rewrites) <= set(rewrites_of(model)):
        return model
    network = copied(model)
    for rewrite in rewrites:
        modules = dict(network.named_modules())
        forms = {name: REWRITERS[rewrite.kind](modules[name]) for name in rewrite.layers if name in modules}
        network = rewritten(network, rewrite.kind, {name: f for name, f in forms.items() if f is not None})
    return network
