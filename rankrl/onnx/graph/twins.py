"""Nodes that share a weight, which are one site."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import onnx_ir as ir
import torch

from rankrl.onnx.graph.quantised import MOVING
from rankrl.onnx.graph.site import Absorber, Site
from rankrl.onnx.operators import is_standard


def with_twins(sites: Sequence[Site], uses: Mapping[str, int]) -> list[Site]:
    """Make nodes that share a weight one site, the first of them; the others stay with it."""
    joined = list(sites)
    names = dict.fromkeys(site.weight_name for site in sites if site.weight_name)
    for name in [name for name in names if uses[name] > 1]:
        places = [place for place, site in enumerate(sites) if site.weight_name == name]
        first, *others = (sites[place] for place in places)
        if _are_alike([first, *others], uses[name]):
            joined[places[0]] = _joined(first, others)
            reason = f"it shares its weight with {first.name!r} and becomes what that does"
            for place in places[1:]:
                spec = replace(sites[place].spec, params=0, macs=0, refusal=reason)
                joined[place] = replace(sites[place], spec=spec)
        else:
            reason = "its weight is used in another way too, by another node or as an output"
            for place in places:
                joined[place] = replace(sites[place], spec=replace(sites[place].spec, refusal=reason))
    return joined


def _are_alike(sites: Sequence[Site], uses: int) -> bool:
    """Tell whether the nodes with one weight, which is used so often, can be one site."""
    first = sites[0].weight  # as the node multiplies with it: one of them may turn it
    equal = all(torch.equal(first, site.weight) for site in sites[1:])
    return equal and len(sites) >= uses and len({_role(site) for site in sites}) == 1


def _joined(first: Site, others: Sequence[Site]) -> Site:
    """Return the first of several nodes with one weight as the site that stands for all."""
    specs = [site.spec for site in (first, *others)]
    spec = replace(
        first.spec,
        input_sizes=tuple(size for spec in specs for size in spec.input_sizes),
        output_sizes=tuple(size for spec in specs for size in spec.output_sizes),
        macs=sum(spec.macs for spec in specs),
    )
    # Nothing but their own bias takes up a change behind all of them.
    absorber: Absorber | None = "bias" if first.absorber == "bias" else None
    return replace(first, spec=spec, absorber=absorber, twins=tuple(others))


def use_counts(graph: ir.Graph) -> Counter[str]:
    """Count how often every value is used; a constant that is turned on its way counts by its own name."""
    counts: Counter[str] = Counter()
    for node in ir.traversal.RecursiveGraphIterator(graph):
        if is_standard(node, *MOVING) and constant_root(node.inputs[0]) is not None:
            continue
        counts.update(constant_name(value) for value in node.inputs if value is not None)
    counts.update(constant_name(value) for value in graph.outputs)
    return counts


def constant_name(value: ir.Value) -> str:
    """Return the name of the constant behind a value, or of the value itself."""
    return str((constant_root(value) or value).name)


def constant_root(value: ir.Value | None) -> ir.Value | None:
    """Return the constant that a value is, turned or reshaped perhaps; None where it is none."""
    while value is not None and ir.convenience.get_const_tensor(value) is None:
        producer = value.producer()
        value = producer.inputs[0] if producer is not None and is_standard(producer, *MOVING) else None
    return value


def _role(site: Site) -> tuple[object, ...]:
    """Return what nodes with one weight must have in common to be one site; strides and pads may differ."""
    return (site.op_type, site.bias_name, site.spec.refusal, *site.weight.shape)
