"""Oracles and helpers of the optimizer tests."""

from collections.abc import Callable, Sequence

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

DOMAIN = "ai.onnx.preview.training"
ONNX_TYPES = {
    np.dtype(np.float32): onnx.TensorProto.FLOAT,
    np.dtype(np.float64): onnx.TensorProto.DOUBLE,
    np.dtype(np.int64): onnx.TensorProto.INT64,
}

Lists = list[list[np.ndarray]]


def _run_node(kind: str, inputs: list[np.ndarray], tensors: int, attributes: dict[str, float]) -> Lists:
    names = [f"input_{i}" for i in range(len(inputs))]
    order = [
        *range(2, 2 + tensors),
        *range(2 + 2 * tensors, len(inputs)),
    ]  # X, V, H: what the results replace
    results = [f"new_{i}" for i in order]
    node = helper.make_node(kind, names, results, domain=DOMAIN, **attributes)
    infos = [
        helper.make_tensor_value_info(name, ONNX_TYPES[array.dtype], array.shape)
        for name, array in zip(names, inputs, strict=True)
    ]
    outputs = [
        helper.make_tensor_value_info(name, ONNX_TYPES[inputs[i].dtype], inputs[i].shape)
        for name, i in zip(results, order, strict=True)
    ]
    graph = helper.make_graph([node], kind, infos, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid(DOMAIN, 1)], ir_version=7)
    onnx.checker.check_model(model)
    found = ReferenceEvaluator(model).run(None, dict(zip(names, inputs, strict=True)))
    # the evaluator lets its float64 rate promote X_new: the graph declares X's own type
    typed = [np.asarray(array, dtype=inputs[i].dtype) for array, i in zip(found, order, strict=True)]
    return [typed[i : i + tensors] for i in range(0, len(typed), tensors)]


@pytest.fixture(scope="session")
def run_reference() -> Callable[..., Lists]:
    """onnx's reference evaluator: operator, R, T, [X's, G's, (V's,) H's], attributes to new X's, V's, H's."""

    def run(
        kind: str, rate: np.ndarray, count: int, lists: Lists, attributes: dict[str, float] | None = None
    ) -> Lists:
        t = np.array(count, dtype=np.int64)
        if lists[0][0].dtype == np.float32:
            inputs = [rate, t, *(array for arrays in lists for array in arrays)]
            return _run_node(kind, inputs, len(lists[0]), attributes or {})
        # one by one, because the evaluator rounds the results of several float64 tensors to float32
        each = [
            _run_node(kind, [rate, t, *arrays], 1, attributes or {}) for arrays in zip(*lists, strict=True)
        ]
        return [[result[role][0] for result in each] for role in range(len(each[0]))]

    return run


@pytest.fixture(scope="session")
def make_params() -> Callable[..., list[nn.Parameter]]:
    """Random parameters of some shapes, with random gradients."""

    def make(
        shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> list[nn.Parameter]:
        generator = torch.Generator().manual_seed(seed)
        params = []
        for shape in shapes:
            param = nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype))
            param.grad = torch.randn(shape, generator=generator, dtype=dtype)
            params.append(param)
        return params

    return make


@pytest.fixture(scope="session")
def clone_params() -> Callable[[Sequence[Tensor]], list[nn.Parameter]]:
    """Parameters of the same values and gradients that share nothing."""

    def clone(params: Sequence[Tensor]) -> list[nn.Parameter]:
        clones = []
        for param in params:
            copy = nn.Parameter(param.detach().clone())
            copy.grad = None if param.grad is None else param.grad.clone()
            clones.append(copy)
        return clones

    return clone
