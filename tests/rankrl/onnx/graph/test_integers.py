"""Nodes that onnxruntime cannot compute in integers are found, and stay in floating point."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from call_options import layer_options
from small_graphs import Array, convolutions, images, network_of

import rankrl
from decomposition import Quantise
from rankrl.errors import ExportError
from rankrl.onnx.graph import OnnxNetwork, find_sites, prepared_file
from rankrl.onnx.graph.node_layers import Site


def refusing(quantise: Callable[..., Path], together: list[set[str]]) -> Callable[..., Path]:
    """A quantiser that fails where all weights of one of some sets are asked for."""

    def quantised(path: Path, target: Path, *rest: Any, weights: Collection[str], **options: Any) -> Path:
        if any(each <= set(weights) for each in together):
            raise ExportError("cannot be loaded")
        return quantise(path, target, *rest, weights=weights, **options)

    return quantised


def opened(folder: Path) -> tuple[OnnxNetwork, list[Site], dict[str, Array]]:
    network, feed = network_of(convolutions(), folder), {"x": images(8)}
    sites = [site for site in find_sites(network, feed) if site.spec.refusal is None]
    return network, sites, feed


def test_all_can_where_nothing_fails(tmp_path: Path) -> None:
    assert prepared_file.without_integers(*opened(tmp_path)) == []


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_finds_the_one_that_fails(
    failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    network, sites, feed = opened(tmp_path)
    monkeypatch.setattr(
        prepared_file, "quantise_onnx", refusing(prepared_file.quantise_onnx, [{sites[failing].weight_name}])
    )
    with caplog.at_level(logging.WARNING):
        assert prepared_file.without_integers(network, sites, feed) == [sites[failing].name]
    assert f"cannot compute {sites[failing].name} in integers" in caplog.text


def test_leaves_out_one_of_two_that_fail_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network, sites, feed = opened(tmp_path)
    pair = {sites[0].weight_name, sites[2].weight_name}
    monkeypatch.setattr(prepared_file, "quantise_onnx", refusing(prepared_file.quantise_onnx, [pair]))
    (left,) = prepared_file.without_integers(network, sites, feed)
    assert left in (sites[0].name, sites[2].name)


def test_a_search_over_precisions_leaves_it_in_floating_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, sites, _ = opened(tmp_path)
    first = sites[0]
    monkeypatch.setattr(
        prepared_file, "quantise_onnx", refusing(prepared_file.quantise_onnx, [{first.weight_name}])
    )
    found = rankrl.compress(
        tmp_path / "net.onnx",
        images(60),
        tmp_path / "small.onnx",
        bytes=0.3,
        decomposition=layer_options(
            precisions=["float32", "int8"], candidates=4, iterations=5, final_iterations=10
        ),
    )
    roundings = {layer.name: layer.operation(Quantise) for layer in found.plan}
    integer = {name: rounding is not None and rounding.integer for name, rounding in roundings.items()}
    assert not integer[first.name]
    assert any(integer.values())
    assert np.isfinite(found.score)
