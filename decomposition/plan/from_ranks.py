"""Plans from ranks given by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from decomposition.errors import PlanError
from decomposition.formats import get_format
from decomposition.network.inputs import ExampleInputs, input_shape_of
from decomposition.network.layers import inspect_layers
from decomposition.network.rewriting import rewrites_of
from decomposition.network.wrappers import unwrapped
from decomposition.operations import Factorise
from decomposition.operations.factorise import factors_of
from decomposition.plan.layer_plan import LayerPlan, without_growth
from decomposition.plan.plan import CompressionPlan, fingerprint
from decomposition.public_calls import public_call


@public_call(values=False)
def make_plan(
    model: nn.Module,
    input_shape: ExampleInputs,
    tensor_format: str,
    ranks: int | Mapping[str, int | Sequence[int]],
    *,
    tensorised: bool = False,
    chosen_by: str = "user",
) -> CompressionPlan:
    """Make a plan from ranks given by hand.

    Args:
        model: The dense model.
        input_shape: Shape of one input without the batch axis, or a batch of inputs.
        tensor_format: Name of the format.
        ranks: One rank for every compressible layer (capped at each layer's maximum), or ranks by layer name:
            one integer, or one a bond. Layers that are not named stay dense.
        tensorised: Split channel counts into small factors.
        chosen_by: Recorded in the plan.

    Returns:
        The plan; a layer that would get no smaller stays dense, with the reason.

    Raises:
        DecompositionError: If a rank is not feasible.
        PlanError: If a name is no compressible layer of the model.
    """
    all_specs = inspect_layers(model, input_shape)
    form = get_format(tensor_format)
    by_name = {spec.name: spec for spec in all_specs}
    if isinstance(ranks, Mapping):
        for name in ranks:
            spec = by_name.get(name)
            if spec is None or spec.refusal is not None:
                compressible = ", ".join(s.name for s in all_specs if s.refusal is None)
                why = f": {spec.refusal}" if spec is not None else ""
                raise PlanError(f"{name!r} is no compressible layer{why}; choose from {compressible}")
    layers = []
    for spec in all_specs:
        if spec.refusal is not None:
            layers.append(LayerPlan(spec.name, reason=spec.refusal))
            continue
        modes = form.modes(spec, tensorised=tensorised)
        if isinstance(ranks, Mapping):
            if spec.name not in ranks:
                layers.append(LayerPlan(spec.name, reason="no rank was given"))
                continue
            layer_ranks = ranks[spec.name]
            layer_ranks = tuple(layer_ranks) if isinstance(layer_ranks, Sequence) else layer_ranks
        else:
            layer_ranks = min(ranks, form.max_rank(modes)) if type(ranks) is int else ranks
        checked = form.check_ranks(modes, layer_ranks, spec.name)
        operation = Factorise(tensor_format, checked, factors_of(modes))
        layers.append(without_growth(LayerPlan(spec.name, (operation,)), spec))
    return CompressionPlan(
        tuple(layers),
        fingerprint(all_specs),
        input_shape_of(input_shape),
        chosen_by,
        preparation=rewrites_of(unwrapped(model)),
    )
