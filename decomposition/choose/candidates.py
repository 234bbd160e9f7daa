"""Hold the candidates of each layer with costs and losses, and turn choices among them into a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from decomposition.errors import DecompositionError
from decomposition.network.inputs import ExampleInputs, input_shape_of
from decomposition.network.layers import LayerSpec
from decomposition.operations import Cost, Operation
from decomposition.plan.plan import CompressionPlan, LayerPlan, fingerprint
from decomposition.rewrites import Rewrite

MEASURES = ("params", "macs", "bytes", "latency")
"""Measures of cost that a budget can count."""


@dataclass(frozen=True)
class Candidate:
    """One choice for a site.

    Attributes:
        operations: What is done with each of the site's layers; empty for a site that stays as it is.
        cost: What the site costs then.
        error: Relative output error, 0 for the site as it is.
        generator: What proposed it: the name of a tensor format, say.
        reason: Why nothing is done, for a candidate without operations.
        reads: Input channels that the layer reads, sorted; the layer before it loses the others. `None` for
            all of them.
        level: Place of the number of channels read among those the site may read, counted from 1; 0 for all.
        narrower: What the site costs if the next one reads only some of its outputs, for each possible number
            of channels; `None` if the operations do not allow it.
        passes_int8_through: Whether a site that leaves the network stands between neighbours in integers.
    """

    operations: tuple[Operation, ...]
    cost: Cost
    error: float
    generator: str = ""
    reason: str | None = None
    reads: tuple[int, ...] | None = None
    level: int = 0
    narrower: tuple[Cost | None, ...] = ()
    passes_int8_through: bool = False

    @property
    def integer(self) -> bool:
        """Whether the site takes and gives integers."""
        return self.passes_int8_through or any(operation.integer for operation in self.operations)

    @property
    def computes_integers(self) -> bool:
        """Whether the site multiplies integers, or stands between neighbours in integers."""
        return self.passes_int8_through or any(operation.computes_integers for operation in self.operations)

    @property
    def removed(self) -> Operation | None:
        """The operation with which the site leaves the network; `None` where it stays."""
        return next((operation for operation in self.operations if operation.removes), None)

    @property
    def inputs(self) -> int | None:
        """Number of input channels that the layer reads; `None` for all of them."""
        return None if self.reads is None else len(self.reads)

    @property
    def only_integers(self) -> bool:
        """Whether the site is dense and in integers: rounded, and nothing else."""
        rounded = len(self.operations) == 1 and self.reads is None and not self.passes_int8_through
        return rounded and self.computes_integers

    def __str__(self) -> str:
        reads = [] if self.inputs is None else [f"reads {self.inputs} channels"]
        return "; ".join([*reads, *map(str, self.operations)]) or "dense"

    def content(self) -> list[dict[str, Any]]:
        """Return the operations as plain values for JSON."""
        reads = [] if self.reads is None else [{"reads": list(self.reads)}]
        neighbours = [{"hands_on": "integers"}] if self.passes_int8_through else []
        return [*reads, *(operation.to_dict() for operation in self.operations), *neighbours]


@dataclass(frozen=True)
class CandidateSet:
    """The candidates of one site, the dense one last.

    Attributes:
        spec: The site's layer; the first one of several.
        candidates: At least one; the last leaves the site as it is.
        importance: Weight of this site's squared errors relative to other sites; positive or 0.
        layers: Names of the site's layers; `None` for that of `spec` alone.
        producer: Name of the site in front whose outputs this one alone reads, if candidates read only some.
        must_change: Whether no plan may leave the site as it is.
    """

    spec: LayerSpec
    candidates: tuple[Candidate, ...]
    importance: float = 1.0
    layers: tuple[str, ...] | None = None
    producer: str | None = None
    must_change: bool = False

    def __post_init__(self) -> None:
        last = self.candidates[-1] if self.candidates else None
        if last is None or last.operations or last.reads is not None:
            raise DecompositionError(
                f"site {self.spec.name!r}: the last candidate must be the dense one, got "
                f"{[str(candidate) for candidate in self.candidates]}"
            )

    def __len__(self) -> int:
        return len(self.candidates)

    @property
    def name(self) -> str:
        """The site's name: that of its layer, the first one of several."""
        return self.spec.name

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Names of the site's layers."""
        return (self.spec.name,) if self.layers is None else self.layers

    @property
    def dense(self) -> int:
        """Index of the candidate that leaves the site as it is."""
        return len(self.candidates) - 1

    @property
    def params(self) -> np.ndarray:
        """Parameters of each candidate, bias included; shape (candidates,)."""
        return self.cost("params")

    @property
    def macs(self) -> np.ndarray:
        """Multiply-accumulates of each candidate; shape (candidates,)."""
        return self.cost("macs")

    @cached_property
    def errors(self) -> np.ndarray:
        """Relative output error of each candidate; shape (candidates,)."""
        return np.array([candidate.error for candidate in self.candidates])

    @cached_property
    def losses(self) -> np.ndarray:
        """Squared output error of each candidate, importance * error^2; shape (candidates,)."""
        return self.importance * self.errors**2

    @cached_property
    def timed(self) -> bool:
        """Whether every candidate's time was measured."""
        return all(candidate.cost.time is not None for candidate in self.candidates)

    def cost(self, measure: str) -> np.ndarray:
        """Return the candidates' cost in `params`, `macs`, `bytes` or `latency`; shape (candidates,).

        Raises:
            DecompositionError: If the measure is unknown, or a candidate's time was not measured.
        """
        if measure not in MEASURES:
            raise DecompositionError(f"unknown measure {measure!r}; choose from {', '.join(MEASURES)}")
        if measure == "latency" and not self.timed:
            raise DecompositionError(
                f"site {self.name!r}: the time of its candidates was not measured; attach a LatencyTable"
            )
        if measure not in self._costs:
            costs = [_in(candidate.cost, measure) for candidate in self.candidates]
            self._costs[measure] = np.array(costs, dtype=float if measure == "latency" else np.int64)
        return self._costs[measure]

    @cached_property
    def _costs(self) -> dict[str, np.ndarray]:
        return {}

    @cached_property
    def integer(self) -> np.ndarray:
        """Whether each candidate takes and gives integers, boolean; shape (candidates,)."""
        return np.array([candidate.integer for candidate in self.candidates])

    @cached_property
    def levels(self) -> np.ndarray:
        """Level of the input channels that each candidate reads, 0 for all; shape (candidates,)."""
        return np.array([candidate.level for candidate in self.candidates])

    @cached_property
    def removal(self) -> Operation | None:
        """The operation with which the site can leave the network; `None` if it cannot.

        Neighbours with the same operation leave it together.
        """
        return next((each.removed for each in self.candidates if each.removed is not None), None)

    @cached_property
    def leaving(self) -> np.ndarray:
        """Code of each candidate's removal, shape (candidates,).

        0 if the site stays, 1 if it leaves and passes floating point through, 2 if it passes integers.
        """
        removed = np.array([candidate.removed is not None for candidate in self.candidates])
        return removed * (1 + np.array([candidate.passes_int8_through for candidate in self.candidates]))

    @property
    def removed(self) -> np.ndarray:
        """Whether the site leaves the network, for each candidate, boolean; shape (candidates,)."""
        gone: np.ndarray = self.leaving > 0
        return gone

    @cached_property
    def narrows(self) -> bool:
        """Whether the next site may read only some of this one's outputs."""
        return any(candidate.narrower for candidate in self.candidates)

    def saved(self, measure: str) -> np.ndarray:
        """Return the cost that each candidate saves if the next site reads fewer channels.

        Returns:
            Shape (candidates, levels of the next site), 0 in the first column, where it reads all; minus
            infinity where a candidate does not go together with that.
        """
        if measure not in self._saved:
            costs = self.cost(measure)
            numbers = max(len(candidate.narrower) for candidate in self.candidates)
            saved = np.zeros((len(self), 1 + numbers))
            for row, candidate in enumerate(self.candidates):
                for column, narrower in enumerate(candidate.narrower, start=1):
                    lower = None if narrower is None else _in(narrower, measure)
                    saved[row, column] = -np.inf if lower is None else costs[row] - lower
            self._saved[measure] = saved
        return self._saved[measure]

    @cached_property
    def _saved(self) -> dict[str, np.ndarray]:
        return {}

    @property
    def mixed(self) -> bool:
        """Whether candidates come from several generators, or differ in precision."""
        kinds = {
            (candidate.generator, tuple(o.kind for o in candidate.operations))
            for candidate in self.candidates[:-1]
        }
        return len(kinds) > 1

    def efficient(self, *measures: str) -> CandidateSet:
        """Return the Pareto-optimal candidates in cost and error, in ascending order of cost.

        A set of one generator stays as it is: its candidates are a grid already. Only candidates that stand
        in the same relation to their neighbours are compared: they read equally many channels, the site
        leaves the network with both or with neither, and where time counts both compute in integers or in
        floating point.

        Args:
            measures: The costs that count, of `params`, `macs`, `bytes` and `latency`, the first one for the
                order.
        """
        if not self.mixed:
            return self
        costs, errors = np.stack([self.cost(measure) for measure in measures], axis=1), self.errors
        classes = 2 * self.levels + (self.integer if "latency" in measures else 0)
        classes = np.where(self.removed, -self.leaving, classes)
        kept: list[int] = []
        for index in map(int, np.lexsort((self.macs, self.params, errors, *costs.T[::-1]))):
            dear = classes[index] == 0 and bool((costs[index] >= costs[self.dense]).all())
            dear &= not self.must_change
            rivals = [rival for rival in kept if classes[rival] == classes[index]]
            beaten = errors[rivals] <= errors[index]
            beaten &= (costs[rivals] <= costs[index]).all(1)
            if index != self.dense and not dear and not beaten.any():
                kept.append(index)
        return self.subset([*kept, self.dense])

    def subset(self, indices: Iterable[int]) -> CandidateSet:
        """Return the set of these candidates in this order; the last must be the dense one."""
        return replace(self, candidates=tuple(self.candidates[index] for index in indices))


def leaves_one_dense(sites: Sequence[CandidateSet], choices: Iterable[int]) -> bool:
    """Tell whether choices leave a site as it is that must change."""
    return any(site.must_change and int(j) == site.dense for site, j in zip(sites, choices, strict=True))


def in_one_block(here: CandidateSet, behind: CandidateSet) -> bool:
    """Tell whether neighbouring sites only leave the network together (with equal `CandidateSet.leaving`)."""
    return here.removal is not None and here.removal == behind.removal


def saved(sites: Sequence[CandidateSet], choices: Iterable[int], measure: str) -> float:
    """Return the cost that sites save because their successors do not read all of their outputs."""
    return sum(
        float(site.saved(measure)[int(choice), behind.levels[int(next_choice)]])
        for (site, choice), (behind, next_choice) in pairwise(zip(sites, choices, strict=True))
        if behind.producer == site.name and behind.levels[int(next_choice)]
    )


def _in(cost: Cost, measure: str) -> float | None:
    """Return one measure of a cost; None if it was not measured."""
    value: float | None = cost.time if measure == "latency" else getattr(cost, measure)
    return value


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
        layers, fingerprint(all_specs), input_shape_of(input_shape), chosen_by, preparation=tuple(preparation)
    )
