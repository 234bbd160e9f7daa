"""Small graphs made by onnx.helper."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from rankrl.onnx.graph.network import OnnxNetwork

NEWEST = onnx.defs.onnx_opset_version()
OPSETS = (13, min(NEWEST, 23))
"""The oldest that is taken, and the newest that onnxruntime is sure to run."""

Array = np.ndarray[Any, Any]


def generator() -> np.random.Generator:
    return np.random.default_rng(0)


def of_low_rank(outputs: int, inputs: int, rank: int) -> Array:
    random = generator()
    product: Array = random.standard_normal((outputs, rank)) @ random.standard_normal((rank, inputs))
    return (product / np.sqrt(inputs * rank)).astype(np.float32)


def model_of(
    nodes: Sequence[onnx.NodeProto],
    constants: dict[str, Array],
    inputs: dict[str, Sequence[Any]],
    outputs: dict[str, Sequence[Any]],
    *,
    opset: int = OPSETS[0],
    types: dict[str, int] | None = None,
    domains: Sequence[str] = (),
    functions: Sequence[onnx.FunctionProto] = (),
) -> onnx.ModelProto:
    types = types or {}
    ends = [
        [
            helper.make_tensor_value_info(name, types.get(name, TensorProto.FLOAT), list(shape))
            for name, shape in each.items()
        ]
        for each in (inputs, outputs)
    ]
    graph = helper.make_graph(
        list(nodes),
        "small",
        *ends,
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(name, 1) for name in domains)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=8, functions=list(functions))
    onnx.checker.check_model(model, full_check=True)
    return model


def network_of(model: onnx.ModelProto, folder: Path) -> OnnxNetwork:
    path = folder / "net.onnx"
    onnx.save(model, path)
    return OnnxNetwork.load(path)


def convolutions(opset: int = OPSETS[0]) -> onnx.ModelProto:
    """Conv, ReLU, Conv without a bias, batch norm, pooling, Gemm; sizes other than the batch are free too."""
    random = generator()
    constants = {
        "first": (random.standard_normal((16, 3, 3, 3)) / 5).astype(np.float32),
        "first_bias": random.standard_normal(16).astype(np.float32),
        "second": of_low_rank(32, 16 * 9, 6).reshape(32, 16, 3, 3),
        "gamma": random.uniform(0.5, 1, 32).astype(np.float32),
        "beta": random.standard_normal(32).astype(np.float32),
        "mean": random.standard_normal(32).astype(np.float32),
        "variance": random.uniform(0.5, 1, 32).astype(np.float32),
        "last": of_low_rank(5, 32, 3),
        "last_bias": random.standard_normal(5).astype(np.float32),
    }
    nodes = [
        helper.make_node(
            "Conv", ["x", "first", "first_bias"], ["a"], "first", pads=[1, 0, 2, 1], strides=[1, 2]
        ),
        helper.make_node("Relu", ["a"], ["b"], "relu"),
        helper.make_node("Conv", ["b", "second"], ["c"], "second", auto_pad="SAME_UPPER"),
        helper.make_node("BatchNormalization", ["c", "gamma", "beta", "mean", "variance"], ["d"], "norm"),
        helper.make_node("GlobalAveragePool", ["d"], ["e"], "pool"),
        helper.make_node("Flatten", ["e"], ["f"], "flatten"),
        helper.make_node("Gemm", ["f", "last", "last_bias"], ["y"], "last", transB=1),
    ]
    return model_of(nodes, constants, {"x": ["n", 3, "h", "w"]}, {"y": ["n", 5]}, opset=opset)


def classifier(*, probabilities: bool) -> onnx.ModelProto:
    """Return `convolutions` with logits as training leaves them, of sum 0, or the classes' probabilities."""
    model = convolutions()
    for tensor in model.graph.initializer:
        if tensor.name in ("last", "last_bias"):
            weight = numpy_helper.to_array(tensor)
            tensor.CopyFrom(numpy_helper.from_array(8 * (weight - weight.mean(0)), tensor.name))
    if probabilities:
        model.graph.node[-1].output[0] = "logits"
        model.graph.node.append(helper.make_node("Softmax", ["logits"], ["y"], "softmax", axis=1))
    return model


