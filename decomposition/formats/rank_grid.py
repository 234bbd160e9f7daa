"""The ranks of a format that are worth trying for a layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

from decomposition.errors import DecompositionError
from decomposition.formats import Ranks, TensorFormat
from decomposition.network.layers import LayerSpec
from decomposition.network.modes import WeightModes

# Shares of the energy below this are rounding.
_NOTHING = 1e-12


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
        multiple: Each rank is a multiple of it or a bond's largest; a divisor where that is smaller. A
            processor computes with several channels at a time: ranks that leave none of them idle can be
            faster than smaller ones.
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
    for ranks in product(*(_multiples(len(losses), multiple) for losses in lost)):
        params = tensor_format.params(modes, ranks)
        if params < dense:
            combinations.append(
                (params, sum(losses[r - 1] for losses, r in zip(lost, ranks, strict=True)), ranks)
            )
    efficient: list[Ranks] = []
    least = float("inf")
    for _, loss, ranks in sorted(combinations):
        if loss < least - _NOTHING:
            least = loss
            efficient.append(ranks)
    return efficient


def _multiples(largest: int, multiple: int) -> list[int]:
    """Return the multiples up to `largest`, and `largest` itself; divisors where it is smaller."""
    if largest < multiple:
        return [rank for rank in range(1, largest + 1) if multiple % rank == 0 or rank == largest]
    return [rank for rank in range(1, largest + 1) if rank % multiple == 0 or rank == largest]
