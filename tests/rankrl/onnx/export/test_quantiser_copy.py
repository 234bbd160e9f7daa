"""Integers in graphs whose values are read in other ways than by one node: outputs, bodies, taken names."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from chained_graphs import STEPS, YES, Chain, X, assert_alike, run
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from rankrl.errors import DefectError, ExportError
from rankrl.onnx.export import quantise_onnx
from rankrl.onnx.export.int8 import QuantiserCopy


def in_integers(model: onnx.ModelProto, folder: Path, weights: list[str] | None) -> onnx.ModelProto:
    path, target = folder / "plain.onnx", folder / "integers.onnx"
    onnx.save(model, path)
    quantise_onnx(path, target, [{"x": X, **YES}], weights=weights, reduce_range=True, partly=True)
    return onnx.load(target)


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    chain, random = Chain(), np.random.default_rng(draw(st.integers(0, 99)))
    chain.step("Conv", random)
    for op_type in draw(st.lists(st.sampled_from(STEPS), min_size=1, max_size=5)):
        chain.step(op_type, random)
    computed = st.sampled_from(chain.values[1:])
    for value in draw(st.lists(computed, max_size=2, unique=True)):
        chain.capture(value, draw(st.sampled_from(["If", "Loop"])))
    chain.outputs += draw(st.lists(computed, max_size=2, unique=True))
    return chain


@settings(max_examples=20, deadline=None)
@given(chain=chains(), alone=st.booleans())
def test_whatever_reads_a_value_gets_it_as_it_is_but_for_rounding(chain: Chain, alone: bool) -> None:
    model = chain.model()
    weights = [node.input[1] for node in chain.nodes if node.op_type == "Conv"] if alone else None
    with tempfile.TemporaryDirectory() as folder:
        assert_alike(model, in_integers(model, Path(folder), weights), {"x": X, **YES})


@pytest.mark.parametrize("behind", ["Relu", "Clip"])
@pytest.mark.parametrize("reader", ["output", "body", "both"])
def test_negative_numbers_before_an_activation_stay_where_something_else_reads_them(
    behind: str, reader: str, tmp_path: Path
) -> None:
    chain, random = Chain(), np.random.default_rng(0)
    for op_type in ("Conv", behind, "Conv"):
        chain.step(op_type, random)
    if reader != "output":
        chain.capture("v1")
    if reader != "body":
        chain.outputs.append("v1")
    model = chain.model()
    rounded = in_integers(model, tmp_path, ["w1", "w3"])
    assert_alike(model, rounded, {"x": X, **YES})
    kinds = [node.op_type for node in rounded.graph.node]
    assert "Identity" not in kinds  # what sets readers apart is gone again
    assert kinds.count("QuantizeLinear") == 4  # x, v1 and what is made of it, the last output


def test_names_that_the_quantiser_would_give_may_be_taken_and_stay(tmp_path: Path) -> None:
    chain, random = Chain(), np.random.default_rng(0)
    for op_type in ("Conv", "Relu", "Conv"):
        chain.step(op_type, random)
    chain.outputs += ["v1"]
    model = chain.model()
    taken = {
        "v2": "x_QuantizeLinear_Output",
        "v1": "x_quantized",
        "w1": "x_scale",
        "w1_bias": "x_zero_point",
        "w3": "x",
        "x": "w3",
    }
    for value in (*model.graph.node, *model.graph.initializer, *model.graph.input, *model.graph.output):
        if isinstance(value, onnx.NodeProto):
            value.input[:] = [taken.get(name, name) for name in value.input]
            value.output[:] = [taken.get(name, name) for name in value.output]
            value.name = {"node_v1": "w3_QuantizeLinear", "node_v2": ""}.get(value.name, value.name)
        else:
            value.name = taken.get(value.name, value.name)
    path, target = tmp_path / "plain.onnx", tmp_path / "integers.onnx"
    onnx.save(model, path)
    feed = {"w3": X, **YES}
    quantise_onnx(path, target, [feed], weights=["x_scale", "x"], reduce_range=True)
    rounded = onnx.load(target)
    assert_alike(model, rounded, feed)
    names = [node.name for node in rounded.graph.node if node.op_type == "Conv"]
    assert names == ["w3_QuantizeLinear", "node_v3"]
    nodes = [node.name for node in rounded.graph.node if node.name]
    assert len(set(nodes)) == len(nodes)
    again = tmp_path / "again.onnx"  # the names are those of a file in integers now
    with pytest.raises(ExportError, match="quantised already"):
        quantise_onnx(target, again, [feed])


def test_a_captured_weight_and_a_bias_among_the_outputs_stay(tmp_path: Path) -> None:
    chain, random = Chain(), np.random.default_rng(0)
    for op_type in ("Conv", "Relu", "Conv"):
        chain.step(op_type, random)
    model = chain.model()
    body = helper.make_graph(
        [helper.make_node("Identity", ["w1"], ["inner"], "inner")],
        "body",
        [],
        [helper.make_tensor_value_info("inner", TensorProto.FLOAT, [4, 4, 3, 3])],
    )
    model.graph.node.append(
        helper.make_node("If", ["yes"], ["weight"], "if", then_branch=body, else_branch=body)
    )
    model.graph.output.append(helper.make_tensor_value_info("weight", TensorProto.FLOAT, [4, 4, 3, 3]))
    model.graph.output.append(helper.make_tensor_value_info("w3_bias", TensorProto.FLOAT, [4]))
    rounded = in_integers(model, tmp_path, ["w1", "w3"])
    assert_alike(model, rounded, {"x": X, **YES})
    np.testing.assert_array_equal(run(rounded, {"x": X, **YES})["weight"], chain.constants["w1"])


def test_nothing_is_written_beside_the_original(tmp_path: Path) -> None:
    chain = Chain()
    chain.step("Conv", np.random.default_rng(0))
    in_integers(chain.model(), tmp_path, None)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["integers.onnx", "plain.onnx"]


def test_a_file_that_is_damaged_on_the_way_never_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(copy: QuantiserCopy, model: ir.Model) -> None:
        first = model.graph[0]
        again = [ir.val(output.name) for output in first.outputs]
        model.graph.append(ir.node(first.op_type, first.inputs, first.attributes, outputs=again))

    monkeypatch.setattr(QuantiserCopy, "restore", damaged)
    chain, target = Chain(), tmp_path / "integers.onnx"
    chain.step("Conv", np.random.default_rng(0))
    target.write_bytes(b"what was there")
    with pytest.raises(DefectError, match=r"plain\.onnx in integers is damaged, .* fault of rankrl's"):
        in_integers(chain.model(), tmp_path, None)
    assert target.read_bytes() == b"what was there"
