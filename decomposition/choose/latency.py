"""A table of measured layer latencies, for budgets in time.

How a latency is measured (which runtime, batch size, number of threads) is the caller's; this is the noun
that carries the numbers to the allocation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from decomposition.candidates.candidates import CandidateSet
from decomposition.choose.budget import Budget
from decomposition.errors import DecompositionError


@dataclass(frozen=True)
class LatencyTable:
    """Measured time of every site's candidates, all in the same unit and under the same conditions.

    Attributes:
        sites: For each site the time of every candidate, in their order; the last is the dense one's.
            Infinity for one that does not run.
        rest: Time of everything that belongs to no site.
        conditions: How it was measured (runtime, batch, threads, machine), for the reader.
        borders: For each site the time that is lost between it and the next where one of the two computes in
            integers and the other does not; empty where nothing does.
        narrowed: For sites whose outputs the next one may read only in part: the time of every candidate at
            every such number of channels.
    """

    sites: Mapping[str, Sequence[float]]
    rest: float = 0.0
    conditions: str = ""
    borders: Mapping[str, float] = field(default_factory=dict)
    narrowed: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, times in self.sites.items():
            if not times:
                raise DecompositionError(f"site {name!r}: the latency table lacks the dense layer's time")
            for index, time in enumerate(times):
                dense = index == len(times) - 1
                if not time > 0 or (dense and not np.isfinite(time)):
                    raise DecompositionError(
                        f"site {name!r}: the time of candidate {index} is {time}; it must be positive"
                    )
        borders = ((f"the border behind {name!r}", time) for name, time in self.borders.items())
        for name, time in (("the rest", self.rest), *borders):
            if not (np.isfinite(time) and time >= 0):
                raise DecompositionError(f"the latency of {name} is {time}; it must be 0 or more")

    @property
    def total(self) -> float:
        """Time of the dense network."""
        return self.rest + sum(times[-1] for times in self.sites.values())

    def without_slower(self, sites: Sequence[CandidateSet]) -> tuple[LatencyTable, list[CandidateSet]]:
        """Return the table and the sites without candidates that are slower than their dense layer.

        Candidates that do not run go too. Each is compared with the dense layer in its own precision: within
        a budget in time nothing is gained by it. A table whose times are changed later (corrected by whole
        networks, kind by kind) is to be cut first, or it takes candidates for fast that were measured to be
        slow.

        Raises:
            DecompositionError: If a site or one of its candidates was not measured.
        """
        cut, indices = [], {}
        for site in sites:
            own = self.sites.get(site.name, ())
            if len(own) != len(site):
                raise DecompositionError(
                    f"site {site.name!r} has {len(site)} candidates, the latency table holds {len(own)} "
                    "times for it; measure all candidates"
                )
            limits = {False: own[-1], True: np.inf}
            for candidate, time in zip(site.candidates, own, strict=True):
                if candidate.integer and candidate.only_integers:
                    limits[True] = time
            kept = [
                index
                for index, (candidate, time) in enumerate(zip(site.candidates[:-1], own, strict=False))
                if time < limits[candidate.integer] or (time == limits[True] and np.isfinite(time))
            ]
            dense = site.candidates[-1]
            if not kept and len(site) > 1:
                dense = replace(dense, reason="no candidate is faster than the dense layer")
            cut.append(replace(site, candidates=(*(site.candidates[index] for index in kept), dense)))
            kept.append(len(site) - 1)
            indices[site.name] = kept
        return self.part(indices), cut

    def part(self, indices: Mapping[str, Sequence[int]]) -> LatencyTable:
        """Return the table of some candidates of some sites, by their indices."""
        times = {name: tuple(self.sites[name][j] for j in kept) for name, kept in indices.items()}
        narrowed = {
            name: tuple(self.narrowed[name][j] for j in kept)
            for name, kept in indices.items()
            if name in self.narrowed
        }
        return replace(self, sites=times, narrowed=narrowed)

    def attach(self, sites: Sequence[CandidateSet]) -> list[CandidateSet]:
        """Return the sites with measured times, without candidates that are slower than their dense layer.

        Raises:
            DecompositionError: If a site or one of its candidates was not measured.
        """
        table, faster = self.without_slower(sites)
        return table.timed(faster)

    def timed(self, sites: Sequence[CandidateSet]) -> list[CandidateSet]:
        """Return the sites with measured times, all candidates of them."""
        attached = []
        for site in sites:
            times = self.sites[site.name]
            narrowed = self.narrowed.get(
                site.name, [[time] * len(site.candidates[-1].narrower) for time in times]
            )
            timed = tuple(
                replace(
                    candidate,
                    cost=replace(candidate.cost, time=float(time)),
                    narrower=tuple(
                        None if cost is None else replace(cost, time=float(narrow))
                        for cost, narrow in zip(candidate.narrower, row, strict=True)
                    ),
                )
                for candidate, time, row in zip(site.candidates, times, narrowed, strict=True)
            )
            attached.append(replace(site, candidates=timed))
        return attached

    def budget(self, fraction: float, sites: Sequence[CandidateSet]) -> Budget:
        """Return the budget that keeps a fraction of the dense network's time, in (0, 1]."""
        borders = tuple(self.borders.get(site.name, 0.0) for site in sites[:-1])
        return Budget(fraction, "latency", self.total, self.rest, borders if any(borders) else ())

    def to_dict(self) -> dict[str, Any]:
        """Return the table as plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LatencyTable:
        """Return the table of `to_dict`, read from JSON or not.

        Raises:
            DecompositionError: The values are no latency table.
        """
        try:
            sites = {name: tuple(map(float, times)) for name, times in values["sites"].items()}
            borders = {name: float(time) for name, time in values["borders"].items()}
            narrowed = {
                name: tuple(tuple(map(float, row)) for row in rows)
                for name, rows in values["narrowed"].items()
            }
            return cls(sites, float(values["rest"]), str(values["conditions"]), borders, narrowed)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, DecompositionError):
                raise
            raise DecompositionError(f"these values are no latency table ({error}); measure anew") from error
