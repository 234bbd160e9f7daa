"""Latency tables: complete, positive, and no candidate that is slower than its dense layer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from torch import nn

from decomposition import (
    CandidateSet,
    DecompositionError,
    FitLibrary,
    FitOptions,
    LatencyTable,
    compressible_layers,
    plan_by_heuristic,
)

SHAPE = (3, 10, 10)
QUICK = FitOptions(iterations=3)


def by_params(sites: Sequence[CandidateSet]) -> LatencyTable:
    """A runtime whose time is the number of parameters, but for the first layer, which gains nothing."""
    times = {site.name: tuple(map(float, site.params)) for site in sites}
    *slower, dense = times[sites[0].name]
    times[sites[0].name] = (*(2 * dense for _ in slower), dense)
    return LatencyTable(times, rest=10.0, conditions="a test")


@pytest.fixture
def sites(small_net: nn.Module) -> list[CandidateSet]:
    specs = compressible_layers(small_net, SHAPE)
    return FitLibrary(small_net, specs, "tucker", options=QUICK).all_candidates(limit=4)


def test_slower_candidates_are_left_out_with_the_reason(sites: list[CandidateSet]) -> None:
    attached = by_params(sites).attach(sites)
    assert [len(site) for site in attached] == [1, *map(len, sites[1:])]
    assert attached[0].candidates[0].reason == "no candidate is faster than the dense layer"
    for site, before in zip(attached, sites, strict=True):
        assert site.timed
        assert not before.timed
        assert all(site.cost("latency")[:-1] < site.cost("latency")[-1])
        assert site.cost("latency").tolist() == site.params.tolist()
        kept = [each for each in before.candidates if each.operations] if len(site) > 1 else []
        assert [each.operations for each in site.candidates[:-1]] == [each.operations for each in kept]


@pytest.mark.parametrize("heuristic", ["uniform", "energy", "vbmf", "greedy"])
@pytest.mark.parametrize("fraction", [0.5, 0.8])
def test_heuristics_keep_a_latency_budget(small_net: nn.Module, heuristic: str, fraction: float) -> None:
    tables = []

    measured: list[CandidateSet] = []

    def measure(sites: Sequence[CandidateSet]) -> LatencyTable:
        measured.extend(sites)
        tables.append(by_params(sites))
        return tables[-1]

    plan = plan_by_heuristic(
        small_net,
        SHAPE,
        "tucker",
        heuristic,
        fraction,
        measure="latency",
        latency=measure,
        candidates=6,
        options=QUICK,
    )
    (table,) = tables
    spent = table.rest
    for layer, site in zip(plan, measured, strict=True):
        chosen = [each.operations for each in site.candidates].index(layer.operations)
        spent += table.sites[layer.name][chosen]
    assert spent <= fraction * table.total
    assert plan.layers[0].operations == ()


def test_a_table_survives_json(sites: list[CandidateSet]) -> None:
    table = by_params(sites)
    assert LatencyTable.from_dict(json.loads(json.dumps(table.to_dict()))) == table


@pytest.mark.parametrize(
    "values",
    [{}, [1], {"sites": 3}, {"sites": {"0": ["fast"]}}, {"conditions": "", "rest": 0.0, "layers": {}}],
    ids=["empty", "list", "no sites", "no number", "by ranks"],
)
def test_other_values_are_refused(values: Any) -> None:
    whole = {"rest": 0.0, "conditions": "", "borders": {}, "narrowed": {}}
    with pytest.raises(DecompositionError, match="measure anew"):
        LatencyTable.from_dict({**whole, **values} if values and isinstance(values, dict) else values)


def test_incomplete_tables_are_refused(sites: list[CandidateSet], small_net: nn.Module) -> None:
    with pytest.raises(DecompositionError, match=r"site '0' has \d candidates, .* holds 0 times for it"):
        LatencyTable({}).attach(sites)
    short = by_params(sites).sites | {"3": (1.0, 2.0)}
    with pytest.raises(DecompositionError, match=r"site '3' has \d candidates, .* holds 2 times for it"):
        LatencyTable(short).attach(sites)
    with pytest.raises(DecompositionError, match=r"site '0': .* lacks the dense layer"):
        LatencyTable({"0": ()})
    with pytest.raises(DecompositionError, match=r"site '0': the time of candidate 1 is 0.0.*be positive"):
        LatencyTable({"0": (1.0, 0.0)})
    with pytest.raises(DecompositionError, match="the rest is nan; it must be 0 or more"):
        LatencyTable({"0": (1.0,)}, rest=float("nan"))
    with pytest.raises(DecompositionError, match="needs latency="):
        plan_by_heuristic(small_net, SHAPE, "tucker", "greedy", 0.5, measure="latency")
