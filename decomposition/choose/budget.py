"""Count costs against budgets in parameters, MACs, bytes and time, and tabulate measured times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from torch import nn

from decomposition.choose.candidates import CandidateSet, in_one_block, leaves_one_dense, saved
from decomposition.errors import DecompositionError
from decomposition.network.cost import count_macs, count_parameters
from decomposition.network.inputs import ExampleInputs
from decomposition.network.layers import FLOAT_BYTES


@dataclass(frozen=True)
class Budget:
    """A bound on the whole model's cost, as a fraction of the dense model's.

    Attributes:
        fraction: Kept fraction in (0, 1].
        measure: `params`, `macs`, `bytes` or `latency`.
        total: Cost of the whole dense model.
        fixed: Cost of everything that belongs to no site (batch norm, layers that stay as they are).
        borders: What is paid between a site and the next in forward order where one computes in integers and
            the other does not, one for each site but the last; empty where nothing is.
        also: A second budget that has to be kept as well, of another measure; None where there is none.
    """

    fraction: float
    measure: str
    total: float
    fixed: float
    borders: tuple[float, ...] = ()
    also: Budget | None = None

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise DecompositionError(
                f"budget.{self.measure}={self.fraction} is outside (0, 1]; it is the fraction to keep, "
                "for example 0.4"
            )
        if self.also is not None and (self.also.also is not None or self.also.measure == self.measure):
            raise DecompositionError(
                f"budget.{self.measure} goes together with one other measure, got {self.also.measures}"
            )

    @classmethod
    def of_model(
        cls,
        model: nn.Module,
        sites: Sequence[CandidateSet],
        input_shape: ExampleInputs,
        measure: str,
        fraction: float,
    ) -> Budget:
        """Return a budget in parameters, MACs or bytes of a whole model.

        Args:
            model: The dense model.
            sites: The candidates of its sites.
            input_shape: Shape of one input without the batch axis, or a batch of inputs.
            measure: `params`, `macs` or `bytes`.
            fraction: Fraction of the model's cost to keep, in (0, 1].

        Raises:
            DecompositionError: If the fraction is outside (0, 1].
        """
        if measure == "macs":
            total = count_macs(model, input_shape)
        else:
            total = count_parameters(model) * (FLOAT_BYTES if measure == "bytes" else 1)
        return cls.of_total(total, sites, measure, fraction)

    @classmethod
    def of_total(cls, total: float, sites: Sequence[CandidateSet], measure: str, fraction: float) -> Budget:
        """Return a budget of a whole model whose dense cost is known.

        Args:
            total: What the dense model costs.
            sites: The candidates of its sites.
            measure: `params`, `macs` or `bytes`.
            fraction: Fraction of it to keep, in (0, 1].

        Raises:
            DecompositionError: If the fraction is outside (0, 1].
        """
        covered = sum(int(site.cost(measure)[site.dense]) for site in sites)
        return cls(fraction, measure, total, total - covered)

    @property
    def limits(self) -> tuple[Budget, ...]:
        """The budgets that have to be kept, one or two."""
        return (self,) if self.also is None else (self, self.also)

    @property
    def measures(self) -> tuple[str, ...]:
        """Measures of the budgets: `params`, `macs`, `bytes` or `latency`."""
        return tuple(limit.measure for limit in self.limits)

    @property
    def available(self) -> float:
        """Cost that the sites may take together."""
        return self.fraction * self.total - self.fixed

    def coupled(self, sites: Sequence[CandidateSet]) -> bool:
        """Tell whether a candidate's cost, in any budget, depends on its neighbours."""
        together = any(site.narrows or site.removal is not None for site in sites)
        return together or any(bool(limit.borders) for limit in self.limits)

    def coupling(self, sites: Sequence[CandidateSet], site: int) -> np.ndarray | None:
        """Return the cost that candidates of a site and of the next one share, beyond their own costs.

        This is the border between integers and floating point, less what the site saves because the next one
        does not read all of its outputs. It is infinite if the two do not go together: one layer of a block
        cannot leave the network while another stays.

        Returns:
            Shape (candidates of the site, candidates of the next), in the unit of the measure; `None` where
            there is nothing.
        """
        here, behind = sites[site], sites[site + 1]
        one_block = in_one_block(here, behind)
        if not self.borders and behind.producer != here.name and not one_block:
            return None
        together = np.zeros((len(here), len(behind)))
        if self.borders:
            together += self.borders[site] * (here.integer[:, None] != behind.integer[None])
        if behind.producer == here.name:
            together -= here.saved(self.measure)[:, behind.levels]
        if one_block:
            together[here.leaving[:, None] != behind.leaving[None]] = np.inf
        return together

    def spent(self, sites: Sequence[CandidateSet], choices: Sequence[int] | np.ndarray) -> float:
        """Return the cost of the whole model with candidate `choices[j]` of `sites[j]`.

        It is infinite where candidates do not go together, or a site stays as it is that must change.
        """
        for (here, choice), (behind, next_choice) in pairwise(zip(sites, map(int, choices), strict=True)):
            if in_one_block(here, behind) and here.leaving[choice] != behind.leaving[next_choice]:
                return np.inf
        if leaves_one_dense(sites, choices):
            return np.inf
        own = sum(float(site.cost(self.measure)[int(j)]) for site, j in zip(sites, choices, strict=True))
        return self.fixed + own + self.crossed(sites, choices) - saved(sites, choices, self.measure)

    def crossed(self, sites: Sequence[CandidateSet], choices: Sequence[int] | np.ndarray) -> float:
        """Return the cost of the borders between integers and floating point under the choices."""
        if not self.borders:
            return 0.0
        integer = np.array([site.integer[int(j)] for site, j in zip(sites, choices, strict=True)])
        return float((integer[1:] != integer[:-1]) @ np.asarray(self.borders))

    def left(self, sites: Sequence[CandidateSet], choices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the slack of each budget under the choices; negative where they exceed it.

        Returns:
            Shape (limits,), each in the unit of its measure.
        """
        return np.array([limit.fraction * limit.total - limit.spent(sites, choices) for limit in self.limits])

    def kept(self, sites: Sequence[CandidateSet], choices: Sequence[int] | np.ndarray) -> bool:
        """Tell whether the choices stay within every budget."""
        return all(limit.spent(sites, choices) <= limit.fraction * limit.total for limit in self.limits)

    def extra(self, sites: Sequence[CandidateSet], choices: np.ndarray, site: int) -> np.ndarray:
        """Return the extra cost of each candidate of a site over the present choice.

        Args:
            sites: The candidates of every site.
            choices: Index of the chosen candidate of every site.
            site: Index of the site.

        Returns:
            Shape (limits, candidates of the site), each in the unit of its measure; 0 for the one that is
            chosen.
        """
        return np.stack([limit._extra(sites, choices, site) for limit in self.limits])

    def _extra(self, sites: Sequence[CandidateSet], choices: np.ndarray, site: int) -> np.ndarray:
        costs = sites[site].cost(self.measure).astype(float)
        if site > 0 and (before := self.coupling(sites, site - 1)) is not None:
            costs = costs + before[choices[site - 1]]
        if site < len(sites) - 1 and (behind := self.coupling(sites, site)) is not None:
            costs = costs + behind[:, choices[site + 1]]
        extra: np.ndarray = costs - costs[choices[site]]
        if sites[site].must_change:
            extra[-1] = np.inf
        return extra

    def price(self, extra: np.ndarray, mixture: Sequence[float] | np.ndarray | None = None) -> np.ndarray:
        """Reduce the extra costs over several budgets to one price each, in the unit of the first budget.

        Args:
            extra: Shape (limits, candidates).
            mixture: Factor of each budget, shape (limits,); `None` counts all alike.
        """
        factors = np.ones(len(extra)) if mixture is None else np.asarray(mixture)
        units = [self.total / limit.total for limit in self.limits]
        price: np.ndarray = (factors * units) @ extra
        return price


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
            limits = {False: np.inf if site.must_change else own[-1], True: np.inf}
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
        """Return the sites with the measured times of all candidates."""
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
