"""What the compression of each layer loses and saves, so that a reader can tell which layers to leave out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rankrl.plan_search.space.problem import Choices, SearchProblem


@dataclass(frozen=True)
class LayerCost:
    """A compressed layer."""

    name: str
    loss: float
    saved_params: int
    saved_macs: int
    saved_time: float | None = None


def layer_costs(problem: SearchProblem, key: Choices) -> tuple[LayerCost, ...]:
    """Return what every compressed layer of a plan loses and saves, the largest loss first."""
    budget = problem.budget
    timed = [each for each in (budget, budget and budget.also) if each and each.measure == "latency"]
    layers = []
    for site, choice in zip(problem.sites, key, strict=True):
        if choice == site.dense:
            continue
        before, after = site.candidates[site.dense].cost, site.candidates[choice].cost
        time = None
        if timed and before.time is not None and after.time is not None:
            time = (before.time - after.time) / timed[0].total
        saved = (before.params - after.params, before.macs - after.macs)
        layers.append(LayerCost(site.name, float(site.losses[choice]), *saved, time))
    return tuple(sorted(layers, key=lambda layer: -layer.loss))


def as_numbers(layers: Sequence[LayerCost]) -> dict[str, Any]:
    """Return the section `layers` of metrics.json; nothing where no layer was compressed."""
    return {"layers": [asdict(layer) for layer in layers]} if layers else {}