def tokens(opset: int = OPSETS[0]) -> onnx.ModelProto:
    """Integers through an embedding, added to a second input; two outputs; MatMul, Add and Conv1d."""
    random = generator()
    constants = {
        "table": random.standard_normal((11, 24)).astype(np.float32),
        "mix": of_low_rank(24, 24, 4).T.copy(),
        "mix_bias": random.standard_normal(24).astype(np.float32),
        "along": of_low_rank(16, 24 * 3, 5).reshape(16, 24, 3),
    }
    nodes = [
        helper.make_node("Gather", ["table", "words"], ["a"], "gather"),
        helper.make_node("Add", ["a", "extra"], ["b"], "sum"),
        helper.make_node("MatMul", ["b", "mix"], ["c"], "mix"),
        helper.make_node("Add", ["c", "mix_bias"], ["d"], "bias"),
        helper.make_node("Tanh", ["d"], ["states"], "tanh"),
        helper.make_node("Transpose", ["states"], ["e"], "turn", perm=[0, 2, 1]),
        helper.make_node("Conv", ["e", "along"], ["f"], "along", pads=[2, 0]),
        helper.make_node("ReduceMax", ["f"], ["y"], "most", axes=[2], keepdims=0)
        if opset < 18
        else helper.make_node("ReduceMax", ["f", "axes"], ["y"], "most", keepdims=0),
    ]
    if opset >= 18:
        constants["axes"] = np.array([2], dtype=np.int64)
    return model_of(
        nodes,
        constants,
        {"words": ["n", "t"], "extra": ["n", "t", 24]},
        {"y": ["n", 16], "states": ["n", "t", 24]},
        opset=opset,
        types={"words": TensorProto.INT64},
    )


def upsampling(opset: int = OPSETS[0]) -> onnx.ModelProto:
    """Transposed convolutions along two axes and along one, with bias and without, and a Conv between."""
    random = generator()
    constants = {
        "up": of_low_rank(8, 6 * 12, 3).reshape(8, 6, 3, 4),
        "up_bias": random.standard_normal(6).astype(np.float32),
        "flat": (random.standard_normal((10, 6, 1, 1)) / 3).astype(np.float32),
        "along": of_low_rank(10, 4 * 5, 4).reshape(10, 4, 5),
        "axes": np.array([3], dtype=np.int64),
    }
    two: dict[str, Any] = {"strides": [2, 3], "pads": [1, 0, 0, 2], "dilations": [2, 1]}
    nodes = [
        helper.make_node(
            "ConvTranspose", ["x", "up", "up_bias"], ["a"], "up", output_padding=[1, 0], group=1, **two
        ),
        helper.make_node("Tanh", ["a"], ["b"], "tanh"),
        helper.make_node("Conv", ["b", "flat"], ["c"], "flat", strides=[1, 40]),
        helper.make_node("Squeeze", ["c", "axes"], ["d"], "squeeze"),
        helper.make_node("ConvTranspose", ["d", "along"], ["y"], "along", strides=[2], auto_pad="SAME_UPPER"),
    ]
    return model_of(nodes, constants, {"x": ["n", 8, 5, 9]}, {"y": ["n", 4, "t"]}, opset=opset)


def drawn(*shape: int) -> Array:
    return generator().standard_normal(shape).astype(np.float32)


def with_state(order: Sequence[int], state: Sequence[Any], *, batch: Any = "n") -> onnx.ModelProto:
    """A step of a recurrent network: a state of two layers, its axes in some order, and a rate."""
    back = [int(axis) for axis in np.argsort(order)]
    nodes = [
        helper.make_node("Transpose", ["state"], ["layers"], "turn", perm=back),
        helper.make_node("Gather", ["layers", "zero"], ["below"], "below", axis=0),
        helper.make_node("Gather", ["layers", "one"], ["above"], "above", axis=0),
        helper.make_node("MatMul", ["x", "first"], ["a"], "first"),
        helper.make_node("Add", ["a", "below"], ["b"], "sum"),
        helper.make_node("Tanh", ["b"], ["lower"], "lower"),
        helper.make_node("MatMul", ["lower", "second"], ["c"], "second"),
        helper.make_node("Add", ["c", "above"], ["d"], "sum2"),
        helper.make_node("Tanh", ["d"], ["upper"], "upper"),
        helper.make_node("Cast", ["rate"], ["number"], "cast", to=TensorProto.FLOAT),
        helper.make_node("Mul", ["upper", "number"], ["e"], "times"),
        helper.make_node("MatMul", ["e", "last"], ["y"], "last"),
        helper.make_node("Unsqueeze", ["lower", "zeros"], ["l"], "l"),
        helper.make_node("Unsqueeze", ["upper", "zeros"], ["u"], "u"),
        helper.make_node("Concat", ["l", "u"], ["both"], "both", axis=0),
        helper.make_node("Transpose", ["both"], ["next"], "back", perm=list(order)),
    ]
    constants = {
        "first": of_low_rank(16, 16, 4),
        "second": of_low_rank(16, 16, 3),
        "last": of_low_rank(16, 8, 3),
        "zero": np.array(0, np.int64),
        "one": np.array(1, np.int64),
        "zeros": np.array([0], np.int64),
    }
    return model_of(
        nodes,
        constants,
        {"x": [batch, 16], "state": state, "rate": []},
        {"y": [batch, 8], "next": state},
        types={"rate": TensorProto.INT64},
    )


def recorded_states(count: int, *, axis: int = 1) -> dict[str, Array]:
    state = np.moveaxis(drawn(2, count, 16), 1, axis)
    return {"x": drawn(count, 16), "state": state, "rate": np.array(2, np.int64)}


