"""Measure every candidate of every layer, for the latency table behind a budget in time.

Layers of the same geometry are measured once (`LayerTimer`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import nn

from decomposition import Candidate, CandidateSet, DecompositionError, Factorise, LatencyTable
from decomposition.network.layers import DecomposableModule, is_decomposable_module
from decomposition.network.patches import Geometry
from rankrl.timing.layer_timing import LayerTimer
from rankrl.timing.lone_node import LoneNode

_LARGEST_SHARE = 0.98
"""At most this part of the network's time is the layers': their sum can exceed it, measured one by one."""
_LEAST_SHARE = 0.5
"""At least this part of the time of the network in integers is the layers'."""

_NOTHING = 1e-4
"""Milliseconds of a layer that leaves the network: a table holds positive times."""

_Rows = tuple[tuple[float, ...], ...]
_NO_ROWS: _Rows = ()
_SiteTimes = tuple[tuple[float, ...], _Rows]
"""Times of a site's candidates, and of each at every number of outputs that the next site may read."""


@dataclass(frozen=True)
class SiteTimes:
    """Times of sites on their own, in milliseconds."""

    times: dict[str, tuple[float, ...]]
    narrowed: dict[str, _Rows]
    borders: dict[str, float]

    def table(
        self,
        sites: Sequence[CandidateSet],
        whole: float,
        in_integers: float | None = None,
        conditions: str = "",
    ) -> LatencyTable:
        """Return the table in which the dense layers and a rest add up to the time of the dense network."""
        for name, time in (("the dense network", whole), *((k, v[-1]) for k, v in self.times.items())):
            if not np.isfinite(time):
                raise DecompositionError(
                    f"{name} does not run where it was timed ({conditions}), so that nothing can be compared "
                    "with it; the reason stands under `failed` in the table"
                )
        dense = sum(times[-1] for times in self.times.values())
        factor = min(1.0, _LARGEST_SHARE * whole / dense)
        rest, integer_factor = whole - factor * dense, 1.0
        if in_integers is not None and np.isfinite(in_integers):
            # Layers without integers have the same time in both networks.
            integers = {site.name: self._in_integers(site) for site in sites}
            quantised = sum(map(sum, integers.values()))
            floats = factor * sum(self.times[name][-1] for name, own in integers.items() if not own)
            left = in_integers - floats
            if quantised > 0:
                integer_factor = max(left - rest, _LEAST_SHARE * left) / quantised if left > 0 else factor
        factors = {
            site.name: [integer_factor if each.computes_integers else factor for each in site.candidates]
            for site in sites
        }
        scaled = {
            name: tuple(time * scale for time, scale in zip(self.times[name], own, strict=True))
            for name, own in factors.items()
        }
        narrower = {
            name: tuple(
                tuple(time * scale for time in row) for row, scale in zip(rows, factors[name], strict=True)
            )
            for name, rows in self.narrowed.items()
        }
        return LatencyTable(scaled, rest=rest, conditions=conditions, borders=self.borders, narrowed=narrower)

    def _in_integers(self, site: CandidateSet) -> list[float]:
        """Return the times of the dense layer in integers, where it has them and they run."""
        times = zip(site.candidates, self.times[site.name], strict=True)
        return [time for candidate, time in times if candidate.only_integers and np.isfinite(time)]


