"""Fitting the layers of a library side by side, one process a layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from decomposition.candidates.candidates import CandidateSet
from decomposition.candidates.fit_cache import FitCache
from decomposition.candidates.processes import Spread, in_processes
from decomposition.network.layers import LayerSpec

if TYPE_CHECKING:
    from decomposition.candidates.library import FitLibrary


def largest_first(specs: Mapping[str, LayerSpec]) -> list[str]:
    """Return the layers, the most work first: processes that share them finish soonest in this order."""

    def work(name: str) -> int:
        spec = specs[name]
        columns = math.prod(spec.weight_shape[1:])
        return spec.out_channels * columns**2 * (1 if spec.kernel_elements == 1 else 100)

    return sorted(specs, key=work, reverse=True)


def fit_side_by_side(
    library: FitLibrary,
    jobs: Iterable[tuple[str, CandidateSet | int]],
    workers: int | Spread[Any, Any],
    finish: Callable[[CandidateSet], None],
) -> None:
    """Fit layers in processes, each with the part of the library that holds one layer."""
    parts = ((library.part(name), site_or_limit) for name, site_or_limit in jobs)
    results: Iterator[tuple[FitCache, CandidateSet]]
    if callable(workers):
        results = workers(_fit_part, parts, "fits")
    else:
        results = in_processes(_fit_part, parts, workers, "fits")
    for computed, site in results:
        library.cache.update(computed)
        finish(site)


def _fit_part(job: tuple[FitLibrary, CandidateSet | int]) -> tuple[FitCache, CandidateSet]:
    """Fit a library's only layer, in a process of its own: these candidates, or at most so many a format."""
    part, site_or_limit = job
    (name,) = part.specs
    before = part.cache.of(name)
    site = (
        part.candidates(name, limit=site_or_limit)
        if isinstance(site_or_limit, int)
        else part.fitted(site_or_limit)
    )
    return part.cache.beyond(before), site
