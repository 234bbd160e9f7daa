"""What each layer loses and costs at its candidate ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from decomposition.errors import DecompositionError
from decomposition.formats import Ranks, TensorFormat
from decomposition.layers import LayerSpec
from decomposition.modes import WeightModes
from decomposition.plan import CompressionPlan, LayerPlan, fingerprint

# Shares of the energy below this are rounding.
_NOTHING = 1e-12


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
        importance: What squared errors of this layer count beside those of other layers; positive or 0.
    """

    spec: LayerSpec
    entries: tuple[LayerPlan, ...]
    params: np.ndarray
    macs: np.ndarray
    errors: np.ndarray
    latency: np.ndarray | None = None
    importance: float = 1.0

    @property
    def losses(self) -> np.ndarray:
        """What each candidate costs the network's output: importance * error^2; shape (candidates,)."""
        return self.importance * self.errors**2

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
    tensor_format: TensorFormat,
    spec: LayerSpec,
    modes: WeightModes,
    *,
    limit: int = 16,
    multiple: int = 1,
    spectra: Sequence[np.ndarray] = (),
) -> list[Ranks]:
    """Return ranks that make the layer smaller, in ascending order of parameters.

    Args:
        tensor_format: The format.
        spec: The layer.
        modes: How its weight is read.
        limit: Candidates at most; where more ranks are feasible, a geometric grid of them.
        multiple: Each rank is a multiple of it, a divisor, or a bond's largest. A processor computes with
            several channels at a time; ranks that leave none of them idle can be faster than smaller ones.
        spectra: For each bond, the energy that each rank adds, descending (`TensorFormat.spectra`). With
            them bonds get ranks of their own: the combinations that lose least, by the sum of the discarded
            energies, for their parameters. Without, all bonds share one rank up to their caps.

    Returns:
        Ranks a bond of every candidate; empty when no rank makes the layer smaller.

    Raises:
        DecompositionError: If `multiple` is less than 1.
    """
    if multiple < 1:
        raise DecompositionError(f"ranks are multiples of 1 or more, got multiple={multiple}")
    bias = spec.out_channels if spec.bias else 0
    if spectra:
        smaller = _efficient_ranks(tensor_format, modes, spectra, spec.params - bias, multiple)
    else:
        smaller = []
        for rank in _multiples(tensor_format.max_rank(modes), multiple):
            ranks = tensor_format.expand(modes, rank)
            if tensor_format.params(modes, ranks) + bias >= spec.params:
                break
            smaller.append(ranks)
    if len(smaller) <= limit:
        return smaller
    sizes = np.array([tensor_format.params(modes, ranks) for ranks in smaller], dtype=float)
    grid = np.geomspace(sizes[0], sizes[-1], limit)
    return [smaller[j] for j in sorted({int(np.abs(np.log(sizes / size)).argmin()) for size in grid})]


def _efficient_ranks(
    tensor_format: TensorFormat,
    modes: WeightModes,
    spectra: Sequence[np.ndarray],
    dense: int,
    multiple: int,
) -> list[Ranks]:
    """Return all combinations of ranks below `dense` parameters that no smaller one beats, ascending."""
    lost = [
        np.maximum(energies.sum() - np.cumsum(energies), 0.0)[:largest]
        for energies, largest in zip(spectra, tensor_format.max_ranks(modes), strict=True)
    ]
    combinations = []
    for ranks in product(*(_multiples(len(each), multiple) for each in lost)):
        params = tensor_format.params(modes, ranks)
        if params < dense:
            combinations.append(
                (params, sum(each[r - 1] for each, r in zip(lost, ranks, strict=True)), ranks)
            )
    efficient: list[Ranks] = []
    least = float("inf")
    for _, loss, ranks in sorted(combinations):
        if loss < least - _NOTHING:
            least = loss
            efficient.append(ranks)
    return efficient


def _multiples(largest: int, multiple: int) -> list[int]:
    """Return the multiples up to `largest`, below the first of them its divisors, and `largest` itself."""
    return [
        rank
        for rank in range(1, largest + 1)
        if rank % multiple == 0 or multiple % rank == 0 or rank == largest
    ]


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
