"""Products with one-hot codes become look-ups, and no output changes."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from call_options import grouped
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from small_graphs import OPSETS, Array, generator, model_of, network_of

import rankrl
from rankrl.errors import RankrlError
from rankrl.onnx.graph.prepared_file import PreparedFile, with_look_ups
from rankrl.onnx.protobuf import to_proto

CLASSES, WIDTH, POSITIONS = 7, 4, 5
INTEGERS = {"tokens": TensorProto.INT64}


def embedded(index: str) -> list[onnx.NodeProto]:
    """Compare an index with the `classes` and multiply with the `embedding`."""
    return [
        helper.make_node("Equal", [index, "classes"], ["same"]),
        helper.make_node("Cast", ["same"], ["code"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["code", "embedding"], ["embedded"], name="embed"),
    ]


def coded(
    *behind: onnx.NodeProto,
    ends: tuple[str, ...] = ("y",),
    opset: int = OPSETS[0],
    kind: int = TensorProto.INT64,
    classes: Array | None = None,
) -> onnx.ModelProto:
    """Indices (N, 5), compared with the classes and multiplied with an embedding, and what is `behind`."""
    random = generator()
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    constants = {
        "last": np.array([-1], np.int64),
        "classes": np.arange(CLASSES, dtype=dtype) if classes is None else classes.astype(dtype),
        "embedding": random.standard_normal((CLASSES, WIDTH)).astype(np.float32),
        "bias": random.standard_normal((1, 1, WIDTH)).astype(np.float32),
        "half": np.array(0.5, np.float32),
        "along": random.standard_normal((1, POSITIONS, 1)).astype(np.float32),
        "weight": random.standard_normal((WIDTH, 3)).astype(np.float32),
    }
    nodes = [
        helper.make_node("Unsqueeze", ["tokens", "last"], ["column"]),
        *embedded("column"),
        *behind,
    ]
    used = {name for node in nodes for name in node.input}
    return model_of(
        nodes,
        {name: value for name, value in constants.items() if name in used},
        {"tokens": ["N", POSITIONS]},
        {name: ["N", POSITIONS, None] for name in ends},
        opset=opset,
        types={"tokens": kind},
    )


def node(op_type: str, *inputs: str, to: str) -> onnx.NodeProto:
    return helper.make_node(op_type, list(inputs), [to], name=to)


BEHIND: dict[str, tuple[onnx.NodeProto, ...]] = {
    "nothing": (node("MatMul", "embedded", "weight", to="y"),),
    "a bias": (node("Add", "bias", "embedded", to="b"), node("MatMul", "b", "weight", to="y")),
    "an activation of several nodes": (
        node("Add", "embedded", "bias", to="b"),
        node("Mul", "b", "half", to="h"),
        node("Tanh", "h", to="t"),
        node("Mul", "b", "t", to="y"),
    ),
    "what differs by position": (
        node("Relu", "embedded", to="r"),
        node("Add", "r", "along", to="p"),
        node("Tanh", "p", to="y"),
    ),
    "two ways on": (
        node("Relu", "embedded", to="r"),
        node("Tanh", "r", to="t"),
        node("MatMul", "r", "weight", to="m"),
        node("MatMul", "t", "weight", to="n"),
        node("Add", "m", "n", to="y"),
    ),
}


def outputs(model: onnx.ModelProto, tokens: Array) -> list[Array]:
    found: Any = ReferenceEvaluator(model).run(None, {"tokens": tokens})
    return [np.asarray(each) for each in found]


def operators(model: onnx.ModelProto) -> list[str]:
    return [each.op_type for each in model.graph.node]


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("behind", BEHIND)
def test_computes_the_same(behind: str, opset: int, tmp_path: Path) -> None:
    """Also for indices that are no class, whose code is zeros."""
    model = coded(*BEHIND[behind], opset=opset)
    found = to_proto(with_look_ups(network_of(model, tmp_path)).model)
    onnx.checker.check_model(found, full_check=True)
    assert "Gather" in operators(found)
    assert "Equal" not in operators(found)
    tokens = np.arange(-3, 12).reshape(3, POSITIONS)
    expected, new = (outputs(each, tokens)[0] for each in (model, found))
    np.testing.assert_allclose(new, expected, atol=1e-6)


def test_takes_into_the_table_what_follows_one_by_one(tmp_path: Path) -> None:
    left = {
        name: operators(to_proto(with_look_ups(network_of(coded(*nodes), tmp_path)).model))
        for name, nodes in BEHIND.items()
    }
    assert left["a bias"] == ["Unsqueeze", "Squeeze", "Cast", "Clip", "Gather", "MatMul"]
    assert left["an activation of several nodes"] == ["Unsqueeze", "Squeeze", "Cast", "Clip", "Gather"]
    assert left["what differs by position"][-3:] == ["Gather", "Add", "Tanh"]
    assert left["two ways on"][-5:] == ["Gather", "Tanh", "MatMul", "MatMul", "Add"]


def test_keeps_values_that_are_outputs(tmp_path: Path) -> None:
    model = coded(node("Relu", "embedded", to="r"), node("Tanh", "r", to="y"), ends=("y", "r"))
    found = to_proto(with_look_ups(network_of(model, tmp_path)).model)
    tokens = np.arange(10).reshape(2, POSITIONS)
    for new, expected in zip(outputs(found, tokens), outputs(model, tokens), strict=True):
        np.testing.assert_allclose(new, expected, atol=1e-6)


@pytest.mark.parametrize("kind", [TensorProto.INT32, TensorProto.INT64, TensorProto.INT8, TensorProto.UINT8])
@given(data=st.data())
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_indices_of_every_type(kind: int, data: st.DataObject, tmp_path: Path) -> None:
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    limits = np.iinfo(dtype)
    whole = st.integers(int(limits.min), int(limits.max)) | st.integers(0, CLASSES)
    tokens = np.array(data.draw(st.lists(whole, min_size=POSITIONS, max_size=POSITIONS)), dtype)[None]
    model = coded(*BEHIND["a bias"], kind=kind)
    found = to_proto(with_look_ups(network_of(model, tmp_path)).model)
    expected, new = (outputs(each, tokens)[0] for each in (model, found))
    np.testing.assert_allclose(new, expected, atol=1e-6)


@pytest.mark.parametrize(
    "classes",
    [np.arange(CLASSES)[::-1], np.arange(1, CLASSES + 1), np.arange(CLASSES) * 2],
    ids=["reversed", "from one", "every other"],
)
def test_other_comparisons_stay(classes: Array, tmp_path: Path) -> None:
    network = network_of(coded(*BEHIND["a bias"], classes=classes.copy()), tmp_path)
    assert with_look_ups(network) is network


def test_comparison_of_numbers_stays(tmp_path: Path) -> None:
    """1.5 is no class, and must not be cut to one."""
    network = network_of(coded(*BEHIND["a bias"], kind=TensorProto.FLOAT), tmp_path)
    assert with_look_ups(network) is network


def flat(*behind: onnx.NodeProto, classes: tuple[int, ...], axes: int) -> onnx.ModelProto:
    """Indices (N, 1) and a product (N, 4), or one with more axes where the classes have them."""
    random = generator()
    constants = {
        "classes": np.arange(CLASSES).reshape(classes),
        "embedding": random.standard_normal((CLASSES, WIDTH)).astype(np.float32),
        "bias": random.standard_normal((1, 1, WIDTH)).astype(np.float32),
    }
    nodes = [
        *embedded("tokens"),
        *behind,
    ]
    used = {name for each in nodes for name in each.input}
    return model_of(
        nodes,
        {name: value for name, value in constants.items() if name in used},
        {"tokens": ["N", 1]},
        {"y": [None] * axes},
        types=INTEGERS,
    )


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (flat(node("Relu", "embedded", to="y"), classes=(CLASSES,), axes=2), ["Gather"]),
        (flat(node("Add", "embedded", "bias", to="y"), classes=(CLASSES,), axes=3), ["Gather", "Add"]),
        (flat(node("Relu", "embedded", to="y"), classes=(1, 1, CLASSES), axes=3), ["MatMul", "Relu"]),
    ],
    ids=["alike", "a constant with more axes", "classes with more axes"],
)
def test_axes_stay(model: onnx.ModelProto, found: list[str], tmp_path: Path) -> None:
    rewritten = to_proto(with_look_ups(network_of(model, tmp_path)).model)
    assert operators(rewritten)[-len(found) :] == found
    tokens = np.arange(-2, 9)[:, None]
    expected, new = (outputs(each, tokens)[0] for each in (model, rewritten))
    np.testing.assert_allclose(new, expected, atol=1e-6)
    assert new.shape == expected.shape


class Embedding(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner = torch.nn.Linear(CLASSES, 16), torch.nn.Linear(16, 32)
        self.last = torch.nn.Linear(32, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map (N, 5) to (N, 3)."""
        x = torch.relu(self.embed(F.one_hot(tokens, CLASSES).float()))
        return self.last(torch.relu(self.inner(x)).mean(1))


