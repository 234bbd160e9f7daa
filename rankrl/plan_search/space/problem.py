"""Describe a search problem: a network's layers, their candidates, costs and the budget."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, cast

import numpy as np
from torch import nn

from decomposition.cache import digest
from decomposition.choose.allocation import allocate, check_reachable
from decomposition.choose.budget import Budget, LatencyTable
from decomposition.choose.candidates import CandidateSet, plan_from_choices, saved
from decomposition.choose.library import FitLibrary
from decomposition.network.cost import count_macs, count_parameters
from decomposition.network.inputs import ExampleInputs, InputShape, input_shape_of, shape_to_json
from decomposition.network.layers import FLOAT_BYTES, LayerSpec, inspect_layers
from decomposition.operations import Cost
from decomposition.plan.plan import CompressionPlan, fingerprint
from decomposition.rewrites import Rewrite, rewrites_of
from rankrl.errors import ConfigError
from rankrl.operations import KeepChannels
from rankrl.option_types import shown
from rankrl.options.search import check_number_of_budgets


@dataclass(frozen=True)
class SearchSetting:
    """The properties of a search, known from its options alone, that a selector's options may contradict."""

    measures: tuple[str, ...]
    narrows: bool = False
    borders: bool = False
    in_workers: bool = False


Measure = Literal["params", "macs", "bytes", "latency"]
Choices = tuple[int, ...]
"""Index of a candidate for every site, in the order of the problem's sites."""

# Without a budget, a search starts from greedy's plan at this fraction of the parameters.
_PRESET_FRACTION = 0.5


