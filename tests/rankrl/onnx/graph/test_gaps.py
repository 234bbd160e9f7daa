"""Inputs with NaN that a network masks: nodes that see them have to stay, and are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from call_options import layer_options
from onnx import TensorProto, helper
from small_graphs import Array, drawn, model_of, of_low_rank

import rankrl
from rankrl.onnx.graph import OnnxGraphError

VALID = np.random.default_rng(0).random((60, 6, 1)) < 0.7
X = drawn(60, 6, 16)
GAPS = np.where(VALID, X, np.nan).astype(np.float32)
CALL: dict[str, Any] = {"timing": rankrl.LatencyOptions(batch=2, runs=2, int8=False), "progress": False}


def masked(kind: str) -> onnx.ModelProto:
    """Positions that are masked behind the first product, in front of it, or not at all."""
    node = helper.make_node
    first = {
        "behind": [
            node("MatMul", ["x", "first"], ["a"], "first"),
            node("Where", ["valid", "a", "zero"], ["b"], "mask"),
        ],
        "in front": [
            node("Where", ["valid", "x", "zero"], ["a"], "mask"),
            node("MatMul", ["a", "first"], ["b"], "first"),
        ],
        "of its own": [
            node("Where", ["valid", "x", "nan"], ["gaps"], "gaps"),
            node("MatMul", ["gaps", "first"], ["a"], "first"),
            node("Where", ["valid", "a", "zero"], ["b"], "mask"),
        ],
        "never": [
            node("MatMul", ["x", "first"], ["a"], "first"),
            node("Where", ["valid", "a", "a"], ["b"], "mask"),
        ],
    }[kind]
    nodes = [
        *first,
        node("Relu", ["b"], ["c"], "relu"),
        node("MatMul", ["c", "second"], ["d"], "second"),
        node("ReduceMax", ["d"], ["y"], "most", axes=[1], keepdims=0),
    ]
    constants = {
        "first": of_low_rank(32, 16, 4).T.copy(),
        "second": of_low_rank(8, 32, 3).T.copy(),
        "zero": np.float32(0),
        "nan": np.float32(np.nan),
    }
    inputs = {"x": ["n", 6, 16], "valid": ["n", 6, 1]}
    return model_of(nodes, constants, inputs, {"y": ["n", 8]}, types={"valid": TensorProto.BOOL})


def saved(folder: Path, kind: str) -> tuple[Path, dict[str, Array]]:
    path = folder / "net.onnx"
    onnx.save(masked(kind), path)
    return path, {"x": X if kind == "of its own" else GAPS, "valid": VALID}


@pytest.mark.parametrize(
    ("kind", "holds"),
    [("behind", r"hold NaN or infinite values in \d+ of 60"), ("of its own", "computes NaN or infinite")],
)
def test_a_node_that_sees_masked_gaps_is_left_where_it_is_skipped(
    kind: str, holds: str, tmp_path: Path
) -> None:
    path, feed = saved(tmp_path, kind)
    (expected,) = onnxruntime.InferenceSession(path).run(None, feed)
    assert np.isfinite(expected).all()
    with pytest.raises(OnnxGraphError, match=rf"{holds}.*masks them, .*skip=\['first'\], or fill the gaps"):
        rankrl.compress(
            path, feed, tmp_path / "small.onnx", params=0.8, decomposition=layer_options("tucker"), **CALL
        )
    options = layer_options("tucker", skip=["first"])
    result = rankrl.compress(path, feed, tmp_path / "small.onnx", params=0.9, decomposition=options, **CALL)
    (found,) = onnxruntime.InferenceSession(result.path).run(None, feed)
    assert np.linalg.norm(found - expected) < 0.3 * np.linalg.norm(expected)


def test_gaps_that_are_filled_in_front_of_all_nodes_hurt_nothing(tmp_path: Path) -> None:
    path, feed = saved(tmp_path, "in front")
    result = rankrl.compress(
        path, feed, tmp_path / "small.onnx", params=0.7, decomposition=layer_options("tucker"), **CALL
    )
    assert result.after["params"] <= 0.7 * result.before["params"]


def test_gaps_that_reach_the_outputs_are_to_be_left_out(tmp_path: Path) -> None:
    path, feed = saved(tmp_path, "never")
    with pytest.raises(OnnxGraphError, match="of 60 inputs; leave such inputs out"):
        rankrl.compress(
            path, feed, tmp_path / "small.onnx", params=0.8, decomposition=layer_options("tucker"), **CALL
        )
