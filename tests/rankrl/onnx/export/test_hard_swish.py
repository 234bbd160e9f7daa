"""Hard swishes become a table of integers and a product; their chains in older files are found."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator

from rankrl.onnx.export import quantise_onnx
from rankrl.onnx.export.integer_nodes import join_hard_swishes

CHAINS = {
    "divided last": "a = Add(x, three)\nc = Clip(a, zero, six)\np = Mul(x, c)\ny = Div(p, six)",
    "multiplied last": "a = Add(three, x)\nc = Clip(a, zero, six)\np = Mul(c, x)\ny = Mul(sixth, p)",
    "gate divided": "a = Add(x, three)\nc = Clip(a, zero, six)\ng = Div(c, six)\ny = Mul(g, x)",
    "gate multiplied": "a = Add(x, three)\nc = Clip(a, zero, six)\ng = Mul(c, sixth)\ny = Mul(x, g)",
}
OTHERS = {
    "another divisor": "a = Add(x, three)\nc = Clip(a, zero, six)\np = Mul(x, c)\ny = Div(p, three)",
    "another factor": "a = Add(x, three)\nc = Clip(a, zero, six)\np = Mul(a, c)\ny = Div(p, six)",
    "the reciprocal": "a = Add(x, three)\nc = Clip(a, zero, six)\np = Mul(x, c)\ny = Div(six, p)",
    "no lower end": "a = Add(x, three)\nc = Clip(a, , six)\np = Mul(x, c)\ny = Div(p, six)",
}
NUMBERS = "float three = {3.0}, float six = {6.0}, float zero = {0.0}, float sixth = {0.16666667}"


def graph(body: str) -> onnx.ModelProto:
    text = f"""<ir_version: 8, opset_import: ["" : 14]>
    small (float[n,4] x) => (float[n,4] y) <{NUMBERS}> {{
    {body}
    }}"""
    model = onnx.parser.parse_model(text)
    onnx.checker.check_model(model, full_check=True)
    return model


def values() -> np.ndarray:
    return np.random.default_rng(0).uniform(-5, 5, (50, 4)).astype(np.float32)


@pytest.mark.parametrize("chain", CHAINS)
def test_chains_are_joined(chain: str) -> None:
    model = graph(CHAINS[chain])
    (expected,) = ReferenceEvaluator(model).run(None, {"x": values()})
    rewritten = ir.from_proto(model)
    assert join_hard_swishes(rewritten) == 1
    assert [node.op_type for node in rewritten.graph] == ["HardSigmoid", "Mul"]
    (found,) = ReferenceEvaluator(ir.to_proto(rewritten)).run(None, {"x": values()})
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("other", OTHERS)
def test_what_is_no_hard_swish_stays(other: str) -> None:
    rewritten = ir.from_proto(graph(OTHERS[other]))
    assert join_hard_swishes(rewritten) == 0
    assert len(rewritten.graph) == 4


@pytest.mark.parametrize(
    "body", ["s = HardSwish(h)", "g = HardSigmoid<alpha = 0.3, beta = 0.4>(h)\ns = Mul(h, g)"]
)
def test_between_integers_it_computes_in_integers(body: str, tmp_path: Path) -> None:
    plain, rounded, loaded = (tmp_path / f"{name}.onnx" for name in ("plain", "rounded", "loaded"))
    text = f"""<ir_version: 8, opset_import: ["" : 14]>
    small (float[n,4,8,8] x) => (float[n,6,8,8] y) {{
    h = Conv(x, v)
    {body}
    y = Conv(s, w)
    }}"""
    model, random = onnx.parser.parse_model(text), np.random.default_rng(0)
    for name, shape in (("v", (8, 4, 1, 1)), ("w", (6, 8, 1, 1))):
        drawn = 2 * random.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(drawn, name))
    onnx.save(model, plain)
    inputs = random.standard_normal((64, 4, 8, 8)).astype(np.float32)
    quantise_onnx(plain, rounded, [inputs], weights=["v", "w"])
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(loaded)
    (found,) = onnxruntime.InferenceSession(rounded, options).run(None, {"x": inputs})
    (exact,) = onnxruntime.InferenceSession(plain).run(None, {"x": inputs})
    kinds = Counter(node.op_type for node in onnx.load(loaded).graph.node)
    assert kinds["QLinearLeakyRelu"] == kinds["QLinearMul"] == 1
    assert not {"HardSigmoid", "HardSwish", "Mul"} & set(kinds)
    assert np.mean((found - exact) ** 2) < 1e-3 * exact.var()
