"""ONNX files that are damaged, foreign or odd, for the command line; see `fuzz_inputs.py`.

The right file holds two convolutions and a product whose weights have four independent rows, so that at the
budget asked for nothing is lost. A command that accepts a file must therefore write one with the same inputs
and outputs that computes the same: onnxruntime, which knows nothing of rankrl, runs both on all inputs.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_dynamic, quantize_static

LARGEST_ERROR = 0.2
"""Relative error of the outputs: more than integers lose, less than a misread weight costs."""
_CHANNELS, _SIZE, _INPUTS = 3, 8, 40
_RANK = 4
_OPTIMISED = ("ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL")

_ODD_NAMES = ("", "ä", "a b", "a\nb", "a/b:0", "x" * 3000, "c2", "c2_0", "W2_core", "x_batch", "W2_quantized")
_ODD_NAMES += ("W2_zero_point", "r1_scale", "r1_QuantizeLinear_Output")

Change = Callable[[random.Random, ModelProto, Path], str]
"""Changes a model, or writes another file in its place, and returns what was done."""

_CHANGES: dict[str, Change] = {}


def _change(function: Change) -> Change:
    _CHANGES[function.__name__.removeprefix("_")] = function
    return function


def right_model() -> ModelProto:
    """Make a network that can be compressed without any loss."""
    rng = np.random.default_rng(0)

    def low(rows: int, columns: int) -> np.ndarray[Any, Any]:
        product = rng.standard_normal((rows, _RANK)) @ rng.standard_normal((_RANK, columns))
        return (product * 2 / np.sqrt(_RANK * columns)).astype(np.float32)

    weights = {
        "W1": low(24, 9 * _CHANNELS).reshape(24, _CHANNELS, 3, 3),
        "b1": (0.1 * rng.standard_normal(24)).astype(np.float32),
        "W2": low(32, 9 * 24).reshape(32, 24, 3, 3),
        "b2": np.zeros(32, np.float32),
        "W3": low(32, 10),
    }
    nodes = [
        helper.make_node("Conv", ["x", "W1", "b1"], ["a1"], "c1", pads=[1] * 4),
        helper.make_node("Relu", ["a1"], ["r1"], "relu1"),
        helper.make_node("Conv", ["r1", "W2", "b2"], ["a2"], "c2", pads=[1] * 4),
        helper.make_node("Relu", ["a2"], ["r2"], "relu2"),
        helper.make_node("GlobalAveragePool", ["r2"], ["p"], "gap"),
        helper.make_node("Flatten", ["p"], ["f"], "flat"),
        helper.make_node("MatMul", ["f", "W3"], ["y"], "fc"),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", _CHANNELS, _SIZE, _SIZE])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 10])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def right_inputs() -> np.ndarray[Any, Any]:
    """Draw inputs for it, (N, channels, height, width)."""
    shape = (_INPUTS, _CHANNELS, _SIZE, _SIZE)
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def onnx_case(draw: random.Random, folder: Path) -> tuple[str, tuple[str, ...]]:
    """Write a file and its inputs into a folder; return what was done to them and the command line."""
    path, inputs = folder / "net.onnx", {"x": right_inputs()}
    model, done = right_model(), []
    for name in draw.sample(sorted(_CHANGES), k=draw.choice((1, 1, 1, 2))):
        try:
            done.append(f"{name}: {_CHANGES[name](draw, model, path)}")
        except Exception:  # the errors of onnxruntime's tools, assertions too, have no base of their own
            done.append(f"{name}: not possible")  # they do not take what the first change made
    if not path.exists():
        path.write_bytes(model.SerializeToString())
    if draw.random() < 0.15:
        done.append(_changed_inputs(draw, inputs))
    np.savez(folder / "inputs.npz", **inputs)  # type: ignore[arg-type]
    more = draw.choice(((), (), ("decomposition.precisions=[float32,int8]",), ("decomposition=cp",)))
    budget = "budget.params=0.7" if not more or "cp" in more[0] else "budget.bytes=0.4"
    quick = ("export.runs=1", "export.batch=2", "decomposition.candidates=4", "decomposition.iterations=10")
    task = draw.choice(((), (), (), (), ("task=inspect",)))
    command = ("model=onnx", "model.path=net.onnx", "dataset=inputs", "dataset.path=inputs.npz")
    asked = (budget, *quick, *more) if not task else ()
    return "; ".join(done), (*task, *command, *asked, "hydra.run.dir=run")


def onnx_problems(folder: Path) -> list[str]:
    """List what is wrong with the file that an accepted command wrote; nothing should be."""
    source, target = folder / "net.onnx", folder / "run" / "model.onnx"
    if not target.exists():
        return []  # task=inspect
    sessions = []
    for file in (target, source):
        try:
            sessions.insert(0, onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"]))
        except Exception as error:  # onnxruntime's error classes have no common base of their own
            # A source with two nodes of one name, say, is no file of onnxruntime's: nothing to compare with.
            return [f"accepted, but does not load: {error}"] if file == target else []
    names = [
        ([each.name for each in session.get_inputs()], [each.name for each in session.get_outputs()])
        for session in sessions
    ]
    if names[0] != names[1]:
        return [f"has the inputs and outputs {names[1]} instead of {names[0]}"]
    with np.load(folder / "inputs.npz") as arrays:
        inputs = dict(arrays)
    if len(inputs) == 1:
        inputs = {names[0][0][0]: next(iter(inputs.values()))}
    fixed = sessions[0].get_inputs()[0].shape[0]
    rows = fixed if isinstance(fixed, int) and fixed > 0 else _INPUTS
    wanted = {each.name: np.float16 if "float16" in each.type else None for each in sessions[0].get_inputs()}
    feed = {
        name: np.ascontiguousarray(inputs[name][:rows], dtype=wanted[name] or np.float32)
        for name in names[0][0]
        if name in inputs
    }
    problems = []
    before, after = (session.run(None, feed) for session in sessions)
    for name, known, computed in zip(names[0][1], before, after, strict=True):
        if known.dtype != computed.dtype or known.shape != computed.shape:
            problems.append(f"{name} is {computed.dtype} {computed.shape}, not {known.dtype} {known.shape}")
        elif known.dtype.kind == "f" and np.isfinite(known).all():
            scale = max(1e-6, float(np.linalg.norm(known.astype(np.float64))))
            error = float(np.linalg.norm(computed.astype(np.float64) - known)) / scale
            if not error <= LARGEST_ERROR:  # also true of NaN
                problems.append(f"{name} is {error:.0%} off, SILENTLY WRONG")
    return problems


# Changes that leave a file what it is.


@_change
def _domain(draw: random.Random, model: ModelProto, path: Path) -> str:
    node, domain = draw.choice(model.graph.node), draw.choice(("ai.onnx", "com.example", "com.microsoft"))
    node.domain = domain
    if domain != "ai.onnx" and draw.random() < 0.8:
        model.opset_import.append(helper.make_opsetid(domain, 1))
    return f"{node.name} in {domain}"


@_change
def _fused(draw: random.Random, model: ModelProto, path: Path) -> str:
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    first = draw.choice((0, 2))
    model.graph.node[first].op_type, model.graph.node[first].domain = "FusedConv", "com.microsoft"
    model.graph.node[first].attribute.append(helper.make_attribute("activation", "Relu"))
    model.graph.node[first].output[0] = model.graph.node[first + 1].output[0]
    del model.graph.node[first + 1]
    return "FusedConv"


@_change
def _optimised(draw: random.Random, model: ModelProto, path: Path) -> str:
    level = draw.choice(_OPTIMISED)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.optimized_model_filepath, options.log_severity_level = str(path), 4
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its error classes have no common base of their own
        raise RuntimeError(str(error)) from error
    return level


@_change
def _quantised(draw: random.Random, model: ModelProto, path: Path) -> str:
    plain = path.with_name("plain.onnx")
    onnx.save(model, plain)
    excluded = draw.choice(([], ["c1"], ["c2"], ["fc"]))
    way = draw.choice(("QDQ", "QOperator", "dynamic"))
    if way == "dynamic":
        quantize_dynamic(plain, path, nodes_to_exclude=excluded)
    else:
        reader, kind = _Reader(), getattr(QuantFormat, way)
        per_channel = draw.random() < 0.5
        quantize_static(
            plain, path, reader, quant_format=kind, per_channel=per_channel, nodes_to_exclude=excluded
        )
    return f"{way} without {excluded or 'exceptions'}"


@_change
def _opset(draw: random.Random, model: ModelProto, path: Path) -> str:
    version = draw.choice((-1, 0, 1, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 18, 19, 20, 21, 22, 23, 99, 2**40))
    model.opset_import[0].version = version
    if draw.random() < 0.2:
        del model.opset_import[:]
    elif draw.random() < 0.2:
        model.opset_import.append(helper.make_opsetid("", 17))
    return str(version)


@_change
def _ir_version(draw: random.Random, model: ModelProto, path: Path) -> str:
    model.ir_version = draw.choice((0, 1, 3, 4, 7, 10, 99))
    return str(model.ir_version)


@_change
def _shapes(draw: random.Random, model: ModelProto, path: Path) -> str:
    entry = draw.choice((*model.graph.input, *model.graph.output))
    kind = entry.type.tensor_type
    way = draw.choice(("none", "free", "-1", "0", "1", "4", "wrong", "no type", "other rank"))
    if way == "none":
        kind.ClearField("shape")
    elif way == "no type":
        entry.ClearField("type")
    elif way == "free":
        for axis in kind.shape.dim:
            axis.Clear()
    elif way == "other rank":
        kind.shape.dim.add().dim_value = 1
    elif way == "wrong":
        kind.shape.dim[-1].dim_value += 3
    else:
        kind.shape.dim[0].dim_value = int(way)
    return f"{entry.name} {way}"


@_change
def _names(draw: random.Random, model: ModelProto, path: Path) -> str:
    graph = model.graph
    way = draw.choice(("value", "value", "value", "node", "nodes", "nameless", "twice", "graph"))
    odd = draw.choice(_ODD_NAMES)
    if way == "value":
        old = draw.choice(("x", "r1", "a2", "y", "W2", "p"))
        rename(graph, old, odd or "empty")
        return f"{old} is called {odd[:40]!r}"
    if way == "node":
        draw.choice(graph.node).name = odd
    elif way == "graph":
        graph.name = odd
    else:
        for node in graph.node:
            node.name = {"nodes": odd, "nameless": "", "twice": node.op_type}[way]
    return f"{way} {odd[:40]!r}"


@_change
def _more_outputs(draw: random.Random, model: ModelProto, path: Path) -> str:
    ranks = {"x": 4, "a1": 4, "r1": 4, "a2": 4, "r2": 4, "p": 4, "f": 2, "W3": 2}
    names = draw.sample(sorted(ranks), k=draw.choice((1, 1, 3)))
    for name in names:
        sizes = [None] * ranks[name]
        model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes))
    return ", ".join(names)


@_change
def _wide(draw: random.Random, model: ModelProto, path: Path) -> str:
    """A layer with so many inputs or outputs that no matrix of their products fits into memory."""
    graph, width = model.graph, draw.choice((9_000, 20_000, 30_000))
    del graph.node[4:]
    way = draw.choice(("products", "kernel")) if width < 10_000 else "products"
    rng = np.random.default_rng(2)
    if way == "products":
        low = rng.standard_normal((_RANK, width)).astype(np.float32)
        shapes = {
            "V1": rng.standard_normal((32, _RANK)) @ low / 32,
            "V2": low.T @ rng.standard_normal((_RANK, 10)),
        }
        nodes = [
            helper.make_node("GlobalAveragePool", ["r2"], ["p"], "gap"),
            helper.make_node("Flatten", ["p"], ["f"], "flat"),
            helper.make_node("MatMul", ["f", "V1"], ["wide"], "widens"),
            helper.make_node("Tanh", ["wide"], ["t"], "tanh"),
            helper.make_node("MatMul", ["t", "V2"], ["y"], "narrows"),
        ]
    else:
        channels = width // 25 // 32 * 32
        kernel = rng.standard_normal((10, _RANK)) @ rng.standard_normal((_RANK, channels * 25))
        shapes = {"V": kernel.reshape(10, channels, 5, 5)}
        times = numpy_helper.from_array(np.array([1, channels // 32, 1, 1]), "times")
        graph.initializer.append(times)
        nodes = [
            helper.make_node("Tile", ["r2", "times"], ["wide"], "tile"),
            helper.make_node("Conv", ["wide", "V"], ["a3"], "c3", pads=[2] * 4),
            helper.make_node("GlobalAveragePool", ["a3"], ["p"], "gap"),
            helper.make_node("Flatten", ["p"], ["y"], "flat"),
        ]
    for name, value in shapes.items():
        scaled = (value * 2 / np.sqrt(_RANK * width)).astype(np.float32)
        graph.initializer.append(numpy_helper.from_array(scaled, name))
    graph.node.extend(nodes)
    return f"{way} of {width}"


@_change
def _subgraph(draw: random.Random, model: ModelProto, path: Path) -> str:
    """A choice between two branches, which capture a value before a ReLU and compute with a weight."""
    graph, name = model.graph, draw.choice(("a1", "a2", "r1", "r2"))
    graph.node.pop()
    weight = "W1" if name in ("a1", "r1") else "W2"
    channels = {"W1": 24, "W2": 32}[weight]
    graph.initializer.append(numpy_helper.from_array(np.zeros((channels, 10), np.float32), "zeros"))

    def branch(factor: float, kind: str) -> GraphProto:
        nodes = [
            helper.make_node("Constant", [], [f"{kind}_k"], value_float=factor),
            helper.make_node("Mul", [name, f"{kind}_k"], [f"{kind}_m"], f"{kind}_mul"),
            helper.make_node("GlobalAveragePool", [f"{kind}_m"], [f"{kind}_g"], f"{kind}_gap"),
            helper.make_node("Flatten", [f"{kind}_g"], [f"{kind}_f"], f"{kind}_flat"),
            helper.make_node("MatMul", [f"{kind}_f", "zeros"], [f"{kind}_z"], f"{kind}_zero"),
            helper.make_node("MatMul", ["f", "W3"], [f"{kind}_fc"], f"{kind}_fc"),
            helper.make_node("Add", [f"{kind}_fc", f"{kind}_z"], [f"{kind}_y"], f"{kind}_add"),
            helper.make_node("ReduceMean", [f"{kind}_f"], [f"{kind}_r"], f"{kind}_mean", axes=[1]),
            helper.make_node("Add", [f"{kind}_y", f"{kind}_r"], [f"{kind}_o"], f"{kind}_last"),
        ]
        result = helper.make_tensor_value_info(f"{kind}_o", TensorProto.FLOAT, None)
        return helper.make_graph(nodes, kind, [], [result])

    graph.initializer.append(numpy_helper.from_array(np.array(draw.random() < 0.5), "which"))
    node = helper.make_node(
        "If", ["which"], ["y"], "if", then_branch=branch(2.0, "then"), else_branch=branch(-1.0, "else")
    )
    graph.node.append(node)
    return f"branches capture {name}"


@_change
def _function(draw: random.Random, model: ModelProto, path: Path) -> str:
    graph, domain = model.graph, draw.choice(("mine", "mine", "com.microsoft"))
    name = draw.choice(("Block", "Conv"))
    body = [
        helper.make_node("Conv", ["a", "w", "b"], ["c"], "conv", pads=[1] * 4),
        helper.make_node("Relu", ["c"], ["o"], "relu"),
    ]
    if draw.random() < 0.15:
        body[1] = helper.make_node(name, ["c", "w", "b"], ["o"], "again", domain=domain)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(domain, 1)]
    model.functions.append(helper.make_function(domain, name, ["a", "w", "b"], ["o"], body, opsets))
    model.opset_import.append(helper.make_opsetid(domain, 1))
    kept = [
        helper.make_node(name, ["x", "W1", "b1"], ["r1"], "B1", domain=domain),
        helper.make_node(name, ["r1", "W2", "b2"], ["r2"], "B2", domain=domain),
        *graph.node[4:],
    ]
    del graph.node[:]
    graph.node.extend(kept)
    return f"{domain}.{name}" + (" calls itself" if body[1].op_type == name else "")


@_change
def _float16(draw: random.Random, model: ModelProto, path: Path) -> str:
    kept = draw.choice((set(), {"W2", "b2"}))
    for tensor in model.graph.initializer:
        if tensor.name not in kept:
            value = numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    for entry in (*model.graph.input, *model.graph.output):
        entry.type.tensor_type.elem_type = TensorProto.FLOAT16
    return "some" if kept else "all"


# Changes that break it.


@_change
def _damage(draw: random.Random, model: ModelProto, path: Path) -> str:
    content = bytearray(model.SerializeToString())
    way = draw.choice(("cut", "flipped", "empty", "zeros", "longer", "text"))
    if way == "cut":
        del content[draw.randrange(len(content)) :]
    elif way == "flipped":
        for _ in range(draw.choice((1, 20))):
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    elif way == "zeros":
        start = draw.randrange(len(content))
        content[start : start + 64] = bytes(len(content[start : start + 64]))
    elif way == "longer":
        content += draw.randbytes(500)
    else:
        content[:] = b"" if way == "empty" else b"this is no model\n" * 20
    path.write_bytes(content)
    return way


@_change
def _weights(draw: random.Random, model: ModelProto, path: Path) -> str:
    tensor = draw.choice(model.graph.initializer)
    value, name = numpy_helper.to_array(tensor), tensor.name
    changes: dict[str, Callable[[], Any]] = {
        "nan": lambda: np.full_like(value, np.nan),
        "inf": lambda: np.full_like(value, np.inf),
        "huge": lambda: np.full_like(value, 3e38),
        "zero": lambda: np.zeros_like(value),
        "double": lambda: value.astype(np.float64),
        "whole": lambda: value.astype(np.int64),
        "flat": lambda: value.reshape(-1),
        "fewer": lambda: value[:-1],
        "none": lambda: value[:0],
    }
    way = draw.choice((*changes, "short", "claims more", "outside", "missing", "twice", "input", "sparse"))
    if way in changes:
        tensor.CopyFrom(numpy_helper.from_array(changes[way](), name))
    elif way == "short":
        tensor.raw_data = tensor.raw_data[: len(tensor.raw_data) // 2]
    elif way == "claims more":
        tensor.dims[0] = draw.choice((-1, 0, 2**40, tensor.dims[0] * 2))
    elif way == "outside":
        place = draw.choice(("weights.bin", "../../../etc/passwd", "/etc/passwd", "", "net.onnx"))
        onnx.external_data_helper.set_external_data(tensor, location=place)
        tensor.ClearField("raw_data")
    elif way == "missing":
        model.graph.initializer.remove(tensor)
    elif way == "twice":
        model.graph.initializer.append(tensor)
    elif way == "input":
        model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, value.shape))
    else:
        places = np.arange(value.size, dtype=np.int64)
        sparse = helper.make_sparse_tensor(
            numpy_helper.from_array(value.reshape(-1), name),
            numpy_helper.from_array(places, f"{name}_places"),
            value.shape,
        )
        model.graph.initializer.remove(tensor)
        model.graph.sparse_initializer.append(sparse)
    return f"{name} {way}"


@_change
def _nodes(draw: random.Random, model: ModelProto, path: Path) -> str:
    graph = model.graph
    node: NodeProto = draw.choice(graph.node)
    way = draw.choice(
        ("unsorted", "cycle", "unknown", "missing", "dead", "same output", "no input", "attribute")
    )
    if way == "unsorted":
        turned = list(reversed(graph.node))
        del graph.node[:]
        graph.node.extend(turned)
    elif way == "cycle":
        graph.node[0].input[0] = "r2"
    elif way == "unknown":
        node.op_type = "Nothing"
    elif way == "missing":
        graph.node.remove(node)
    elif way == "dead":
        graph.node.append(helper.make_node("Conv", ["x", "W1", "b1"], ["dead"], "dead_end"))
    elif way == "same output":
        graph.node.append(helper.make_node("Relu", ["p"], ["r1"], "another"))
    elif way == "no input":
        del graph.input[:]
    else:
        attribute = draw.choice(("pads", "group", "strides", "axis", "nothing"))
        node.attribute.append(helper.make_attribute(attribute, draw.choice(([0, 0], 7, -1, [1, 1, 1, 1]))))
    return f"{way} {node.name}"


class _Reader(CalibrationDataReader):  # type: ignore[misc]
    """A few inputs for onnxruntime's quantiser."""

    def __init__(self) -> None:
        self._feeds = iter([{"x": right_inputs()[:8]}])

    def get_next(self) -> Any:
        return next(self._feeds, None)


