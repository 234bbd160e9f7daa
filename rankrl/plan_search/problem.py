"""The search problem: which layers there are, what each candidate costs, and what may be kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, cast

import numpy as np
from torch import nn

from decomposition.allocation import Budget, allocate
from decomposition.cost import count_macs, count_parameters
from decomposition.curves import RankCurve, plan_from_choices
from decomposition.formats import Ranks
from decomposition.latency import LatencyTable
from decomposition.layers import LayerSpec, inspect_layers
from decomposition.library import FitLibrary
from decomposition.plan import CompressionPlan, LayerPlan, fingerprint
from rankrl.errors import ConfigError

Measure = Literal["params", "macs", "latency"]
RanksKey = tuple[Ranks, ...]
"""Ranks of every compressible layer in forward order, `()` where it stays dense."""

# Without a budget, greedy's plan at this fraction of the parameters is where a search starts.
_PRESET_FRACTION = 0.5


@dataclass(frozen=True)
class SearchProblem:
    """All that a chooser of ranks needs to know of a network; it never sees the network itself.

    Attributes:
        specs: Every layer of the network in forward order, compressible or not (`inspect_layers`).
        curves: Cost and error of every candidate of each compressible layer, in forward order.
        input_shape: Shape of one network input without the batch axis.
        params: Parameters of the dense network.
        macs: Multiply-accumulates of the dense network for one input.
        budget: What every plan must keep within, or None when the reward alone weighs size.
        library: The fits behind the curves, for choosers that look into them; None when there are none.
    """

    specs: tuple[LayerSpec, ...]
    curves: tuple[RankCurve, ...]
    input_shape: tuple[int, ...]
    params: int
    macs: int
    budget: Budget | None = None
    library: FitLibrary | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.curves:
            raise ConfigError(
                "there is nothing to search: the network has no layer that can be decomposed; "
                "`rankrl task=inspect` lists its layers and why"
            )
        if self.budget is not None:
            self.budget.check(self.curves)

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        curves: Sequence[RankCurve],
        input_shape: Sequence[int],
        *,
        params: float | None = None,
        macs: float | None = None,
        latency: float | None = None,
        latencies: LatencyTable | None = None,
        library: FitLibrary | None = None,
    ) -> SearchProblem:
        """Describe the search over a model.

        Args:
            model: The dense network.
            curves: The candidates of its compressible layers (`FitLibrary.curves`).
            input_shape: Shape of one input without the batch axis.
            params: Fraction of the parameters that may be kept, in (0, 1], or None.
            macs: Fraction of the multiply-accumulates that may be kept, in (0, 1], or None.
            latency: Fraction of the dense network's time that may be kept, in (0, 1], or None.
            latencies: The candidates' measured times, for a budget in time. Candidates that are slower than
                their dense layer are left out of the search.
            library: The fits that the curves come from; `energy` and `vbmf` look into it.

        Raises:
            ConfigError: Several budgets are given, a budget in time comes without measured times, or there is
                no layer to decompose.
            DecompositionError: The budget is outside (0, 1], or no plan can reach it.
        """
        given = {"params": params, "macs": macs, "latency": latency}
        asked = [f"budget.{name}={value}" for name, value in given.items() if value is not None]
        if len(asked) > 1:
            raise ConfigError(
                f"{' and '.join(asked)} are all set; a search keeps one budget: set the others to null"
            )
        if latency is not None and latencies is None:
            raise ConfigError(
                f"budget.latency={latency} needs measured latencies; pass latencies= "
                "(rankrl.export.measure_layer_latencies)"
            )
        total_params, total_macs = count_parameters(model), count_macs(model, input_shape)
        budget = None
        if params is not None:
            covered = sum(curve.spec.params for curve in curves)
            budget = Budget(params, "params", total_params, total_params - covered)
        elif macs is not None:
            covered = sum(curve.spec.macs for curve in curves)
            budget = Budget(macs, "macs", total_macs, total_macs - covered)
        elif latency is not None and latencies is not None:
            curves = latencies.attach(curves)
            budget = Budget(latency, "latency", latencies.total, latencies.rest)
        return cls(
            tuple(inspect_layers(model, input_shape)),
            tuple(curves),
            tuple(input_shape),
            total_params,
            total_macs,
            budget,
            library,
        )

    @property
    def measure(self) -> Measure:
        """What the budget counts; `params` when there is none."""
        return "params" if self.budget is None else cast(Measure, self.budget.measure)

    @cached_property
    def layer_names(self) -> tuple[str, ...]:
        """Names of the compressible layers in forward order."""
        return tuple(curve.spec.name for curve in self.curves)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that decides what a chooser would do, 16 hexadecimal digits.

        It covers layers, candidates, errors (which stand for weights and calibration data) and the budget.
        """
        digest = hashlib.sha256()
        budget = None if self.budget is None else [self.budget.fraction, self.budget.measure]
        digest.update(json.dumps([fingerprint(self.specs), list(self.input_shape), budget]).encode())
        for curve in self.curves:
            digest.update(json.dumps([[e.format, list(e.ranks)] for e in curve.entries]).encode())
            digest.update(curve.params.astype(np.int64).tobytes())
            digest.update(curve.macs.astype(np.int64).tobytes())
            digest.update(curve.losses.astype(np.float64).tobytes())
            if curve.latency is not None:
                digest.update(curve.latency.astype(np.float64).tobytes())
        return digest.hexdigest()[:16]

    @cached_property
    def preset(self) -> np.ndarray:
        """Greedy's choices, shape (layers,): where a search starts.

        The Lagrangian allocation over the data-aware errors for the budget, or for half of the parameters
        when there is no budget.
        """
        if self.budget is not None:
            return allocate(self.curves, self.budget)
        fixed = self.params - sum(curve.spec.params for curve in self.curves)
        least = fixed + sum(int(curve.params.min()) for curve in self.curves)
        fraction = min(1.0, max(_PRESET_FRACTION, least / self.params + 1e-9))
        return allocate(self.curves, Budget(fraction, "params", self.params, fixed))

    def plan(self, choices: Sequence[int] | np.ndarray, chosen_by: str) -> CompressionPlan:
        """Return the plan that takes candidate `choices[j]` of `curves[j]`."""
        return plan_from_choices(self.curves, choices, self.specs, self.input_shape, chosen_by)

    def plan_from_entries(self, entries: Sequence[LayerPlan], chosen_by: str) -> CompressionPlan:
        """Return the plan with one entry for each compressible layer; they need be no candidates."""
        dense = self._dense_plan
        by_name = {entry.name: entry for entry in entries}
        layers = tuple(by_name.get(layer.name, layer) for layer in dense.layers)
        return CompressionPlan(layers, dense.fingerprint, dense.input_shape, chosen_by)

    def plan_from_ranks(self, ranks: RanksKey, chosen_by: str) -> CompressionPlan:
        """Return the plan with the given ranks of each compressible layer, `()` where it stays dense."""
        entries = []
        for curve, each in zip(self.curves, ranks, strict=True):
            pattern = curve.entries[0]
            dense = curve.entries[-1]
            entries.append(
                LayerPlan(pattern.name, pattern.format, tuple(each), pattern.factors) if each else dense
            )
        return self.plan_from_entries(entries, chosen_by)

    def ranks(self, plan: CompressionPlan) -> RanksKey:
        """Return the ranks of each compressible layer: plans with equal ranks are equal networks."""
        by_name = {layer.name: layer.ranks for layer in plan.layers}
        return tuple(by_name[name] for name in self.layer_names)

    @cached_property
    def _dense_plan(self) -> CompressionPlan:
        return self.plan([len(curve) - 1 for curve in self.curves], "dense")

    def cost(self, plan: CompressionPlan) -> tuple[int, int]:
        """Return the parameters and multiply-accumulates of the whole network under a plan."""
        params, macs = self.params, self.macs
        entries = {layer.name: layer for layer in plan.layers}
        for curve in self.curves:
            entry = entries[curve.spec.name]
            params += entry.params(curve.spec) - curve.spec.params
            macs += entry.macs(curve.spec) - curve.spec.macs
        return params, macs

    def latency(self, plan: CompressionPlan) -> float:
        """Return the time of the whole network under a plan, as the measured layers add up.

        Raises:
            ConfigError: The budget is not one of time, or the plan holds ranks that were not measured.
        """
        if self.budget is None or self.measure != "latency":
            raise ConfigError("latencies are known only within a budget in time (budget.latency)")
        total, entries = self.budget.fixed, {layer.name: layer for layer in plan.layers}
        for curve in self.curves:
            ranks = entries[curve.spec.name].ranks
            times = [
                float(time)
                for entry, time in zip(curve.entries, curve.cost("latency"), strict=True)
                if entry.ranks == ranks
            ]
            if not times:
                raise ConfigError(
                    f"layer {curve.spec.name!r}: the latency at ranks {ranks} was not measured; within "
                    f"budget.latency choose from {[entry.ranks for entry in curve.entries]}"
                )
            total += times[0]
        return total

    def keeps_budget(self, plan: CompressionPlan) -> bool:
        """Tell whether a plan stays within the budget; always true without one."""
        if self.budget is None:
            return True
        if self.measure == "latency":
            return self.latency(plan) <= self.budget.fraction * self.budget.total
        params, macs = self.cost(plan)
        return (params if self.measure == "params" else macs) <= self.budget.fraction * self.budget.total
