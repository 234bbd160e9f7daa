"""The check that a compressed network is what its plan says."""

from __future__ import annotations

import torch
from torch import nn

from decomposition.apply.forms import factorised_layers
from decomposition.errors import DecompositionError
from decomposition.formats.factorised import FactorisedLayer
from decomposition.network.cost import count_parameters
from decomposition.network.layers import LayerSpec
from decomposition.operations import Factorise
from decomposition.plan.layer_plan import LayerPlan

Entries = dict[str, tuple[LayerPlan, LayerSpec]]
"""Each layer's entry in a plan, with the layer that it is for, by name."""


def check_applied(model: nn.Module, compressed: nn.Module, entries: Entries) -> None:
    """Refuse a result that differs from what the plan says."""
    modules, factorised = dict(compressed.named_modules()), factorised_layers(compressed)
    expected = count_parameters(model)
    for name, (entry, spec) in entries.items():
        expected += entry.cost(spec).params - spec.params
        factorisation, layer = entry.operation(Factorise), modules[name]
        if factorisation is None:
            continue
        if not isinstance(layer, FactorisedLayer):
            layer = next((part for part in layer.modules() if isinstance(part, FactorisedLayer)), None)
        if layer is None or layer.error is None:
            raise DecompositionError(
                f"layer {name!r} was not decomposed: none of the calibration inputs reached it; give inputs "
                "that do, or leave the layer without operations in the plan"
            )
        if (layer.tensor_format.name, layer.ranks) != (factorisation.format, factorisation.ranks):
            raise DecompositionError(
                f"layer {name!r} became {layer.tensor_format.name} of ranks {list(layer.ranks)}, the plan "
                f"says {factorisation.format} of ranks {list(factorisation.ranks)}"
            )
        if not all(bool(torch.isfinite(core).all()) for core in layer.cores()):
            raise DecompositionError(
                f"layer {name!r}: its cores are not finite in {layer.cores()[0].dtype}; use a type of wider "
                "range, such as float32"
            )
    planned = tuple(name for name, (entry, _) in entries.items() if entry.operation(Factorise) is not None)
    surplus = sorted(
        name for name in factorised if name not in planned and not name.startswith(_inside(planned))
    )
    if surplus:
        raise DecompositionError(f"the plan leaves {surplus[0]!r} dense, but it was decomposed")
    if count_parameters(compressed) != expected:
        raise DecompositionError(
            f"the compressed model has {count_parameters(compressed):,} parameters, the plan adds up to "
            f"{expected:,}; parameters that layers share (a bias, say) cannot be kept shared: give every "
            "layer its own"
        )


def _inside(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the prefixes of names of modules inside these layers: operations may wrap a layer."""
    return tuple(f"{name}." for name in names)
