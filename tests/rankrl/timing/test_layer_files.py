"""Files of layers side by side: written directly they are what torch's exporter writes."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from decomposition import Factorise, LayerOperation
from decomposition.network.layers import inspect_layers, is_decomposable_module
from decomposition.network.surgery import copied
from rankrl.onnx.export.onnx_file import export_onnx
from rankrl.onnx.protobuf import load_model
from rankrl.onnx.runtimes import open_session
from rankrl.timing import layer_latency as layer_files
from rankrl.timing.layer_latency import SideBySide

LAYERS = {
    "conv2d": (nn.Conv2d(16, 12, 3, 2, 1), (2, 16, 9, 9), ((4, 4), (4,), (4,))),
    "dilated": (nn.Conv2d(16, 12, 3, padding=(2, 1), dilation=(2, 1)), (1, 16, 9, 8), ((4, 3), (4,), (4,))),
    "conv1d": (nn.Conv1d(8, 12, 5, padding=2, bias=False), (3, 8, 11), ((4, 4), (4,), (4,))),
    "linear": (nn.Linear(16, 12), (5, 16), ((4, 4), (4,), (4,))),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_written_directly_are_those_of_torchs_exporter(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense, shape, ranks = LAYERS[name]
    spec = inspect_layers(nn.Sequential(dense), shape[1:])[0]
    operations: list[LayerOperation] = [
        Factorise(kind, each) for kind, each in zip(("tucker", "cp", "spatial_svd"), ranks, strict=True)
    ]
    layers = [dense, *(operation.structure(copied(dense), spec) for operation in operations)]
    networks = SideBySide([nn.Sequential(layer, *_behind(layer, shape)) for layer in layers]).eval()
    exported = tmp_path / "exported.onnx"
    export_onnx(networks, exported, shape[1:], sample=torch.zeros(shape), dynamic_batch=False, progress=False)
    monkeypatch.setattr(layer_files, "export_onnx", None)
    direct = tmp_path / "direct.onnx"
    networks.save(direct, shape)
    graph, expected = (load_model(path).graph for path in (direct, exported))
    assert [node.op_type for node in graph] == [node.op_type for node in expected]
    assert [value.shape for value in graph.outputs] == [value.shape for value in expected.outputs]
    named = networks.named_modules()
    assert {f"{name}.weight" for name, layer in named if is_decomposable_module(layer)} <= set(
        graph.initializers
    )
    x = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    for mine, theirs in zip(*(open_session(path).run(x) for path in (direct, exported)), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_what_does_not_stand_in_a_row_is_exported(tmp_path: Path) -> None:
    dense, shape = nn.Conv2d(8, 8, 3, padding=1), (1, 8, 6, 6)
    spec = inspect_layers(nn.Sequential(dense), shape[1:])[0]
    ring = Factorise("tensor_ring", (2, 2, 2)).structure(copied(dense), spec)
    networks = SideBySide([nn.Sequential(dense), nn.Sequential(ring)]).eval()
    networks.save(tmp_path / "layers.onnx", shape)
    x = torch.randn(shape)
    outputs = open_session(tmp_path / "layers.onnx").run(x.numpy())
    for mine, theirs in zip(outputs, networks(x), strict=True):
        np.testing.assert_allclose(mine, theirs.detach().numpy(), atol=1e-5)


def _behind(layer: nn.Module, shape: tuple[int, ...]) -> list[nn.Module]:
    """Return a neighbour of the layer's output, which the files to be timed have, too."""
    out = layer(torch.zeros(shape)).shape[1]
    return [] if len(shape) == 2 else [{3: nn.Conv1d, 4: nn.Conv2d}[len(shape)](out, out, 1)]
