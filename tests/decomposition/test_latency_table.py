"""Latency tables: complete, positive, and no candidate that is slower than its dense layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from torch import nn

from decomposition import (
    DecompositionError,
    FitLibrary,
    FitOptions,
    LatencyTable,
    RankCurve,
    compressible_layers,
    plan_by_heuristic,
)

SHAPE = (3, 10, 10)


def by_params(curves: Sequence[RankCurve]) -> LatencyTable:
    """A runtime whose time is the number of parameters, but for the first layer, which gains nothing."""
    layers = {
        curve.spec.name: {
            entry.ranks: float(params) for entry, params in zip(curve.entries, curve.params, strict=True)
        }
        for curve in curves
    }
    first = layers[curves[0].spec.name]
    first.update({ranks: 2 * first[()] for ranks in first if ranks})
    return LatencyTable(layers, rest=10.0, conditions="a test")


@pytest.fixture
def curves(small_net: nn.Module) -> list[RankCurve]:
    specs = compressible_layers(small_net, SHAPE)
    return FitLibrary(small_net, specs, "tucker", options=FitOptions(iterations=3)).curves(limit=4)


def test_slower_candidates_are_left_out_with_the_reason(curves: list[RankCurve]) -> None:
    attached = by_params(curves).attach(curves)
    assert [len(curve) for curve in attached] == [1, *map(len, curves[1:])]
    assert attached[0].entries[0].reason == "no candidate is faster than the dense layer"
    for curve in attached:
        assert all(curve.cost("latency")[:-1] < curve.cost("latency")[-1])


@pytest.mark.parametrize("heuristic", ["uniform", "energy", "vbmf", "greedy"])
@pytest.mark.parametrize("fraction", [0.5, 0.8])
def test_heuristics_keep_a_latency_budget(small_net: nn.Module, heuristic: str, fraction: float) -> None:
    tables = []

    def measure(curves: Sequence[RankCurve]) -> LatencyTable:
        tables.append(by_params(curves))
        return tables[-1]

    plan = plan_by_heuristic(
        small_net, SHAPE, "tucker", heuristic, fraction, measure="latency", latency=measure
    )
    (table,) = tables
    spent = table.rest + sum(table.layers[layer.name][layer.ranks] for layer in plan)
    assert spent <= fraction * table.total
    assert plan.layers[0].format is None


def test_a_table_survives_its_file(curves: list[RankCurve], tmp_path: Path) -> None:
    table = by_params(curves)
    table.save(tmp_path / "latency.json")
    assert LatencyTable.load(tmp_path / "latency.json") == table


@pytest.mark.parametrize("text", ["{}", "[1]", "no json", '{"version": 7}', '{"version": 1, "layers": 3}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "latency.json"
    path.write_text(text)
    with pytest.raises(DecompositionError, match="measure anew"):
        LatencyTable.load(path)


def test_incomplete_tables_are_refused(curves: list[RankCurve], small_net: nn.Module) -> None:
    with pytest.raises(DecompositionError, match="layer '0': the latency table lacks ranks"):
        LatencyTable({}).attach(curves)
    with pytest.raises(DecompositionError, match="lacks the dense layer"):
        LatencyTable({"0": {(2, 2): 1.0}})
    with pytest.raises(DecompositionError, match="must be positive"):
        LatencyTable({"0": {(): 0.0}})
    with pytest.raises(DecompositionError, match="needs latency="):
        plan_by_heuristic(small_net, SHAPE, "tucker", "greedy", 0.5, measure="latency")