@dataclass(frozen=True)
class SearchProblem:
    """The network as a selector sees it: layers, candidates, costs and budgets.

    A selector refers to a site's candidates by their index; their operations matter only to the final plan.

    Attributes:
        specs: Every layer of the network in forward order, compressible or not (`inspect_layers`).
        sites: The candidates of each compressible layer, with what they cost and lose, in forward order.
        input_shape: Shape of one network input without the batch axis, or what else is known of the inputs.
        params: Parameters of the dense network.
        macs: Multiply-accumulates of the dense network for one input.
        budget: The limit of every plan, or None when the reward alone weighs size.
        library: The fits behind the candidates, for selectors that look into them; None when there are none.
        divergences: Measures the divergence of every site's candidates on so many batches of held-out images
            (`MeasuresDivergences.divergences`); None where that cannot be done.
        preparation: Rewrites of the network before the search, recorded in its plans.
    """

    specs: tuple[LayerSpec, ...]
    sites: tuple[CandidateSet, ...]
    input_shape: InputShape
    params: int
    macs: int
    budget: Budget | None = None
    library: FitLibrary | None = field(default=None, compare=False, repr=False)
    divergences: Callable[[int], Sequence[np.ndarray] | None] | None = field(
        default=None, compare=False, repr=False
    )
    preparation: tuple[Rewrite, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if not self.sites:
            raise ConfigError(
                "there is nothing to search: the network has no layer that can be decomposed; "
                "`rankrl task=inspect` lists its layers and why"
            )
        if self.budget is not None:
            check_reachable(self.sites, self.budget)

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        sites: Sequence[CandidateSet],
        input_shape: ExampleInputs,
        *,
        params: float | None = None,
        macs: float | None = None,
        bytes: float | None = None,
        latency: float | None = None,
        latencies: LatencyTable | None = None,
        library: FitLibrary | None = None,
    ) -> SearchProblem:
        parameters = count_parameters(model)
        totals = {
            "params": parameters,
            "macs": count_macs(model, input_shape),
            "bytes": FLOAT_BYTES * parameters,
        }
        return cls.from_costs(
            inspect_layers(model, input_shape),
            sites,
            input_shape,
            totals,
            {"params": params, "macs": macs, "bytes": bytes, "latency": latency},
            latencies=latencies,
            library=library,
            preparation=rewrites_of(model),
        )

    @classmethod
    def from_costs(
        cls,
        specs: Sequence[LayerSpec],
        sites: Sequence[CandidateSet],
        input_shape: ExampleInputs,
        totals: Mapping[str, int],
        fractions: Mapping[str, float | None],
        *,
        latencies: LatencyTable | None = None,
        library: FitLibrary | None = None,
        preparation: tuple[Rewrite, ...] = (),
    ) -> SearchProblem:
        check_number_of_budgets(fractions)
        latency = fractions.get("latency")
        if latency is not None and latencies is None:
            raise ConfigError(
                f"budget.latency={latency} needs measured latencies; pass latencies= "
                "(NetworkTimer.layers in rankrl.timing)"
            )
        if latency is not None and latencies is not None:
            sites = latencies.attach(sites)
        budget: Budget | None = None
        for measure, fraction in fractions.items():  # latency comes last, to be put first of two budgets
            if fraction is None:
                continue
            if measure == "latency" and latencies is not None:
                limit = latencies.budget(fraction, sites)
            else:
                limit = Budget.of_total(totals[measure], sites, measure, fraction)
            budget = replace(limit, also=budget)
        measures = ("params",) if budget is None else budget.measures
        return cls(
            tuple(specs),
            tuple(site.efficient(*measures) for site in sites),
            input_shape_of(input_shape),
            totals["params"],
            totals["macs"],
            budget,
            library,
            preparation=preparation,
        )

    @property
    def setting(self) -> SearchSetting:
        """The properties of the problem that a selector's options may contradict."""
        return SearchSetting(
            () if self.budget is None else self.budget.measures,
            any(site.narrows or site.removal is not None for site in self.sites),
            self.budget is not None and any(limit.borders for limit in self.budget.limits),
        )

    @property
    def measure(self) -> Measure:
        """The measure of the budget, the first of two; `params` without one."""
        return "params" if self.budget is None else cast(Measure, self.budget.measure)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(site.name for site in self.sites)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that a selector's choices depend on, 16 hexadecimal digits.

        It covers layers, candidates, errors (which stand for weights and calibration data) and the budget.
        """
        limits = () if self.budget is None else self.budget.limits
        budget = [value for limit in limits for value in (limit.fraction, limit.measure)]
        sites = [
            (
                site.layer_names,
                [candidate.content() for candidate in site.candidates],
                [site.params, site.macs],
                [f"{loss:.5e}" for loss in site.losses],  # another processor rounds the last digits otherwise
                site.cost("latency") if site.timed else None,
                [site.saved(measure) for measure in ("params", self.measure) if site.narrows],
                *([site.must_change] if site.must_change else []),
            )
            for site in self.sites
        ]
        borders = () if self.budget is None else self.budget.borders
        return digest(fingerprint(self.specs), shape_to_json(self.input_shape), budget, sites, borders)[:16]

    @cached_property
    def preset(self) -> np.ndarray:
        """Greedy's choices, shape (sites,), from which a search starts.

        The Lagrangian allocation over the data-aware errors for the budget, or for half of the parameters
        when there is no budget.
        """
        if self.budget is not None:
            return allocate(self.sites, self.budget)
        fixed = self.params - sum(int(site.params[site.dense]) for site in self.sites)
        least = fixed + sum(int(site.params.min()) for site in self.sites)
        # 1e-9 more than the least fraction: rounding must not make it unreachable.
        fraction = min(1.0, max(_PRESET_FRACTION, least / self.params + 1e-9))
        return allocate(self.sites, Budget(fraction, "params", self.params, fixed))

    def plan(self, choices: Iterable[int], chosen_by: str) -> CompressionPlan:
        """Return the plan with candidate `choices[j]` of `sites[j]`."""
        return plan_from_choices(
            self.sites,
            choices,
            self.specs,
            self.input_shape,
            chosen_by,
            keep=KeepChannels,
            preparation=self.preparation,
        )

    def cost(self, choices: Sequence[int]) -> Cost:
        """Return the whole network's cost; its time is the sum over layers, if all candidates were timed."""
        params, macs = self.params, self.macs
        size, time = FLOAT_BYTES * self.params, None
        if self.measure == "latency" and self.budget is not None:
            time = self.budget.spent(self.sites, choices)
        for site, choice in zip(self.sites, choices, strict=True):
            now, before = site.candidates[choice].cost, site.candidates[site.dense].cost
            params += now.params - before.params
            macs += now.macs - before.macs
            size += now.bytes - before.bytes
        params, macs, size = (
            total - round(saved(self.sites, choices, measure))
            for total, measure in ((params, "params"), (macs, "macs"), (size, "bytes"))
        )
        return Cost(params, macs, size, time)

    def checked(self, choices: Iterable[int]) -> Choices:
        """Return choices as a tuple; refuse what is no plan of this problem."""
        counts = [len(site.candidates) for site in self.sites]
        with suppress(TypeError):  # no whole numbers
            key = tuple(operator.index(choice) for choice in choices)
            if len(key) == len(counts) and all(0 <= j < n for j, n in zip(key, counts, strict=True)):
                return key
        raise ConfigError(
            f"a plan has {len(counts)} choices, one a layer, below {counts}, the layers' numbers of "
            f"candidates; got {shown(choices)}; greedy's is {tuple(self.preset.tolist())}"
        )

    def keeps_budget(self, choices: Sequence[int]) -> bool:
        """Whether the choices keep the budget; always true without one."""
        return self.budget is None or self.budget.kept(self.sites, choices)
