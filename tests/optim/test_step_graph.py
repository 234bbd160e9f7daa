"""The ONNX model of a step continues a PyTorch run, and is read back."""

from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from onnx.reference import ReferenceEvaluator
from torch import nn

from optim import (
    OnnxAdagrad,
    OnnxAdam,
    OnnxOptimizer,
    build_step_model,
    optimizer_from_model,
    read_step_model,
    step_inputs,
)

OPTIONS = {
    OnnxAdam: {"norm_coefficient": 1e-3, "norm_coefficient_post": 1e-4, "alpha": 0.95, "epsilon": 1e-5},
    OnnxAdagrad: {"norm_coefficient": 1e-3, "decay_factor": 0.05, "epsilon": 1e-5},
}
CLASSES = list(OPTIONS)


class Network(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.hidden = nn.Linear(4, 8, dtype=dtype)
        self.output = nn.Linear(8, 1, dtype=dtype)
        for param in self.parameters():
            nn.init.normal_(param, std=0.5, generator=generator)
        self.inputs = torch.randn(32, 4, generator=generator, dtype=dtype)
        self.targets = self.inputs.sum(1, keepdim=True).sin()

    def compute_gradients(self) -> None:
        self.zero_grad()
        (self.output(self.hidden(self.inputs).tanh()) - self.targets).square().mean().backward()


def groups_of(network: Network, each_parameter: bool) -> list[dict]:
    """Two groups with options of their own, or one group for each parameter."""
    if each_parameter:
        return [{"params": [named]} for named in network.named_parameters()]
    hidden = [(f"hidden.{name}", param) for name, param in network.hidden.named_parameters()]
    output = [(f"output.{name}", param) for name, param in network.output.named_parameters()]
    return [{"params": hidden}, {"params": output, "lr": 0.02, "norm_coefficient": 0.0}]


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("first_update_count", [0, 1])
@pytest.mark.parametrize(
    # the evaluator rounds several float64 tensors of a node to float32: in float64 each has its own node
    ("dtype", "each_parameter", "tolerance"),
    [(torch.float32, False, 2e-6), (torch.float64, True, 1e-14)],
)
def test_the_graph_continues_a_pytorch_run_where_it_stopped(
    cls: type[OnnxOptimizer],
    first_update_count: int,
    dtype: torch.dtype,
    each_parameter: bool,
    tolerance: float,
) -> None:
    before, after = 7, 6
    network = Network(dtype)
    options = {"lr": 0.01, "first_update_count": first_update_count, **OPTIONS[cls]}
    optimizer = cls(groups_of(network, each_parameter), **options)
    for _ in range(before):
        network.compute_gradients()
        optimizer.step()
    model = build_step_model(optimizer)
    evaluator = ReferenceEvaluator(model)
    names = [output.name for output in model.graph.output]
    types = {
        info.name: helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
        for info in model.graph.output
    }

    continued = Network(dtype)
    network.compute_gradients()
    feed = step_inputs(optimizer)
    for _ in range(after):
        for name, param in continued.named_parameters():
            param.data = torch.from_numpy(feed[f"{name}.X"].copy())
        continued.compute_gradients()
        feed |= {f"{name}.G": param.grad.numpy() for name, param in continued.named_parameters()}
        results = dict(zip(names, evaluator.run(None, feed), strict=True))
        feed |= {name.removesuffix("_new"): array.astype(types[name]) for name, array in results.items()}
        feed |= {name: np.array(array + 1) for name, array in feed.items() if name.startswith("T_")}

        network.compute_gradients()
        optimizer.step()
    wanted = step_inputs(optimizer)
    assert feed.keys() == wanted.keys()
    for name in feed:
        if not name.endswith(".G"):
            assert feed[name].dtype == wanted[name].dtype
            np.testing.assert_allclose(feed[name], wanted[name], rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_graph_step_is_within_a_few_units_in_the_last_place(
    cls: type[OnnxOptimizer], dtype: torch.dtype, make_params: Callable
) -> None:
    params = make_params([(64, 9)], dtype)
    optimizer = cls(params, lr=0.01, **OPTIONS[cls])
    for _ in range(3):
        optimizer.step()
    outputs = ReferenceEvaluator(build_step_model(optimizer)).run(None, step_inputs(optimizer))
    optimizer.step()
    state = optimizer.state[params[0]]
    tensors = [params[0].detach(), *(state[name] for name in cls.accumulators)]
    for array, tensor in zip(outputs, tensors, strict=True):
        units = np.abs(array - tensor.numpy()) / np.spacing(np.abs(array).max().astype(tensor.numpy().dtype))
        assert units.max() <= 2


@pytest.mark.parametrize("cls", CLASSES)
def test_a_model_has_one_operator_per_group_and_passes_the_checker(cls: type[OnnxOptimizer]) -> None:
    network = Network(torch.float32)
    model = build_step_model(cls(groups_of(network, False), **OPTIONS[cls]))
    onnx.checker.check_model(model, full_check=True)
    assert [(node.op_type, node.domain) for node in model.graph.node] == [
        (cls.operator, "ai.onnx.preview.training")
    ] * 2
    inputs = [info.name for info in model.graph.input]
    roles = ("X", "G", *cls.accumulators)
    hidden = [f"hidden.{name}.{role}" for role in roles for name in ("weight", "bias")]
    assert inputs[: len(hidden) + 2] == ["R_0", "T_0", *hidden]
    types = {info.name: info.type.tensor_type.elem_type for info in model.graph.input}
    assert types["R_0"] == onnx.TensorProto.DOUBLE
    assert types["T_0"] == onnx.TensorProto.INT64


@pytest.mark.parametrize("cls", CLASSES)
def test_a_model_read_back_makes_the_same_optimizer(cls: type[OnnxOptimizer]) -> None:
    network = Network(torch.float32)
    optimizer = cls(groups_of(network, False), lr=0.3, **OPTIONS[cls])
    model = onnx.load_from_string(build_step_model(optimizer).SerializeToString())
    groups = [
        {"params": group["params"], "lr": group["lr"]}
        for group in groups_of(network, False)
        for group in [{"lr": 0.3, **group}]
    ]
    restored = optimizer_from_model(model, groups)
    assert type(restored) is cls
    for ours, theirs in zip(optimizer.param_groups, restored.param_groups, strict=True):
        assert all(theirs[name] == ours[name] for name in ours if name != "params")
        assert all(a is b for a, b in zip(ours["params"], theirs["params"], strict=True))


def test_attributes_a_node_leaves_out_are_read_at_the_operators_defaults(make_params: Callable) -> None:
    params = make_params([(2, 3)])
    model = build_step_model(OnnxAdam(params, alpha=0.5))
    del model.graph.node[0].attribute[:]
    [node] = read_step_model(model)
    assert node.shapes == [(2, 3)]
    assert node.attributes == {name: OnnxAdam(params).defaults[name] for name in OnnxAdam.attributes}
    assert optimizer_from_model(model, params, lr=0.25).param_groups[0]["lr"] == 0.25


def test_other_nodes_of_a_training_graph_are_passed_over(make_params: Callable) -> None:
    params = make_params([(2,)])
    model = build_step_model(OnnxAdagrad(params, decay_factor=0.5))
    model.graph.node.append(helper.make_node("Identity", ["0.0.X"], ["copy"]))
    assert [node.operator for node in read_step_model(model)] == ["Adagrad"]


def test_what_the_operators_cannot_do_is_refused(make_params: Callable) -> None:
    params = make_params([(2,), (3,)])
    with pytest.raises(TypeError, match="optimizer is a SGD"):
        build_step_model(torch.optim.SGD(params))
    with pytest.raises(ValueError, match="maximize=True"):
        build_step_model(OnnxAdam(params, maximize=True))
    with pytest.raises(ValueError, match="param group 1 is empty"):
        build_step_model(OnnxAdam([{"params": params}, {"params": []}]))
    named = [{"params": [("w", params[0])]}, {"params": [("w", params[1])]}]
    with pytest.raises(ValueError, match="two parameters are named w"):
        build_step_model(OnnxAdam(named))


def test_inputs_need_every_gradient_and_one_update_count(make_params: Callable) -> None:
    params = make_params([(2,), (3,)])
    gradient, params[1].grad = params[1].grad, None
    optimizer = OnnxAdam(params)
    optimizer.step()
    with pytest.raises(ValueError, match=r"parameter 0\.1 has no gradient"):
        step_inputs(optimizer)
    params[1].grad = gradient
    with pytest.raises(ValueError, match=r"group 0 have done \[0, 1\] updates"):
        step_inputs(optimizer)


def test_inputs_are_copies(make_params: Callable) -> None:
    params = make_params([(2,)])
    optimizer = OnnxAdam(params)
    optimizer.step()
    feed = step_inputs(optimizer)
    before = {name: array.copy() for name, array in feed.items()}
    optimizer.step()
    assert all(np.array_equal(feed[name], before[name]) for name in feed)


def test_a_model_that_does_not_fit_is_refused(make_params: Callable) -> None:
    params = make_params([(2,), (3,)])
    model = build_step_model(OnnxAdam(params))
    with pytest.raises(ValueError, match=r"group 0 have shapes \[\(2,\)\]"):
        optimizer_from_model(model, params[:1])
    with pytest.raises(ValueError, match=r"2 group\(s\), the model 1 node"):
        optimizer_from_model(model, [{"params": params[:1]}, {"params": params[1:]}])
    with pytest.raises(ValueError, match="alpha: given for group 0"):
        optimizer_from_model(model, params, alpha=0.5)
    with pytest.raises(ValueError, match="mixes parameters and param groups"):
        optimizer_from_model(model, [params[0], {"params": params[1:]}])
    mixed = build_step_model(OnnxAdam(params))
    mixed.graph.node.extend(build_step_model(OnnxAdagrad(params)).graph.node)
    with pytest.raises(ValueError, match="mixes Adagrad and Adam"):
        optimizer_from_model(mixed, params)
    empty = helper.make_model(helper.make_graph([], "empty", [], []))
    with pytest.raises(ValueError, match="no Adam or Adagrad node"):
        read_step_model(empty)
    del model.graph.input[2:]
    with pytest.raises(ValueError, match=r"the shape of 0\.0\.X, 0\.1\.X is not known"):
        read_step_model(model)