def rename(graph: GraphProto, old: str, new: str) -> None:
    for node in graph.node:
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                if name == old:
                    names[index] = new
    for entry in (*graph.input, *graph.output, *graph.initializer):
        if entry.name == old:
            entry.name = new


def _changed_inputs(draw: random.Random, inputs: dict[str, Any]) -> str:
    x = inputs.pop("x")
    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "none": lambda: {"x": x[:0]},
        "one": lambda: {"x": x[:1]},
        "two": lambda: {"x": x[:2]},
        "nan": lambda: {"x": np.where(np.arange(len(x))[:, None, None, None] == 3, np.nan, x)},
        "infinite": lambda: {"x": np.full_like(x, np.inf)},
        "equal": lambda: {"x": np.repeat(x[:1], len(x), 0)},
        "zero": lambda: {"x": np.zeros_like(x)},
        "huge": lambda: {"x": x * np.float32(1e30)},
        "bytes": lambda: {"x": (x * 40 + 120).clip(0, 255).astype(np.uint8)},
        "double": lambda: {"x": x.astype(np.float64)},
        "flat": lambda: {"x": x.reshape(len(x), -1)},
        "another": lambda: {"x": x, "labels": np.zeros(len(x))},
        "other name": lambda: {"images": x},
        "two others": lambda: {"images": x, "labels": np.zeros(len(x))},
    }
    way = draw.choice(sorted(ways))
    inputs.update(ways[way]())
    return f"inputs {way}"
