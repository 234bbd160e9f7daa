"""Transposed convolutions of ONNX files: fitted as what they multiply, written as two nodes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from call_options import grouped
from small_graphs import MAPS, OPSETS, Array, network_of, upsampling

import rankrl
from decomposition import Factorise, LayerPlan, PlanError, Quantise
from rankrl.onnx.graph import calibration, find_sites
from rankrl.onnx.graph.sites import Site
from rankrl.options.decomposition import FILE_FORMATS
from rankrl.options.timing import LatencyOptions
from rankrl.result import Compression

TIMING = LatencyOptions(batch=2, runs=2)


def sites(folder: Path) -> dict[str, Site]:
    return {site.name: site for site in find_sites(network_of(upsampling(), folder), {"x": MAPS})}


def compressed(folder: Path, opset: int = OPSETS[0], **options: object) -> Compression:
    onnx.save(upsampling(opset), folder / "net.onnx")
    quick = {"decomposition": FILE_FORMATS, "candidates": 6, "final_iterations": 10, "timing": TIMING}
    return rankrl.compress(
        folder / "net.onnx", MAPS, folder / "small.onnx", **grouped(**{**quick, **options})
    )


def outputs(path: Path) -> Array:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": MAPS[:5]})[0])


def test_it_adds_up_what_its_pointwise_convolution_gives(tmp_path: Path) -> None:
    site = sites(tmp_path)["up"]
    x = torch.from_numpy(MAPS[:2])
    sliding = {"stride": (2, 3), "padding": (1, 2), "dilation": (2, 1)}
    expected = F.conv_transpose2d(x, site.spread_weight(site.weight), **sliding)
    with torch.no_grad():
        products = site.module()(x).flatten(2)
    folded = F.fold(products, expected.shape[2:], site.spread, **sliding)
    torch.testing.assert_close(folded, expected, rtol=1e-4, atol=1e-5)


def test_it_costs_a_multiplication_for_each_weight_and_input_position(tmp_path: Path) -> None:
    found = sites(tmp_path)
    assert (found["up"].spec.params, found["up"].spec.macs) == (8 * 6 * 12, 8 * 6 * 12 * 5 * 9)
    assert (found["along"].spec.params, found["along"].channels) == (10 * 4 * 5, 4)


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("decomposition", [FILE_FORMATS, "cp", "spatial_svd"])
def test_what_is_of_low_rank_loses_next_to_nothing(
    decomposition: str | tuple[str, ...], opset: int, tmp_path: Path
) -> None:
    result = compressed(tmp_path, opset, params=0.52, decomposition=decomposition)
    assert result.after["params"] <= 0.52 * result.before["params"]
    factorised = {layer.name for layer in result.plan if layer.operation(Factorise)}
    assert {"up", "along"} <= factorised
    assert result.verified < 1e-4
    original = outputs(tmp_path / "net.onnx")
    assert np.abs(outputs(result.path) - original).max() < 0.05 * np.abs(original).max()
    nodes = [node for node in onnx.load(result.path).graph.node if node.op_type == "ConvTranspose"]
    last = next(node for node in nodes if node.name.startswith("up/"))
    assert len(last.input) == 3  # the bias stays where it was
    dense = next(node for node in upsampling().graph.node if node.name == "up")
    assert {each.name: each for each in last.attribute} == {each.name: each for each in dense.attribute}


def test_it_stays_in_floating_point(tmp_path: Path) -> None:
    result = compressed(tmp_path, bytes=0.5, precisions=("int8_weights",))
    rounded = {layer.name for layer in result.plan if layer.operation(Quantise)}
    assert not rounded & {"up", "along"}
    layers = tuple(
        replace(layer, operations=(Quantise(),)) if layer.name == "up" else LayerPlan(layer.name, ())
        for layer in result.plan
    )
    with pytest.raises(PlanError, match=r"rounds 'up', a transposed convolution"):
        rankrl.apply_plan(
            tmp_path / "net.onnx", replace(result.plan, layers=layers), MAPS, tmp_path / "again.onnx"
        )


def test_sensitivities_count_all_that_lands_on_a_position(tmp_path: Path) -> None:
    network = network_of(upsampling(), tmp_path)
    found = find_sites(network, {"x": MAPS})
    last = next(site for site in found if site.name == "along")
    matrix = calibration.collect_sensitivities(network, [last], [{"x": MAPS}])["along"]
    assert matrix.shape == (20, 20)
    (y,) = network.session().run({"x": MAPS})
    # The node is the last one, so that an output channel counts as often as it has positions.
    first = y[: calibration.ANSWERED]
    expected = torch.eye(20, dtype=torch.float64) * y.shape[2] / float(np.mean(np.square(first)))
    torch.testing.assert_close(matrix, expected, rtol=1e-3, atol=1e-3)
