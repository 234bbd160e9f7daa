"""Names, constants and parts of graphs; onnx's checker and its reference evaluator are the judges."""

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from rankrl.onnx.graph_edits import (
    add_constant,
    free_name,
    is_constant,
    names_in,
    new_name,
    node_of,
    part_of,
    put_first,
    put_in_place,
    stored,
    without_unused,
)
from rankrl.onnx.protobuf import load_model, to_proto

X = np.array([-1, 2, 3], np.float32)


def info(name: str, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, ["n"])


def model() -> ir.Model:
    """x to a, which the body of a body of `choice` captures, and b, an output; `own` is the body's."""
    inner = helper.make_graph(
        [helper.make_node("Add", ["a", "own"], ["innermost"], "sum")], "inner", [], [info("innermost")]
    )
    outer = helper.make_graph(
        [
            helper.make_node("Neg", ["x"], ["own"], "minus"),
            helper.make_node("If", ["yes"], ["within"], "again", then_branch=inner, else_branch=inner),
        ],
        "outer",
        [],
        [info("within")],
    )
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], "relu"),
        helper.make_node("Mul", ["a", "two"], ["b"], "double"),
        helper.make_node("If", ["yes"], ["c"], "choice", then_branch=outer, else_branch=outer),
        helper.make_node("Add", ["b", "c"], ["y"], "add"),
    ]
    entries = [info("x"), helper.make_tensor_value_info("yes", TensorProto.BOOL, [])]
    constants = [numpy_helper.from_array(np.array([2], np.float32), "two")]
    graph = helper.make_graph(nodes, "graph", entries, [info("y"), info("b")], constants)
    opsets = [helper.make_opsetid("", 17)]
    return ir.from_proto(helper.make_model(graph, opset_imports=opsets, ir_version=8))


def run(value: ir.Model, **feed: np.ndarray) -> list[np.ndarray]:
    proto = to_proto(value)
    onnx.checker.check_model(proto, full_check=True)
    return list(ReferenceEvaluator(proto).run(None, feed))


def test_names_of_bodies_are_taken_too() -> None:
    value = model()
    assert {"own", "innermost", "sum", "within", "yes", "two"} <= names_in(value.graph)
    assert free_name(value.graph, "own") == "own_"
    taken = {"a", "a_"}
    assert [new_name("a", taken), new_name("a", taken), new_name("b", taken)] == ["a__", "a___", "b"]


def test_a_node_in_the_place_of_another_is_read_by_bodies_and_outputs_too() -> None:
    value = model()
    expected = run(value, x=X, yes=np.array(True))
    graph = value.graph
    relu, double = graph[0], graph[1]
    zero = add_constant(graph, "zero", np.array(0, np.float32))
    put_in_place(graph, [relu], [node_of("Max", [relu.inputs[0], zero], "largest")])
    put_in_place(graph, [double], [node_of("Add", [double.inputs[0]] * 2, "twice")])
    assert not is_constant(graph.inputs[0])
    np.testing.assert_array_equal(stored(graph.initializers["two"]), [2])
    without_unused(value)
    assert list(graph.initializers) == ["zero"]
    for before, after in zip(expected, run(value, x=X, yes=np.array(True)), strict=True):
        np.testing.assert_array_equal(before, after)
    assert [each.name for each in graph.outputs] == ["y", "b"]


def test_nodes_before_all_others_compute_what_those_read() -> None:
    value = model()
    graph = value.graph
    uses, negative = list(graph.inputs[0].uses()), node_of("Neg", [graph.inputs[0]], "negative")
    put_first(graph, [negative])
    for node, index in uses:
        node.replace_input_with(index, negative.outputs[0])
    for before, after in zip(
        run(model(), x=-X, yes=np.array(True)), run(value, x=X, yes=np.array(True)), strict=True
    ):
        np.testing.assert_array_equal(before, after)


def test_a_part_is_what_lies_between_values_and_the_whole_stays() -> None:
    value = model()
    part = part_of(value, ["a"], ["b"])
    entry, x = part.graph.inputs[0], value.graph.inputs[0]
    entry.type, entry.shape = x.type, x.shape
    assert [node.name for node in part.graph] == ["double"]
    np.testing.assert_array_equal(run(part, a=X)[0], 2 * X)
    assert to_proto(value) == to_proto(model())


def test_a_file_comes_back_as_it_was_written(tmp_path: object) -> None:
    proto = to_proto(model())
    assert not proto.graph.value_info  # constants say their types and sizes themselves
    onnx.save(proto, f"{tmp_path}/net.onnx")
    assert to_proto(load_model(f"{tmp_path}/net.onnx")) == proto


def test_padding_keeps_an_empty_input() -> None:
    """Without it onnxruntime takes the padding into the next convolution, which is slow on some."""
    value = ir.from_onnx_text("""<ir_version: 8, opset_import: ["": 17]>
        padded (float[3] x) => (float[5] y) <int64[2] pads = {1, 1}> { y = Pad(x, pads) }""")
    value.graph[0].resize_inputs(3)
    assert list(without_unused(value).graph[0].inputs)[2] is None
    padded = ReferenceEvaluator(to_proto(value)).run(None, {"x": X})[0]
    np.testing.assert_array_equal(padded, [0, -1, 2, 3, 0])