def test_compresses_with_look_ups(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(CLASSES, (80, POSITIONS))
    path = tmp_path / "net.onnx"
    torch.onnx.export(
        Embedding().eval(), (tokens[:2],), path, dynamo=True, verbose=False, dynamic_shapes=({0: "n"},)
    )
    network = PreparedFile.read(path, tokens.numpy())
    assert [site.spec.weight_shape for site in network.looked_up] == [(16, CLASSES)]
    assert PreparedFile.read(path, tokens.numpy(), look_ups=False).looked_up == []
    options: dict[str, Any] = {"decomposition": "tucker", "iterations": 5}
    found = rankrl.compress(path, tokens.numpy(), tmp_path / "small.onnx", macs=0.5, **grouped(**options))
    assert found.before["macs"] == network.original_totals["macs"] > network.totals["macs"]
    assert found.after["macs"] <= 0.5 * found.before["macs"]
    assert "Gather" in operators(onnx.load(tmp_path / "small.onnx"))
    again = rankrl.apply_plan(path, found.plan, tokens.numpy(), tmp_path / "again.onnx")
    assert again.after["macs"] == found.after["macs"]


@pytest.mark.parametrize("budget", [{"params": 1.5}, {"latency": 1.5}, {"macs": 0}])
def test_budgets_out_of_range_are_refused_here_too(budget: dict[str, Any], tmp_path: Path) -> None:
    onnx.save(coded(*BEHIND["a bias"]), tmp_path / "net.onnx")
    tokens = np.arange(200).reshape(40, POSITIONS) % CLASSES
    with pytest.raises(RankrlError, match=r"1\.5|0"):
        rankrl.compress(tmp_path / "net.onnx", tokens, tmp_path / "small.onnx", **budget)
