"""Nodes that share a weight are one site: fitted to what reaches all of them, rewritten together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from call_options import layer_options
from small_graphs import FRAMES, network_of, shared
from torch import nn

import rankrl
from decomposition import collect_moments, inspect_layers
from decomposition.calibration.metric import whole
from rankrl.onnx.graph import find_sites
from rankrl.onnx.graph.capture import collect_moments as moments_of_nodes


class Shared(nn.Module):
    """The same in PyTorch."""

    def __init__(self, model: onnx.ModelProto) -> None:
        super().__init__()
        values = {
            each.name: torch.tensor(onnx.numpy_helper.to_array(each)) for each in model.graph.initializer
        }
        self.conv = nn.Conv2d(8, 16, 3, padding=1, bias="bias" in values)
        self.last = nn.Conv2d(16, 12, 1, bias=False)
        with torch.no_grad():
            self.conv.weight.copy_(values["weight"])
            self.last.weight.copy_(values["last"])
            if self.conv.bias is not None:
                self.conv.bias.copy_(values["bias"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.conv(x), self.conv(torch.tanh(x))
        y: torch.Tensor = self.last(a.mean((2, 3), keepdim=True) * b.mean((2, 3), keepdim=True))
        return y


def test_moments_are_those_of_a_layer_that_is_called_several_times(tmp_path: Path) -> None:
    model = shared(bias=True)
    network = network_of(model, tmp_path)
    sites = find_sites(network, {"frames": FRAMES})
    usable = [site for site in sites if site.spec.refusal is None]
    found = moments_of_nodes(network, usable, [{"frames": FRAMES}])["one"]
    module = Shared(model).eval()
    spec = next(s for s in inspect_layers(module, (8, 9, 9)) if s.name == "conv")
    assert (usable[0].spec.macs, usable[0].spec.params) == (spec.macs, spec.params)
    assert usable[0].spec.input_sizes == spec.input_sizes
    expected = collect_moments(module, [spec], torch.from_numpy(FRAMES))["conv"]
    assert found.count == expected.count
    np.testing.assert_allclose(found.mean, expected.mean, atol=1e-5)
    np.testing.assert_allclose(whole(found.covariance), whole(expected.covariance), atol=1e-4)


@pytest.mark.parametrize(
    ("precisions", "bias", "strides"),
    [
        (("float32",), True, (1, 1)),
        (("float32",), False, (1, 1)),
        (("float32",), True, (1, 2)),
        (("int8",), True, (1, 2)),
        (("int8_weights",), False, (1, 1)),
        pytest.param(("int8",), True, (1, 1), marks=pytest.mark.slow),
        pytest.param(("int8",), False, (1, 1), marks=pytest.mark.slow),
        pytest.param(("int8_weights",), True, (1, 1), marks=pytest.mark.slow),
        pytest.param(("int8_weights",), True, (1, 2), marks=pytest.mark.slow),
    ],
)
def test_nodes_are_rewritten_together(
    tmp_path: Path, bias: bool, strides: tuple[int, int], precisions: tuple[str, ...]
) -> None:
    model = shared(bias=bias, strides=strides)
    onnx.save(model, tmp_path / "net.onnx")
    result = rankrl.compress(
        tmp_path / "net.onnx",
        {"frames": FRAMES},
        tmp_path / "small.onnx",
        bytes=0.6,
        timing=rankrl.LatencyOptions(batch=4, runs=2),
        decomposition=layer_options(iterations=5, final_iterations=10, precisions=("float32", *precisions)),
    )
    assert result.plan["one"].operations
    assert "shares its weight" in result.untouched["two"]
    assert result.after["bytes"] <= 0.6 * result.before["bytes"]
    (output,) = result.outputs
    assert output.error < 0.25
    small = onnx.load(tmp_path / "small.onnx")
    products = [node for node in small.graph.node if node.op_type == "Conv"]
    mine = [[node for node in products if node.name.startswith(name)] for name in ("one", "two")]
    assert [len(each) for each in mine] == [len(mine[0])] * 2
    assert "weight" not in {tensor.name for tensor in small.graph.initializer}
    if precisions == ("float32",):
        for node, twin in zip(*mine, strict=True):
            assert node.input[1:] == twin.input[1:]  # the weights are stored once
        stored = sum(int(np.prod(tensor.dims)) for tensor in small.graph.initializer)
        assert stored == result.after["params"]
    onnxruntime.InferenceSession(tmp_path / "small.onnx").run(None, {"frames": FRAMES[:3]})


def test_nodes_that_use_a_weight_in_different_ways_stay(tmp_path: Path) -> None:
    network = network_of(shared(bias=True, other_bias=True), tmp_path)
    sites = {site.name: site for site in find_sites(network, {"frames": FRAMES})}
    for name in ("one", "two"):
        assert "in another way" in (sites[name].spec.refusal or "")
    assert sites["last_conv"].spec.refusal is None