def shared(*, bias: bool, strides: tuple[int, int] = (1, 1), other_bias: bool = False) -> onnx.ModelProto:
    """Two convolutions along two branches with one weight, and a third one on what they have in common."""
    random = generator()
    constants = {
        "weight": of_low_rank(16, 8 * 9, 5).reshape(16, 8, 3, 3),
        "bias": random.standard_normal(16).astype(np.float32),
        "other_bias": random.standard_normal(16).astype(np.float32),
        "last": of_low_rank(12, 16, 4).reshape(12, 16, 1, 1),
        "two": np.array(2, np.float32),
    }
    biases = (["bias"], ["other_bias" if other_bias else "bias"]) if bias else ([], [])
    attributes = [{"pads": [1, 1, 1, 1], "strides": [stride, stride]} for stride in strides]
    nodes = [
        helper.make_node("Tanh", ["frames"], ["bent"], "tanh"),
        helper.make_node("Conv", ["frames", "weight", *biases[0]], ["a"], "one", **attributes[0]),
        helper.make_node("Conv", ["bent", "weight", *biases[1]], ["b"], "two", **attributes[1]),
        helper.make_node("GlobalAveragePool", ["a"], ["pooled_a"], "pool_a"),
        helper.make_node("GlobalAveragePool", ["b"], ["pooled_b"], "pool_b"),
        helper.make_node("Mul", ["pooled_a", "pooled_b"], ["both"], "product"),
        helper.make_node("Conv", ["both", "last"], ["y"], "last_conv"),
    ]
    used = {name for node in nodes for name in node.input}
    kept = {name: value for name, value in constants.items() if name in used}
    return model_of(nodes, kept, {"frames": ["n", 8, 9, 9]}, {"y": ["n", 12, 1, 1]})


def old_network(opset: int) -> onnx.ModelProto:
    """A network of operator set 9 or 11, whose attributes have become inputs in later ones."""
    random = generator()
    constants: dict[str, Array] = {
        "first": (random.standard_normal((16, 3, 3, 3)) / 5).astype(np.float32),
        "gamma": random.uniform(0.5, 1, 16).astype(np.float32),
        "beta": random.standard_normal(16).astype(np.float32),
        "mean": random.standard_normal(16).astype(np.float32),
        "variance": random.uniform(0.5, 1, 16).astype(np.float32),
        "scales": np.array([1, 1, 2, 2], np.float32),
        "second": of_low_rank(32, 16 * 9, 6).reshape(32, 16, 3, 3),
        "last": of_low_rank(32, 5, 3),
    }
    node = helper.make_node
    norm = ["a", "gamma", "beta", "mean", "variance"]
    if opset < 11:
        middle = [
            node("Clip", ["b"], ["c"], "clip", min=0.0, max=6.0),
            node("Upsample", ["c", "scales"], ["d"], "up", mode="nearest"),
        ]
    else:
        constants |= {"least": np.array(0, np.float32), "most": np.array(6, np.float32)}
        constants["roi"] = np.zeros(0, np.float32)
        rule: dict[str, Any] = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        middle = [
            node("Clip", ["b", "least", "most"], ["c"], "clip"),
            node("Resize", ["c", "roi", "scales"], ["d"], "up", mode="nearest", **rule),
        ]
    nodes = [
        node("Conv", ["x", "first"], ["a"], "first", pads=[1] * 4),
        node("BatchNormalization", norm, ["b"], "norm", epsilon=1e-4),
        *middle,
        node("Conv", ["d", "second"], ["e"], "second", strides=[2, 2], pads=[1] * 4),
        node("Dropout", ["e"], ["f"], "drop", ratio=0.3),
        node("GlobalAveragePool", ["f"], ["g"], "pool"),
        node("Squeeze", ["g"], ["h"], "squeeze", axes=[2, 3]),
        node("MatMul", ["h", "last"], ["i"], "last"),
        node("Unsqueeze", ["i"], ["y"], "unsqueeze", axes=[1]),
    ]
    return model_of(nodes, constants, {"x": ["n", 3, 10, 9]}, {"y": ["n", 1, 5]}, opset=opset)


def images(count: int = 60) -> Array:
    return generator().standard_normal((count, 3, 10, 9)).astype(np.float32)


def save_photos(folder: Path, count: int = 12) -> None:
    """Write pictures of 60 x 80 pixels, half of them in a folder inside."""
    random = generator()
    for index in range(count):
        target = folder / ("more" if index % 2 else ".")
        target.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(256, size=(60, 80, 3), dtype=np.uint8)).save(
            target / f"{index:02}.png"
        )


def sentences(count: int = 60) -> dict[str, Array]:
    random = generator()
    return {
        "words": random.integers(11, size=(count, 7)),
        "extra": random.standard_normal((count, 7, 24)).astype(np.float32),
    }


FRAMES = generator().standard_normal((80, 8, 9, 9)).astype(np.float32)
MAPS = generator().standard_normal((80, 8, 5, 9)).astype(np.float32)
