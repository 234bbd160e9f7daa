"""Factors from elsewhere: tensorly's objects as fits, and fits that become layers as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from decomposition.apply.apply import build_structure
from decomposition.apply.forms import factorised_layers
from decomposition.errors import DecompositionError, PlanError
from decomposition.fit.fitting import Fit
from decomposition.formats import get_format
from decomposition.formats.tensorly_objects import read_tensorly
from decomposition.network.inputs import ExampleInputs, input_shape_of
from decomposition.network.kinds import DecomposableModule, is_decomposable_module, weight_of
from decomposition.network.layers import inspect_layers
from decomposition.network.modes import WeightModes
from decomposition.network.rewriting import rewrites_of
from decomposition.network.wrappers import unwrapped
from decomposition.operations import Factorise
from decomposition.operations.factorise import factors_of
from decomposition.plan.layer_plan import LayerPlan, without_growth
from decomposition.plan.plan import CompressionPlan, fingerprint
from decomposition.public_calls import public_call


@public_call()
def from_tensorly(tensor: Any, layer: DecomposableModule, *, tensor_format: str | None = None) -> Fit:
    """Read factors that tensorly computed of a layer's weight.

    Args:
        tensor: A `CPTensor`, `TuckerTensor`, `TTTensor` or `TRTensor` in any backend; or what tensorly takes
            for one: `(weights, factors)`, `(core, factors)`, also with two factors as of `partial_tucker`, or
            a list of cores. It stands for a tensor (out, in, *kernel), the kernel's axes joint or apart;
            trains and rings may split the channels into several modes.
        layer: The Conv1d, Conv2d or Linear whose weight it stands for.
        tensor_format: Name of the format to read a train or ring as; `None` for the object's own.

    Returns:
        The fit in the layer's format: weights and further kernel factors are contracted into the cores, which
        changes nothing of the tensor. Its error is |W - V| / |W|, W the layer's weight.

    Raises:
        DecompositionError: If it is no such object or stands for a tensor of another shape, if its ranks are
            larger than the format can use, or the layer cannot be decomposed.
    """
    if not is_decomposable_module(layer) or getattr(layer, "groups", 1) > 1:
        raise DecompositionError(
            f"factors are of a Conv1d, Conv2d or Linear with groups=1, not of {layer}; give the dense layer"
        )
    factors = read_tensorly(tensor)
    chains = ("tensor_ring", "tensor_train")
    name = factors.kind if tensor_format is None else tensor_format
    if name != factors.kind and not {name, factors.kind} <= set(chains):
        get_format(name)
        raise DecompositionError(
            f"tensorly's object is of the format {factors.kind!r} and cannot be read as {name!r}; leave "
            "tensor_format out"
        )
    weight = weight_of(layer)
    size = () if isinstance(layer, nn.Linear) else tuple(layer.kernel_size)
    plain = WeightModes((weight.shape[0],), (weight.shape[1],), weight.shape[2], size)
    form = get_format(name)
    cores, ranks, modes = form.from_tensorly(factors, plain)
    ranks = form.check_ranks(modes, ranks, str(layer))
    cores = [core.contiguous() for core in cores]
    lost = float((weight - form.reconstruct(cores, modes)).norm())
    whole = float(weight.norm())
    error = lost / whole if whole else float("inf") if lost else 0.0
    return Fit(cores, error, form, modes, ranks)


def as_operation(fit: Fit) -> Factorise:
    """Return the operation that gives a layer the format and ranks of a fit."""
    return Factorise(fit.tensor_format.name, fit.ranks, factors_of(fit.modes))


@public_call()
def apply_fits(
    model: nn.Module, input_shape: ExampleInputs, fits: Mapping[str, Fit], *, chosen_by: str = "user"
) -> tuple[nn.Module, CompressionPlan]:
    """Return a copy of `model` whose layers hold given cores, not fitted again, and its plan.

    Args:
        model: The dense model; left untouched.
        input_shape: Shape of one input without the batch axis, or a batch of inputs.
        fits: Fits by layer name; layers that are not named stay dense, and so do those that would get no
            smaller, with the reason.
        chosen_by: Recorded in the plan.

    Raises:
        PlanError: If a name is no compressible layer of the model.
        DecompositionError: If a fit is of a weight of another shape.
    """
    model = unwrapped(model)
    specs = inspect_layers(model, input_shape)
    known = {spec.name for spec in specs if spec.refusal is None}
    unknown = [name for name in fits if name not in known]
    if unknown:
        raise PlanError(f"{unknown[0]!r} is no compressible layer; choose from {', '.join(sorted(known))}")
    entries = {name: LayerPlan(name, (as_operation(fit),)) for name, fit in fits.items()}
    layers = tuple(
        without_growth(entries[spec.name], spec)
        if spec.name in entries
        else LayerPlan(spec.name, reason=spec.refusal or "no factors were given")
        for spec in specs
    )
    shape, rewrites = input_shape_of(input_shape), rewrites_of(model)
    plan = CompressionPlan(layers, fingerprint(specs), shape, chosen_by, preparation=rewrites)
    network = build_structure(model, plan)
    for name, layer in factorised_layers(network).items():
        dense: Any = model.get_submodule(name)
        layer.load(fits[name].cores, dense.bias, fits[name].error)
    return network, plan
