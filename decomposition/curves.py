"""What each layer loses and costs at its candidate ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from decomposition.errors import DecompositionError
from decomposition.formats import Ranks, TensorFormat
from decomposition.layers import LayerSpec
from decomposition.modes import WeightModes
from decomposition.plan import CompressionPlan, LayerPlan, fingerprint


@dataclass(frozen=True)
class RankCurve:
    """The candidates of one layer, the dense layer last.

    Attributes:
        spec: The layer.
        entries: What a plan would hold for each candidate.
        params: Parameters of each candidate, bias included; shape (candidates,).
        macs: Multiply-accumulates of each candidate; shape (candidates,).
        errors: Relative output error of each candidate, 0 for the dense layer; shape (candidates,).
        latency: Measured time of each candidate, in any unit, shape (candidates,); None when not measured.
    """

    spec: LayerSpec
    entries: tuple[LayerPlan, ...]
    params: np.ndarray
    macs: np.ndarray
    errors: np.ndarray
    latency: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.entries)

    def cost(self, measure: str) -> np.ndarray:
        """Return the candidates' cost in `params`, `macs` or `latency`.

        Raises:
            DecompositionError: If the measure is unknown, or the latency was not measured.
        """
        if measure == "latency" and self.latency is not None:
            return self.latency
        if measure == "latency":
            raise DecompositionError(
                f"layer {self.spec.name!r}: its latency was not measured; give every curve a latency array"
            )
        if measure not in ("params", "macs"):
            raise DecompositionError(f"unknown measure {measure!r}; choose params, macs or latency")
        return self.params if measure == "params" else self.macs


def candidate_ranks(
    tensor_format: TensorFormat, spec: LayerSpec, modes: WeightModes, *, limit: int = 16
) -> list[Ranks]:
    """Return single ranks (one a bond, equal up to caps) that make the layer smaller, in ascending order.

    Args:
        tensor_format: The format.
        spec: The layer.
        modes: How its weight is read.
        limit: Candidates at most; where more ranks are feasible, a geometric grid of them.

    Returns:
        Ranks a bond of every candidate; empty when no rank makes the layer smaller.
    """
    bias = spec.out_channels if spec.bias else 0
    smaller = []
    for rank in range(1, tensor_format.max_rank(modes) + 1):
        ranks = tensor_format.expand(modes, rank)
        if tensor_format.params(modes, ranks) + bias >= spec.params:
            break
        smaller.append(ranks)
    if len(smaller) <= limit:
        return smaller
    grid = np.geomspace(1, len(smaller), limit)
    return [smaller[position - 1] for position in sorted({round(float(g)) for g in grid})]


def plan_from_choices(
    curves: Sequence[RankCurve],
    choices: Iterable[int],
    all_specs: Sequence[LayerSpec],
    input_shape: Sequence[int],
    chosen_by: str,
) -> CompressionPlan:
    """Make the plan that takes candidate `choices[j]` of `curves[j]`.

    Args:
        curves: One curve for each compressible layer.
        choices: Index of a candidate for each curve.
        all_specs: Every layer of the model (`inspect_layers`); the others are recorded with their refusal.
        input_shape: Shape of one input without the batch axis.
        chosen_by: Recorded in the plan.
    """
    chosen: Mapping[str, LayerPlan] = {
        curve.spec.name: curve.entries[int(choice)] for curve, choice in zip(curves, choices, strict=True)
    }
    layers = tuple(
        chosen.get(spec.name, LayerPlan(spec.name, reason=spec.refusal or "it was left out"))
        for spec in all_specs
    )
    return CompressionPlan(layers, fingerprint(all_specs), tuple(input_shape), chosen_by)
