"""Who reads the values of a graph, and in which order its nodes come; onnx's checker is the judge."""

from __future__ import annotations

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from rankrl.onnx.export.values import captured_by, names_in, new_name, rename_values, sort_nodes, uses


def info(name: str, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, ["n"])


def graph() -> onnx.GraphProto:
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
        helper.make_node("Neg", ["a"], ["b"], "neg"),
        helper.make_node("If", ["yes"], ["c"], "choice", then_branch=outer, else_branch=outer),
        helper.make_node("Add", ["b", "c"], ["y"], "add"),
    ]
    entries = [info("x"), helper.make_tensor_value_info("yes", TensorProto.BOOL, [])]
    return helper.make_graph(nodes, "graph", entries, [info("y"), info("b")])


def checked(value: onnx.GraphProto) -> None:
    opsets = [helper.make_opsetid("", 17)]
    onnx.checker.check_model(helper.make_model(value, opset_imports=opsets, ir_version=8))


def test_outputs_and_captured_values_count_as_readers() -> None:
    value = graph()
    assert captured_by(value.node[2]) == {"a", "x", "yes"}
    assert captured_by(value.node[0]) == set()
    assert dict(uses(value)) == {"x": 2, "a": 2, "b": 2, "c": 1, "y": 1, "yes": 2}
    assert {"own", "innermost", "sum", "within", "yes"} <= names_in(value)


def test_a_new_name_is_read_wherever_the_old_one_was_and_a_body_keeps_its_own() -> None:
    value = graph()
    rename_values(value, {"a": "renamed", "x": "entry", "b": "end", "own": "never"})
    checked(value)
    assert captured_by(value.node[2]) == {"renamed", "entry", "yes"}
    assert [each.name for each in value.output] == ["y", "end"]
    assert "own" in names_in(value)
    assert not {"a", "never"} & names_in(value)


@given(order=st.permutations(range(4)))
def test_sorted_nodes_come_behind_what_their_bodies_read(order: list[int]) -> None:
    value = graph()
    nodes = [value.node[index] for index in order]
    mixed = helper.make_graph(nodes, "graph", value.input, value.output)
    if order.index(2) < order.index(0):
        with pytest.raises(onnx.checker.ValidationError):
            checked(mixed)
    sort_nodes(mixed)
    checked(mixed)
    assert sorted(node.name for node in mixed.node) == ["add", "choice", "neg", "relu"]


def test_nodes_in_order_stay_and_those_that_wait_for_one_another_are_left_to_the_checker() -> None:
    value = graph()
    before = value.SerializeToString()
    sort_nodes(value)
    assert value.SerializeToString() == before
    value.node[0].input[0] = "y"
    sort_nodes(value)
    assert len(value.node) == 4
    with pytest.raises(onnx.checker.ValidationError):
        checked(value)


def test_names_that_are_made_up_are_free() -> None:
    taken = {"a", "a_"}
    assert [new_name("a", taken), new_name("a", taken), new_name("b", taken)] == ["a__", "a___", "b"]