def time_sites(
    timer: LayerTimer,
    modules: Mapping[str, nn.Module | LoneNode],
    sites: Sequence[CandidateSet],
    progress: Callable[[str], None] | None = None,
) -> SiteTimes:
    """Measure every candidate of every site."""
    alike: dict[str, list[CandidateSet]] = {}
    for site in sites:
        alike.setdefault(geometry(site), []).append(site)
    times: dict[str, tuple[float, ...]] = {}
    narrowed: dict[str, _Rows] = {}
    borders: dict[str, float] = {}
    integers = any(candidate.integer for site in sites for candidate in site.candidates)
    for group in alike.values():
        together = _together(group)
        module = modules[together.name]
        border, rows = 0.0, _NO_ROWS
        if isinstance(module, LoneNode):
            measured = timer.node(module, together.candidates)
        elif is_decomposable_module(module):
            border = timer.border(together.spec) if integers else 0.0
            measured, rows = _site_times(timer, module, together)
        else:
            raise TypeError(f"layer {together.name!r} is a {type(module).__name__}")
        known = {_identity(candidate): index for index, candidate in enumerate(together.candidates)}
        additions: dict[bool, float] = {}
        if any(map(_adds, group)):
            additions = {integer: timer.addition(together.spec, integer) for integer in {False, integers}}
        for site in group:
            mine = [known.get(_identity(candidate)) for candidate in site.candidates]
            # The output of a block's last layer is added to the block's input.
            added = additions if _adds(site) else {}
            times[site.name] = tuple(
                _NOTHING if index is None else measured[index] + added.get(candidate.integer, 0.0)
                for index, candidate in zip(mine, site.candidates, strict=True)
            )
            borders[site.name] = border
            if site.narrows:
                nothing = (_NOTHING,) * len(rows[-1])
                narrowed[site.name] = tuple(nothing if index is None else rows[index] for index in mine)
            if progress is not None:
                progress(site.name)
    return SiteTimes(times, narrowed, borders if integers else {})


def _together(sites: Sequence[CandidateSet]) -> CandidateSet:
    """Return the candidates of layers of one geometry in one set, without repetitions."""
    staying = (candidate for site in sites for candidate in site.candidates[:-1] if candidate.removed is None)
    distinct = {_identity(candidate): candidate for candidate in staying}
    return replace(sites[0], candidates=(*distinct.values(), sites[0].candidates[-1]))


def _identity(candidate: Candidate) -> str:
    """Return the key of a candidate's time; of the channels that it reads only their number counts."""
    return repr((candidate.inputs, [operation.to_dict() for operation in candidate.operations]))


def _site_times(timer: LayerTimer, module: DecomposableModule, site: CandidateSet) -> _SiteTimes:
    """Return the time of every candidate, and at every number of outputs that the next site may read.

    The latter is measured for dense layers; factorised ones are assumed to save nothing, an upper bound.
    """
    groups: dict[int, list[int]] = {}
    for index, candidate in enumerate(site.candidates):
        inputs = site.spec.in_channels if candidate.inputs is None else candidate.inputs
        groups.setdefault(inputs, []).append(index)

    def measured(indices: list[int], inputs: int, outputs: int) -> np.ndarray:
        layer = replace(Geometry.of(module), in_channels=inputs, out_channels=outputs).dense()
        operations = [site.candidates[index].operations for index in indices]
        return timer.candidates(layer, site.spec.narrowed(inputs=inputs, outputs=outputs), operations)

    times = np.zeros(len(site))
    for inputs, indices in groups.items():
        times[indices] = measured(indices, inputs, site.spec.out_channels)
    numbers = [fewer.rows for fewer in site.candidates[site.dense].narrower if fewer is not None]
    narrowed = np.repeat(times[:, None], len(numbers), axis=1)
    for column, outputs in enumerate(numbers):
        for inputs, indices in groups.items():
            dense = [index for index in indices if not _factorised(site.candidates[index])]
            if dense:
                narrowed[dense, column] = measured(dense, inputs, outputs)
    return tuple(times.tolist()), tuple(map(tuple, narrowed.tolist()))


def _adds(site: CandidateSet) -> bool:
    """Tell whether a block adds the site's output to its input, an addition that goes with the site."""
    return any(candidate.removed is not None and candidate.error > 0 for candidate in site.candidates)


def _factorised(candidate: Candidate) -> bool:
    return any(isinstance(operation, Factorise) for operation in candidate.operations)


def geometry(site: CandidateSet) -> str:
    """Return the key of a layer's latencies besides its operations: its geometry."""
    nameless = replace(site.spec, name="", index=0, batch_norm=None)
    return repr((nameless, [fewer and fewer.rows for fewer in site.candidates[site.dense].narrower]))
