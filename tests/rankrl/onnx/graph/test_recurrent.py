"""Recurrent layers in files are listed and counted as they are in modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from small_graphs import model_of
from torch import nn

from decomposition import inspect_layers
from rankrl.onnx.graph import OnnxNetwork, find_sites
from rankrl.onnx.graph.batch_axes import BatchAxes
from rankrl.onnx.graph.costs import network_costs

STEPS, INPUTS, HIDDEN = 7, 6, 5
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def recurrent(kind: str, directions: int, output: int) -> onnx.ModelProto:
    """A recurrent layer of which one output is read: 0 for all steps, 1 for the last."""
    rows, generator = GATES[kind] * HIDDEN, np.random.default_rng(0)
    constants = {
        name: generator.standard_normal((directions, rows, columns)).astype(np.float32)
        for name, columns in (("w", INPUTS), ("r", HIDDEN))
    }
    direction = {"direction": "bidirectional"} if directions == 2 else {}
    outputs = ["", ""]
    outputs[output] = "y"
    node = helper.make_node(
        kind, ["x", "w", "r"], outputs[: output + 1], "layer", hidden_size=HIDDEN, **direction
    )
    shape = [STEPS, directions, "n", HIDDEN] if output == 0 else [directions, "n", HIDDEN]
    return model_of([node], constants, {"x": [STEPS, "n", INPUTS]}, {"y": shape})


@pytest.mark.parametrize("output", [0, 1])
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("kind", GATES)
def test_costs_are_those_of_the_module(kind: str, directions: int, output: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"bidirectional": directions == 2, "bias": False, "batch_first": True}
    module = nn.Sequential(getattr(nn, kind)(INPUTS, HIDDEN, **options))
    (expected,) = inspect_layers(module, (STEPS, INPUTS))
    onnx.save(recurrent(kind, directions, output), tmp_path / "net.onnx")
    network = OnnxNetwork.load(tmp_path / "net.onnx").with_axes(BatchAxes({"x": 1}))
    feed = {"x": torch.randn(STEPS, 1, INPUTS).numpy()}
    (site,) = find_sites(network, feed)
    assert site.spec.kind == expected.kind == kind.lower()
    assert (site.spec.params, site.spec.macs) == (expected.params, expected.macs)
    assert site.spec.refusal is not None
    assert "at every step of a sequence" in site.spec.refusal
    costs = network_costs(network, [site])
    assert (costs["params"], costs["macs"]) == (expected.params, expected.macs)
