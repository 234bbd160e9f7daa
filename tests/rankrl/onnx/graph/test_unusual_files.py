"""Files that are written in other ways than exporters write them: shared, listed, computed, unnamed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from call_options import grouped, layer_options
from onnx import TensorProto, helper, numpy_helper

import rankrl
from rankrl.onnx.graph.network import Array, OnnxNetwork
from rankrl.onnx.graph.prepared_file import network_costs
from rankrl.onnx.graph.sites import Site, find_sites

DRAWN = np.random.default_rng(0)
X = DRAWN.standard_normal((60, 16)).astype(np.float32)


def low(rows: int, columns: int, rank: int = 3) -> Array:
    """Draw a matrix that is nearly of a low rank."""
    product = DRAWN.standard_normal((rows, rank)) @ DRAWN.standard_normal((rank, columns))
    return (product / 8 + 0.02 * DRAWN.standard_normal((rows, columns))).astype(np.float32)


def saved(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    constants: dict[str, Array],
    *,
    listed: bool = False,
    output: tuple[int | str, ...] = ("n", 16),
) -> Path:
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("n", 16))]
    if listed:
        inputs += [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, each.shape)
            for name, each in constants.items()
        ]
    graph = helper.make_graph(
        list(nodes),
        "graph",
        inputs,
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, output)],
        [numpy_helper.from_array(each, name) for name, each in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def sites_of(path: Path) -> tuple[OnnxNetwork, dict[str, Site]]:
    network = OnnxNetwork.load(path)
    return network, {site.name: site for site in find_sites(network, {"x": X})}


def product(left: str, right: str, out: str, name: str = "") -> onnx.NodeProto:
    return helper.make_node("MatMul", [left, right], [out], name)


def turned(value: str, out: str) -> onnx.NodeProto:
    return helper.make_node("Transpose", [value], [out], perm=[1, 0])


def test_a_weight_that_two_nodes_take_by_ways_of_their_own_is_one(tmp_path: Path) -> None:
    nodes = [
        turned("W", "first"),
        product("x", "first", "a", "one"),
        helper.make_node("Relu", ["a"], ["b"]),
        turned("W", "second"),
        product("b", "second", "y", "two"),
    ]
    path = saved(tmp_path / "two.onnx", nodes, {"W": low(16, 16)})
    _, sites = sites_of(path)
    assert [twin.name for twin in sites["one"].twins] == ["two"]
    found = rankrl.compress(
        path, X, tmp_path / "small.onnx", params=0.6, decomposition=layer_options(candidates=4)
    )
    stored = onnx.load(tmp_path / "small.onnx").graph.initializer
    assert found.after["params"] == sum(int(np.prod(each.dims)) for each in stored) <= 0.6 * 256


@pytest.mark.parametrize("way", ["product", "look_up", "output"])
def test_a_weight_that_is_used_turned_and_as_it_is_stays(tmp_path: Path, way: str) -> None:
    nodes = [turned("W", "Wt"), product("x", "Wt", "a", "encode"), helper.make_node("Relu", ["a"], ["b"])]
    if way == "product":
        nodes.append(product("b", "W", "y", "decode"))
    elif way == "look_up":
        nodes += [
            helper.make_node("ArgMax", ["b"], ["at"], axis=1, keepdims=0),
            helper.make_node("Gather", ["W", "at"], ["y"]),
        ]
    else:
        nodes += [helper.make_node("Identity", ["W"], ["y"])]
    output = (16, 16) if way == "output" else ("n", 16)
    _, sites = sites_of(saved(tmp_path / "tied.onnx", nodes, {"W": low(16, 16)}, output=output))
    for site in sites.values():
        assert site.spec.refusal == "its weight is used in another way too, by another node or as an output"


def test_constants_among_the_inputs_leave_the_file_with_their_nodes(tmp_path: Path) -> None:
    nodes = [
        product("x", "V", "a", "first"),
        helper.make_node("Relu", ["a"], ["b"]),
        product("b", "U", "c", "last"),
        helper.make_node("Add", ["c", "bias"], ["y"]),
    ]
    constants = {"V": low(16, 16), "U": low(16, 16), "bias": np.ones(16, np.float32)}
    path = saved(tmp_path / "old.onnx", nodes, constants, listed=True)
    assert [each.name for each in OnnxNetwork.load(path).inputs] == ["x"]
    found = rankrl.compress(
        path, X, tmp_path / "small.onnx", params=0.6, decomposition=layer_options(candidates=4)
    )
    graph = onnx.load(tmp_path / "small.onnx").graph
    assert [each.name for each in graph.input] == ["x"]
    assert found.after["params"] == sum(int(np.prod(each.dims)) for each in graph.initializer)


def test_a_weight_that_is_contracted_from_constants_is_counted_and_stays(tmp_path: Path) -> None:
    nodes = [
        turned("B", "Bt"),
        product("A", "Bt", "W", "contract"),
        product("x", "W", "a", "use"),
        helper.make_node("Relu", ["a"], ["b"]),
        product("b", "V", "y", "last"),
    ]
    constants = {"A": low(16, 4), "B": low(16, 4), "V": low(16, 16)}
    network, sites = sites_of(saved(tmp_path / "cores.onnx", nodes, constants))
    assert list(sites) == ["use", "last"]
    refusal = sites["use"].spec.refusal
    assert refusal is not None
    assert "contracted from constants" in refusal
    assert sites["use"].spec.macs == sites["last"].spec.macs == 256
    assert network_costs(network, list(sites.values()))["params"] == 2 * 64 + 256


def test_nodes_without_names_are_told_from_those_in_bodies(tmp_path: Path) -> None:
    def branch(name: str) -> onnx.GraphProto:
        return helper.make_graph(
            [product("a", f"V{name}", f"out{name}")],
            name,
            [],
            [helper.make_tensor_value_info(f"out{name}", TensorProto.FLOAT, ("n", 16))],
            [numpy_helper.from_array(low(16, 16), f"V{name}")],
        )

    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        product("x", "W", "a"),
        helper.make_node("Greater", ["sum", "zero"], ["positive"]),
        helper.make_node("If", ["positive"], ["y"], then_branch=branch("then"), else_branch=branch("else")),
    ]
    path = saved(tmp_path / "if.onnx", nodes, {"W": low(16, 16), "zero": np.float32(0)})  # type: ignore[dict-item]
    network = OnnxNetwork.load(path)
    sites = find_sites(network, {"x": X})
    assert len({site.name for site in sites}) == len(sites) == 3
    found = rankrl.compress(
        path, X, tmp_path / "small.onnx", params=0.9, decomposition=layer_options(candidates=4)
    )
    assert [bool(layer.operations) for layer in found.plan].count(True) == 1


def test_names_that_new_nodes_would_have_may_be_taken_in_a_body_too(tmp_path: Path) -> None:
    nodes = [product("x", "W", "a", "one"), helper.make_node("Relu", ["a"], ["y"], "relu")]
    constants = {"W": low(16, 16)}
    options: dict[str, Any] = {
        "decomposition": "tucker",
        "params": 0.6,
        "candidates": 4,
        "weigh_outputs": False,
    }
    plain = saved(tmp_path / "plain.onnx", nodes, constants)
    first = rankrl.compress(plain, X, tmp_path / "first.onnx", **grouped(**options))
    graph = onnx.load(first.path).graph
    new = [node for node in graph.node if node.name.startswith("one/")]
    assert len(new) == 2
    inner, outer = new[0].output[0], new[1].input[1]  # a value and a constant that were added
    ends = [helper.make_tensor_value_info(inner, TensorProto.FLOAT, ("n", 16))]
    body = helper.make_graph([helper.make_node("Neg", ["y"], [inner], new[0].name)], "body", [], ends)
    nodes += [
        helper.make_node("ReduceSum", ["x"], ["sum"], "sum", keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["positive"], "greater"),
        helper.make_node("If", ["positive"], [outer], new[1].name, then_branch=body, else_branch=body),
    ]
    path = saved(tmp_path / "taken.onnx", nodes, {**constants, "zero": np.array(0, np.float32)})
    model = onnx.load(path)
    model.graph.output.append(helper.make_tensor_value_info(outer, TensorProto.FLOAT, ("n", 16)))
    onnx.save(model, path)
    second = rankrl.compress(path, X, tmp_path / "second.onnx", **grouped(**options))
    runs = [onnxruntime.InferenceSession(each.path).run(None, {"x": X}) for each in (first, second)]
    np.testing.assert_allclose(runs[1][0], runs[0][0], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(runs[1][1], -runs[1][0])
