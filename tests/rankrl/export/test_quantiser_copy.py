"""Integers in graphs whose values are read in other ways than by one node: outputs, bodies, taken names."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from rankrl.export import ExportError, quantise_onnx

Array = np.ndarray

onnxruntime.set_default_logger_severity(3)

X = np.random.default_rng(0).standard_normal((24, 4, 6, 6)).astype(np.float32)
YES = {"yes": np.array(True)}
STEPS = ("Conv", "Relu", "Clip", "MaxPool", "Add", "Sigmoid")


@dataclass
class Chain:
    """A graph that grows node by node; `readers` may read any value of it besides."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, Array] = field(
        default_factory=lambda: {"low": np.float32(-0.5), "high": np.float32(0.5)}, repr=False
    )
    values: list[str] = field(default_factory=lambda: ["x"])
    outputs: list[str] = field(default_factory=list)

    def add(self, op_type: str, *further: str, **attributes: object) -> str:
        name = f"v{len(self.values)}"
        inputs = [self.values[-1], *further]
        self.nodes.append(helper.make_node(op_type, inputs, [name], f"node_{name}", **attributes))
        self.values.append(name)
        return name

    def step(self, op_type: str, random: np.random.Generator) -> None:
        if op_type == "Conv":
            weight = f"w{len(self.values)}"
            self.constants[weight] = (random.standard_normal((4, 4, 3, 3)) / 4).astype(np.float32)
            self.constants[f"{weight}_bias"] = random.standard_normal(4).astype(np.float32) / 4
            self.add("Conv", weight, f"{weight}_bias", pads=[1] * 4)
        elif op_type == "Clip":
            self.add("Clip", "low", "high")
        elif op_type == "Add":
            self.add("Add", self.values[int(random.integers(len(self.values)))])
        elif op_type == "MaxPool":
            self.add("MaxPool", kernel_shape=[3, 3], pads=[1] * 4)
        else:
            self.add(op_type)

    def capture(self, value: str) -> None:
        """Let the body of an If, which says yes, hand a value on."""
        name = f"captured_{value}"
        ways = [
            helper.make_graph(
                [helper.make_node(kind, [value], [f"{way}_{name}"], f"{way}_{name}")],
                way,
                [],
                [helper.make_tensor_value_info(f"{way}_{name}", TensorProto.FLOAT, ["n", 4, 6, 6])],
            )
            for way, kind in (("then", "Identity"), ("else", "Neg"))
        ]
        self.nodes.append(
            helper.make_node("If", ["yes"], [name], name, then_branch=ways[0], else_branch=ways[1])
        )
        self.outputs.append(name)

    def model(self) -> onnx.ModelProto:
        kinds = {"x": (TensorProto.FLOAT, ["n", 4, 6, 6]), "yes": (TensorProto.BOOL, [])}
        inputs = [helper.make_tensor_value_info(name, *kind) for name, kind in kinds.items()]
        outputs = dict.fromkeys([self.values[-1], *self.outputs])
        graph = helper.make_graph(
            self.nodes,
            "chain",
            inputs,
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4, 6, 6]) for name in outputs],
            [numpy_helper.from_array(np.asarray(value), name) for name, value in self.constants.items()],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        onnx.checker.check_model(model, full_check=True)
        return model


def run(model: str | Path | onnx.ModelProto, feed: Mapping[str, Array]) -> dict[str, Array]:
    content = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return dict(
        zip([each.name for each in session.get_outputs()], session.run(None, dict(feed)), strict=True)
    )


def in_integers(model: onnx.ModelProto, folder: Path, weights: list[str] | None) -> onnx.ModelProto:
    path, target = folder / "plain.onnx", folder / "integers.onnx"
    onnx.save(model, path)
    quantise_onnx(path, target, [{"x": X, **YES}], weights=weights, reduce_range=True, partly=True)
    return onnx.load(target)


def assert_alike(model: onnx.ModelProto, rounded: onnx.ModelProto, feed: Mapping[str, Array]) -> None:
    before, after = run(model, feed), run(rounded, feed)
    assert list(before) == list(after)
    for name, expected in before.items():
        error = float(np.linalg.norm(after[name] - expected) / np.linalg.norm(expected))
        assert error <= 0.1, (name, error)


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    chain, random = Chain(), np.random.default_rng(draw(st.integers(0, 99)))
    chain.step("Conv", random)
    for op_type in draw(st.lists(st.sampled_from(STEPS), min_size=1, max_size=5)):
        chain.step(op_type, random)
    computed = st.sampled_from(chain.values[1:])
    for value in draw(st.lists(computed, max_size=2, unique=True)):
        chain.capture(value)
    chain.outputs += draw(st.lists(computed, max_size=2, unique=True))
    return chain


@settings(max_examples=30, deadline=None)
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
