"""Write an optimizer's step as an ONNX model of ai.onnx.preview.training operators, and read it back.

Each param group becomes one node. For the group number i and a parameter NAME (its name in the optimizer, or
`group.index` where the optimizer was given none) the model has

- inputs `R_i` (the learning rate, a double scalar), `T_i` (the update count, an int64 scalar), `NAME.X` (the
  parameter), `NAME.G` (its gradient) and the accumulators `NAME.V` (Adam only) and `NAME.H`;
- outputs `NAME.X_new`, `NAME.V_new` (Adam only) and `NAME.H_new`, to be fed as the inputs without `_new` at
  the next step, where `T_i` is one more.

The learning rate is a double because Python's and torch's schedules are; it need not lose digits on the way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper
from torch import Tensor

from optim.optimizers import OnnxAdagrad, OnnxAdam, OnnxOptimizer

DOMAIN = "ai.onnx.preview.training"
DOMAIN_VERSION = 1
# The domain came with ONNX 1.7, whose IR version is 7: every reader that knows the domain accepts it.
IR_VERSION = 7

_OPTIMIZERS: dict[str, type[OnnxOptimizer]] = {cls.operator: cls for cls in (OnnxAdam, OnnxAdagrad)}
_ELEMENT_TYPES = {torch.float32: onnx.TensorProto.FLOAT, torch.float64: onnx.TensorProto.DOUBLE}


@dataclass(frozen=True)
class StepNode:
    """An operator of a step model, as `read_step_model` finds it.

    Attributes:
        operator: "Adam" or "Adagrad".
        attributes: Every attribute, those that the node leaves out at the operator's defaults.
        shapes: The shapes of the tensors it updates, in order.
    """

    operator: str
    attributes: dict[str, float]
    shapes: list[tuple[int, ...]]


def build_step_model(optimizer: OnnxOptimizer) -> onnx.ModelProto:
    """Write one step of an optimizer as a model, one operator for each param group.

    Args:
        optimizer: The optimizer; its options, names, shapes and dtypes are used, its state is not.

    Returns:
        A checked model with the inputs and outputs that the module's docstring names.

    Raises:
        TypeError: If it is not an OnnxAdam or OnnxAdagrad.
        ValueError: If a group is empty or maximizes, or two parameters share a name.
    """
    if not isinstance(optimizer, OnnxOptimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}: give an OnnxAdam or OnnxAdagrad")
    nodes, inputs, outputs = [], [], []
    names = _parameter_names(optimizer)
    for i, group in enumerate(optimizer.param_groups):
        if not group["params"]:
            raise ValueError(f"param group {i} is empty, and an operator needs a tensor: remove the group")
        if group["maximize"]:
            raise ValueError(
                f"param group {i} has maximize=True, and {optimizer.operator} only descends: build the model "
                "with maximize=False and feed negated gradients"
            )
        inputs.append(helper.make_tensor_value_info(f"R_{i}", onnx.TensorProto.DOUBLE, []))
        inputs.append(helper.make_tensor_value_info(f"T_{i}", onnx.TensorProto.INT64, []))
        tensors = list(zip(names[i], group["params"], strict=True))
        sources = [
            helper.make_tensor_value_info(f"{name}.{role}", _ELEMENT_TYPES[param.dtype], param.shape)
            for role in ("X", "G", *optimizer.accumulators)
            for name, param in tensors
        ]
        results = [
            helper.make_tensor_value_info(f"{name}.{role}_new", _ELEMENT_TYPES[param.dtype], param.shape)
            for role in ("X", *optimizer.accumulators)
            for name, param in tensors
        ]
        node = helper.make_node(
            optimizer.operator,
            [f"R_{i}", f"T_{i}", *(info.name for info in sources)],
            [info.name for info in results],
            name=f"{optimizer.operator}_{i}",
            domain=DOMAIN,
        )
        for name, check in optimizer.attributes.items():
            node.attribute.append(helper.make_attribute(name, check(name, group[name])))
        nodes.append(node)
        inputs += sources
        outputs += results
    graph = helper.make_graph(nodes, f"{optimizer.operator}_step", inputs, outputs)
    opsets = [helper.make_opsetid(DOMAIN, DOMAIN_VERSION)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="optim")
    onnx.checker.check_model(model)
    return model


def step_inputs(optimizer: OnnxOptimizer) -> dict[str, np.ndarray]:
    """Return the inputs with which the step model does what `optimizer.step()` would do now.

    Args:
        optimizer: The optimizer that the model was built from, every parameter with its gradient.

    Returns:
        Copies of the learning rates, the next update counts, parameters, gradients and accumulators, by the
        names of the model's inputs.

    Raises:
        ValueError: If a parameter has no gradient, or those of a group have done different numbers of
            updates: an operator updates all its tensors, with one update count.
    """
    feed: dict[str, np.ndarray] = {}
    for i, (names, group) in enumerate(zip(_parameter_names(optimizer), optimizer.param_groups, strict=True)):
        steps = set()
        for name, param in zip(names, group["params"], strict=True):
            if param.grad is None:
                raise ValueError(
                    f"parameter {name} has no gradient, and the operator updates all: leave it out"
                )
            state = optimizer.state.get(param, {})
            steps.add(int(state["step"]) if state else 0)
            feed[f"{name}.X"] = _array(param)
            feed[f"{name}.G"] = _array(param.grad)
            for role in optimizer.accumulators:
                feed[f"{name}.{role}"] = _array(state[role]) if state else np.zeros_like(feed[f"{name}.X"])
        if len(steps) != 1:
            raise ValueError(
                f"the parameters of group {i} have done {sorted(steps)} updates, and an operator has one "
                "update count: put parameters that are unfrozen later into a group of their own"
            )
        feed[f"R_{i}"] = np.array(float(group["lr"]), dtype=np.float64)
        feed[f"T_{i}"] = np.array(group["first_update_count"] + steps.pop(), dtype=np.int64)
    return feed


def read_step_model(model: onnx.ModelProto) -> list[StepNode]:
    """Return the Adam and Adagrad operators of a model, in its order.

    Args:
        model: A model with nodes of ai.onnx.preview.training; others (a training graph's) are passed over.

    Raises:
        ValueError: If it has no such node, or the shape of a tensor that a node updates is not known.
    """
    infos = [*model.graph.input, *model.graph.value_info, *model.graph.output]
    shapes = {info.name: _static_shape(info) for info in infos}
    shapes |= {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    nodes = []
    for node in model.graph.node:
        if node.domain != DOMAIN or node.op_type not in _OPTIMIZERS:
            continue
        schema = onnx.defs.get_schema(node.op_type, DOMAIN_VERSION, DOMAIN)
        attributes = {name: item.default_value.f for name, item in schema.attributes.items()}
        attributes |= {attribute.name: attribute.f for attribute in node.attribute}
        roles = 2 + len(_OPTIMIZERS[node.op_type].accumulators)
        tensors = node.input[2 : 2 + (len(node.input) - 2) // roles]
        unknown = [name for name in tensors if shapes.get(name) is None]
        if unknown:
            raise ValueError(
                f"node {node.name or node.op_type}: the shape of {', '.join(unknown)} is not known; run "
                "onnx.shape_inference.infer_shapes on the model first"
            )
        nodes.append(StepNode(node.op_type, attributes, [shapes[name] or () for name in tensors]))
    if not nodes:
        raise ValueError(f"the model has no {' or '.join(_OPTIMIZERS)} node of the domain {DOMAIN}")
    return nodes


def optimizer_from_model(
    model: onnx.ModelProto, params: Iterable[Tensor] | Iterable[dict[str, Any]], **options: Any
) -> OnnxOptimizer:
    """Make an optimizer with the attributes of a step model's operators.

    Args:
        model: The model, all its training operators of one kind.
        params: The parameters of its only node, or one param group (a dict with "params") for each node.
        **options: What a model does not hold: `lr`, `first_update_count`, `foreach`, `capturable`. They can
            be given in the param groups, too.

    Returns:
        An OnnxAdam or OnnxAdagrad with a fresh state.

    Raises:
        ValueError: If the operators are of two kinds, the numbers of groups, parameters or their shapes
            differ from the model's, or an attribute is given that the model holds.
    """
    nodes = read_step_model(model)
    operators = {node.operator for node in nodes}
    if len(operators) != 1:
        raise ValueError(
            f"the model mixes {' and '.join(sorted(operators))}, and an optimizer does one of them"
        )
    items = list(params)
    groups = [item if isinstance(item, dict) else None for item in items]
    named = [dict(group) for group in groups if group is not None]
    if not named:
        named = [{"params": items}]
    elif len(named) != len(items):
        raise ValueError("params mixes parameters and param groups: give one kind")
    if len(named) != len(nodes):
        raise ValueError(
            f"params holds {len(named)} group(s), the model {len(nodes)} node(s): give one group for each"
        )
    for i, (node, group) in enumerate(zip(nodes, named, strict=True)):
        group["params"] = list(group["params"])
        twice = [name for name in node.attributes if name in group or name in options]
        if twice:
            raise ValueError(f"{', '.join(twice)}: given for group {i}, and the model holds it; leave it out")
        shapes = [tuple((item[1] if isinstance(item, tuple) else item).shape) for item in group["params"]]
        if shapes != node.shapes:
            raise ValueError(f"params of group {i} have shapes {shapes}, the model's node has {node.shapes}")
        group.update(node.attributes)
    return _OPTIMIZERS[operators.pop()](named, **options)


def _parameter_names(optimizer: OnnxOptimizer) -> list[list[str]]:
    names = [
        list(group.get("param_names", [f"{i}.{j}" for j in range(len(group["params"]))]))
        for i, group in enumerate(optimizer.param_groups)
    ]
    seen: set[str] = set()
    for name in (name for group in names for name in group):
        if name in seen:
            raise ValueError(
                f"two parameters are named {name}: give the optimizer's parameters different names"
            )
        seen.add(name)
    return names


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy().copy()


def _static_shape(info: onnx.ValueInfoProto) -> tuple[int, ...] | None:
    if not info.type.tensor_type.HasField("shape"):
        return None
    dimensions = info.type.tensor_type.shape.dim
    known = all(dimension.HasField("dim_value") for dimension in dimensions)
    return tuple(dimension.dim_value for dimension in dimensions) if known else None
