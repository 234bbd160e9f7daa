"""What became of every layer, as the report shows it, and what the parameters take as they are stored."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from decomposition import (
    CompressionPlan,
    Factorise,
    FactorisedLayer,
    LayerPlan,
    LayerSpec,
    Quantise,
    count_parameters,
    factorised_layers,
    inspect_layers,
)
from decomposition.network.layers import FLOAT_BYTES
from rankrl.report import LayerRow


def stored_bytes(plan: CompressionPlan, dense: nn.Module, network: nn.Module) -> int:
    """Return the bytes of a compressed network's parameters as its plan stores them."""
    rest = {spec.name: spec for spec in plan.specs(plan.prepared(dense))}
    costs = [layer.cost(rest[layer.name]) for layer in plan if layer.name in rest]
    return FLOAT_BYTES * count_parameters(network) + sum(
        cost.bytes - FLOAT_BYTES * cost.params for cost in costs
    )


def layer_rows(plan: CompressionPlan, dense: nn.Module, network: nn.Module | None = None) -> list[LayerRow]:
    """Return the report's row of every layer, with the fit's error as the compressed `network` records it."""
    dense = plan.prepared(dense)
    pruned = {spec.name: spec for spec in plan.specs(dense)}
    fitted = {} if network is None else factorised_layers(network)
    by_name = {spec.name: spec for spec in inspect_layers(dense, plan.input_shape)}
    pruning = bool(plan.group_kinds)
    rows = []
    for layer in plan:
        spec = by_name[layer.name]
        rest = pruned.get(layer.name)
        error = _error(layer, fitted.get(layer.name), pruning=pruning)
        row = layer_row(layer, spec, rest or spec, error=error)
        channels = (0 if rest is None else rest.out_channels, spec.out_channels) if pruning else None
        rows.append(replace(row, channels=channels))
    return rows


def layer_row(layer: LayerPlan, spec: LayerSpec, rest: LayerSpec, *, error: float | None) -> LayerRow:
    """Return the report's row of one layer."""
    factorise, rounding, cost = layer.operation(Factorise), layer.operation(Quantise), layer.cost(rest)
    removed = next((str(each) for each in layer.operations if each.removes), None)
    return LayerRow(
        name=layer.name,
        shape=spec.weight_shape,
        ranks=() if factorise is None else factorise.ranks,
        params_before=spec.params,
        params_after=cost.params,
        macs_before=spec.macs,
        macs_after=cost.macs,
        error=error,
        reason=layer.reason or removed or "",
        format="" if factorise is None else factorise.format,
        precision="" if rounding is None else str(rounding),
    )


def _error(layer: LayerPlan, module: FactorisedLayer | None, *, pruning: bool) -> float | None:
    """Return the relative error of a layer's fit, 0 for a dense one; a removal of channels has none."""
    if not layer.layer_operations:
        return None if pruning else 0.0
    return None if module is None else module.error
