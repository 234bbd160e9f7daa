"""Every registered format in an ONNX file: as nodes, or refused by its name."""

from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import nn

import rankrl
from decomposition.formats import get_format, list_formats
from decomposition.network.layers import inspect_layers
from decomposition.testing import random_cores
from rankrl.testing import FormatContract

KRONECKER = get_format("kronecker")


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.slow] * (each != "kronecker")) for each in list_formats()]
)
def test_a_file_takes_it_or_refuses_it(name: str, tmp_path: Path) -> None:
    FormatContract().test_a_file_is_compressed_or_the_format_is_refused_by_name(get_format(name), tmp_path)


@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        ((nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 12)), (5, 16)),
        ((nn.Conv1d(8, 16, 5, padding="same"), nn.ReLU(), nn.Conv1d(16, 8, 3, 2)), (8, 11)),
        (
            (nn.Conv2d(8, 16, (3, 2), (2, 1), (1, 0)), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 1)),
            (8, 7, 6),
        ),
    ],
    ids=["tokens", "conv1d", "conv2d"],
)
@pytest.mark.parametrize("precision", ["float32", pytest.param("int8", marks=pytest.mark.slow)])
def test_stages_joined_by_reshapes_compute_what_the_network_does(
    layers: tuple[nn.Module, ...], shape: tuple[int, ...], precision: str, tmp_path: Path
) -> None:
    """Weights that are sums of two Kronecker products lose nothing, so the file computes as before."""
    torch.manual_seed(0)
    network, x = nn.Sequential(*layers).eval(), torch.randn(64, *shape)
    for spec in inspect_layers(network, shape):
        modes, weight = KRONECKER.modes(spec), network.get_submodule(spec.name).weight
        cores = random_cores(KRONECKER, modes, KRONECKER.expand(modes, 2))
        with torch.no_grad():
            weight.copy_(KRONECKER.reconstruct(cores, modes).reshape(weight.shape) / modes.columns**0.5)
    rankrl.export_onnx(network, tmp_path / "net.onnx", shape)
    effort: dict[str, Any] = {"candidates": 8, "iterations": 20, "final_iterations": 50}
    chosen = rankrl.DecompositionOptions(format="kronecker", precisions=(precision,), **effort)
    kept: dict[str, Any] = {"params": 0.8} if precision == "float32" else {"bytes": 0.25}
    result = rankrl.compress(
        tmp_path / "net.onnx", x.numpy(), tmp_path / "small.onnx", decomposition=chosen, **kept
    )
    assert any("kronecker" in str(each) for layer in result.plan for each in layer.operations)
    sessions = [onnxruntime.InferenceSession(tmp_path / f"{each}.onnx") for each in ("net", "small")]
    for batch in (x, x[:3]):
        before, after = (each.run(None, {each.get_inputs()[0].name: batch.numpy()})[0] for each in sessions)
        assert after.shape == before.shape
        assert abs(after - before).mean() < (1e-4 if precision == "float32" else 0.1) * abs(before).mean()
