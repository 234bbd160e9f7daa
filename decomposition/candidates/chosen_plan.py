"""The plan that a choice of candidates stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from decomposition.candidates.candidates import CandidateSet
from decomposition.errors import DecompositionError
from decomposition.network.inputs import ExampleInputs, input_shape_of
from decomposition.network.layers import LayerSpec
from decomposition.network.rewriting import Rewrite
from decomposition.operations import Operation
from decomposition.plan.layer_plan import LayerPlan
from decomposition.plan.plan import CompressionPlan, fingerprint


def plan_from_choices(
    sites: Sequence[CandidateSet],
    choices: Iterable[int],
    all_specs: Sequence[LayerSpec],
    input_shape: ExampleInputs,
    chosen_by: str,
    *,
    keep: Callable[[tuple[int, ...]], Operation] | None = None,
    preparation: Sequence[Rewrite] = (),
) -> CompressionPlan:
    """Make the plan that takes candidate `choices[j]` of `sites[j]`.

    Args:
        sites: The candidates of every site.
        choices: Index of a candidate for each site.
        all_specs: Every layer of the model (`inspect_layers`); those of no site are recorded with the reason.
        input_shape: Shape of one input without the batch axis, or a batch of inputs.
        chosen_by: Recorded in the plan.
        keep: Makes the operation that keeps these output channels of a layer, for candidates that read no
            others.
        preparation: What was rewritten in the model (`rewrites_of`).

    Raises:
        DecompositionError: If a candidate reads only some channels, and there is no `keep`.
    """
    entries: dict[str, LayerPlan] = {}
    for site, choice in zip(sites, choices, strict=True):
        candidate = site.candidates[int(choice)]
        for name in site.layer_names:
            entries[name] = LayerPlan(name, candidate.operations, candidate.reason)
        if candidate.reads is not None:
            if keep is None or site.producer is None:
                raise DecompositionError(
                    f"site {site.name!r} {candidate}, and there is no operation that removes the others; "
                    "pass keep="
                )
            before = entries[site.producer]
            operations = (keep(candidate.reads), *before.operations)
            entries[site.producer] = replace(before, operations=operations, reason=None)
    layers = tuple(
        entries.get(spec.name, LayerPlan(spec.name, reason=spec.refusal or "it was left out"))
        for spec in all_specs
    )
    return CompressionPlan(
        layers,
        fingerprint(all_specs),
        input_shape_of(input_shape),
        chosen_by,
        preparation=tuple(preparation),
    )
