"""Other forms of a compressed network: cores contracted, or dense layers again."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from decomposition.formats.contracted_layer import ContractedLayer
from decomposition.formats.factorised import FactorisedLayer
from decomposition.formats.pifa import PivotedLayer
from decomposition.network.kinds import is_decomposable_module
from decomposition.network.rounding import without_rounding
from decomposition.network.surgery import copied, replace_module
from decomposition.network.wrappers import unwrapped
from decomposition.plan.plan import CompressionPlan
from decomposition.public_calls import public_call


@public_call()
def contracted(model: nn.Module, only: Collection[str] | None = None) -> nn.Module:
    """Return a copy of a compressed model whose layers contract their cores to the dense weight.

    It computes the same from the same cores; layers that round between their stages stay as they are. On
    hardware that dislikes many small operations, or behind a runtime that contracts constants once when it
    loads a file, it can be the faster form.

    Args:
        model: The compressed model; it is not changed.
        only: Names of the layers to contract; None contracts all.
    """
    network = copied(unwrapped(model))
    for name, layer in factorised_layers(network).items():
        if layer.rounds_between or (only is not None and name not in only):
            continue
        dense = layer.geometry.dense(device="meta", dtype=layer.cores()[0].dtype)
        kind = PivotedLayer if isinstance(layer, PivotedLayer) else ContractedLayer
        form = kind(dense, layer.tensor_format, layer.modes, layer.ranks, "dense")
        form = form.to_empty(device=layer.cores()[0].device)
        cores = [core.detach() for core in layer.cores()]
        form.load(cores, None if layer.bias is None else layer.bias.detach(), layer.error)
        form.freeze_like(layer.cores()[0], layer.bias)
        replace_module(network, layer, form.train(layer.training))
    return network


def dense_form(model: nn.Module, plan: CompressionPlan) -> nn.Module:
    """Return a copy of a compressed model with dense layers of the contracted weights in place again."""
    network = copied(unwrapped(model))
    modules = dict(network.named_modules())
    for layer in plan:
        if layer.layer_operations and layer.name in modules:
            replace_module(network, modules[layer.name], _dense_layer(modules[layer.name]))
    return network


def _dense_layer(module: nn.Module) -> nn.Module:
    """Return the dense layer that a layer was made of, which operations may have wrapped."""
    for part in without_rounding(copied(module)).modules():
        if isinstance(part, FactorisedLayer):
            return part.to_dense().train(module.training)
        if is_decomposable_module(part):
            return part
    return module


def factorised_layers(model: nn.Module) -> dict[str, FactorisedLayer]:
    """Return the factorised layers of a compressed model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, FactorisedLayer)}
