"""Integers of a network's files: chosen once, the same in whatever order plans are carried out."""

from collections.abc import Collection
from pathlib import Path

import numpy as np
import pytest
from small_graphs import convolutions, images, network_of

from decomposition import CompressionPlan, Factorise, Quantise
from decomposition.plan.plan import LayerPlan, fingerprint
from rankrl.networks.graph import GraphNetwork
from rankrl.onnx.export import static_quantiser
from rankrl.onnx.graph.prepared_file import PreparedFile
from rankrl.onnx.protobuf import to_proto
from rankrl.options.decomposition import DecompositionOptions
from rankrl.options.timing import LatencyOptions


def opened(folder: Path) -> GraphNetwork:
    network_of(convolutions(), folder)
    file = PreparedFile.read(folder / "net.onnx", images(60))
    return GraphNetwork(file, file.feed(1), LatencyOptions(), DecompositionOptions())


def plan_with(
    network: GraphNetwork, floats: Collection[int] = (), factorised: Collection[int] = ()
) -> CompressionPlan:
    """All nodes in integers but some, and some of them of rank 2."""
    layers = []
    for number, site in enumerate(network.file.sites):
        operations = [Factorise("tucker", (2, 2))] if number in factorised else []
        operations += [] if number in floats else [Quantise(8)]
        layers.append(LayerPlan(site.name, tuple(operations), reason="-"))
    key = fingerprint([site.spec for site in network.file.sites])
    return CompressionPlan(tuple(layers), key, network.file.shape, "test")


def content(network: GraphNetwork, plan: CompressionPlan) -> bytes:
    written = network.written(plan, network.file.split.calibration, {})
    model: bytes = to_proto(written.network.model).SerializeToString()
    return model


def test_files_do_not_depend_on_which_plan_is_written_first(tmp_path: Path) -> None:
    network = opened(tmp_path)
    plans = [plan_with(network), plan_with(network, floats=[1]), plan_with(network, factorised=[1])]
    files = [content(network, plan) for plan in plans]
    assert len(set(files)) == len(plans)
    other = opened(tmp_path)
    assert [content(other, plan) for plan in plans[::-1]] == files[::-1]


def test_networks_with_the_same_weights_are_run_on_calibration_inputs_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, passes = opened(tmp_path), []
    collect = static_quantiser.collect_spreads

    def counted(model, names, inputs, **options):  # type: ignore[no-untyped-def]
        passes.append(options)
        return collect(model, names, inputs, **options)

    content(network, plan_with(network, floats=[0]))
    monkeypatch.setattr(static_quantiser, "collect_spreads", counted)
    for floats in ([], [1], [2], [0, 1]):
        content(network, plan_with(network, floats=floats))
    assert not passes
    content(network, plan_with(network, factorised=[1]))
    assert len(passes) == 1


def test_fewer_nodes_in_integers_than_ranges_were_chosen_with_change_outputs_little(tmp_path: Path) -> None:
    network = opened(tmp_path)
    plan, feed = plan_with(network, floats=[0]), network.file.split.heldout[0]
    (exact,) = network.file.network.session().run(feed)
    (found,) = network.written(plan, network.file.split.calibration, {}).network.session().run(feed)
    assert np.linalg.norm(found - exact) < 0.05 * np.linalg.norm(exact)
