"""Values that outputs and bodies of control flow read stay what they are when a file is compressed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from call_options import layer_options
from chained_graphs import YES, Chain, X, assert_alike

import rankrl


@pytest.mark.parametrize("reader", ["output", "If", "Loop"])
@pytest.mark.parametrize(("precision", "share"), [("float32", 0.8), ("int8", 0.4)])
def test_what_reads_a_value_before_an_activation_gets_its_negative_numbers(
    reader: str, precision: str, share: float, tmp_path: Path
) -> None:
    chain, random = Chain(), np.random.default_rng(2)
    for op_type in ("Conv", "Relu", "Conv", "Clip", "Conv"):
        chain.step(op_type, random)
    for value in ("v1", "v3"):
        if reader == "output":
            chain.outputs.append(value)
        else:
            chain.capture(value, reader)
    for name in ("w1", "w3", "w5"):
        factors = random.standard_normal((4, 2)), random.standard_normal((2, 36)) / 6
        chain.constants[name] = (factors[0] @ factors[1]).reshape(4, 4, 3, 3).astype(np.float32)
    model, path, target = chain.model(), tmp_path / "chain.onnx", tmp_path / "small.onnx"
    onnx.save(model, path)
    found = rankrl.compress(
        path,
        {"x": X, **YES},
        target,
        bytes=share,
        timing=rankrl.LatencyOptions(batch=4, reduce_range=True),
        decomposition=layer_options(
            precisions=[precision], candidates=4, iterations=5, final_iterations=10, weigh_outputs=False
        ),
    )
    assert any(layer.operations for layer in found.plan)
    assert_alike(model, onnx.load(target), {"x": X, **YES})
    assert [each.name for each in onnx.load(target).graph.output] == [
        each.name for each in model.graph.output
    ]
