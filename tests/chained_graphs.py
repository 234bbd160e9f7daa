"""Chains of small nodes whose values are outputs too, or are read in bodies of control flow."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

Array = np.ndarray

onnxruntime.set_default_logger_severity(3)

X = np.random.default_rng(0).standard_normal((24, 4, 6, 6)).astype(np.float32)
YES = {"yes": np.array(True)}
SHAPE = (TensorProto.FLOAT, ["n", 4, 6, 6])
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

    def capture(self, value: str, op_type: str = "If") -> None:
        """Let the body of an If, which says yes, hand a value on, or that of a Loop add it to x twice."""
        name = f"captured_{value}"
        self.outputs.append(name)
        if op_type == "Loop":
            self._loop(value, name)
            return
        ways = [
            helper.make_graph(
                [helper.make_node(kind, [value], [f"{way}_{name}"], f"{way}_{name}")],
                way,
                [],
                [helper.make_tensor_value_info(f"{way}_{name}", *SHAPE)],
            )
            for way, kind in (("then", "Identity"), ("else", "Neg"))
        ]
        self.nodes.append(
            helper.make_node("If", ["yes"], [name], name, then_branch=ways[0], else_branch=ways[1])
        )

    def _loop(self, value: str, name: str) -> None:
        self.constants["twice"] = np.array(2, np.int64)
        kinds = {"turn": (TensorProto.INT64, []), "on": (TensorProto.BOOL, []), "sum": SHAPE}
        ends = {"goes_on": (TensorProto.BOOL, []), "new_sum": SHAPE}
        steps = [
            helper.make_node("Identity", [f"on_{name}"], [f"goes_on_{name}"], f"on_{name}"),
            helper.make_node("Add", [f"sum_{name}", value], [f"new_sum_{name}"], f"sum_{name}"),
        ]
        body = helper.make_graph(
            steps,
            "body",
            *(
                [helper.make_tensor_value_info(f"{each}_{name}", *kind) for each, kind in values.items()]
                for values in (kinds, ends)
            ),
        )
        self.nodes.append(helper.make_node("Loop", ["twice", "", "x"], [name], name, body=body))

    def model(self) -> onnx.ModelProto:
        kinds = {"x": SHAPE, "yes": (TensorProto.BOOL, [])}
        inputs = [helper.make_tensor_value_info(name, *kind) for name, kind in kinds.items()]
        outputs = dict.fromkeys([self.values[-1], *self.outputs])
        graph = helper.make_graph(
            self.nodes,
            "chain",
            inputs,
            [helper.make_tensor_value_info(name, *SHAPE) for name in outputs],
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


def assert_alike(model: onnx.ModelProto, rounded: onnx.ModelProto, feed: Mapping[str, Array]) -> None:
    before, after = run(model, feed), run(rounded, feed)
    assert list(before) == list(after)
    for name, expected in before.items():
        error = float(np.linalg.norm(after[name] - expected) / np.linalg.norm(expected))
        assert error <= 0.1, (name, error)
