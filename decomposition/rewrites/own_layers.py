"""Subclasses of linear layers and convolutions that compute the same, replaced by plain layers."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TypeVar, cast

import torch
from torch import nn

from decomposition.errors import DecompositionError
from decomposition.network.cost import evaluation_mode
from decomposition.network.geometry import Geometry
from decomposition.network.inputs import ExampleInputs, as_inputs, holds_tensors, random_batch, run_model
from decomposition.network.kinds import DecomposableModule, is_decomposable_module
from decomposition.network.rewriting import rewritten
from decomposition.network.surgery import copied
from decomposition.network.wrappers import unwrapped
from decomposition.public_calls import public_call
from decomposition.registry import did_you_mean

Module = TypeVar("Module", bound=nn.Module)

_SUBCLASSED = (nn.Conv1d, nn.Conv2d, nn.Linear)
# Share of the largest output: equivalent kernels may add up in another order.
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


def plain_form(module: nn.Module) -> DecomposableModule | None:
    """Return the plain layer of a subclass, without comparing it, or `None` for another module."""
    subclassed = isinstance(module, _SUBCLASSED) and not is_decomposable_module(module)
    return _plain(type(module).__name__, module) if subclassed else None  # type: ignore[arg-type]


def _plain(name: str, module: DecomposableModule) -> DecomposableModule:
    """Return the plain layer with the same weights."""
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
    """Compare layers with their plain form on the inputs that reach them."""
    reached: dict[str, list[torch.Tensor]] = {name: [] for name in layers}

    def watch(name: str) -> torch.utils.hooks.RemovableHandle:
        def record(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            if len(reached[name]) < _CALLS:
                reached[name].append(args[0].detach().clone())

        return layers[name].register_forward_pre_hook(record)

    handles = [watch(name) for name in layers]
    batch = as_inputs(inputs) if holds_tensors(inputs) else random_batch(network, inputs, 2)
    try:
        with evaluation_mode(network):
            run_model(network, batch)
    finally:
        for handle in handles:
            handle.remove()
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
                    expected, actual = plain[name](x), module(x)
                if not _alike(expected, actual):
                    raise DecompositionError(
                        f"{what} computes something else than the plain layer with its weights "
                        f"({_difference(expected, actual)} in {'training' if training else 'evaluation'} "
                        "mode); leave it out"
                    )
            module.train(mode)


def _alike(expected: torch.Tensor, actual: object) -> bool:
    if (
        not isinstance(actual, torch.Tensor)
        or actual.shape != expected.shape
        or actual.dtype != expected.dtype
    ):
        return False
    scale = float(expected.abs().max().clamp_min(1e-30)) if expected.numel() else 1.0
    return torch.allclose(actual, expected, rtol=_TOLERANCE, atol=_TOLERANCE * scale)


def _difference(expected: torch.Tensor, actual: object) -> str:
    if not isinstance(actual, torch.Tensor):
        return f"a {type(actual).__name__} instead of a tensor"
    if actual.shape != expected.shape:
        return f"shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    if actual.dtype != expected.dtype:
        return f"{actual.dtype} instead of {expected.dtype}"
    return f"outputs differ by up to {float((actual - expected).abs().max()):.2g}"
