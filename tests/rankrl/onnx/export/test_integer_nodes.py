"""Which operators compute in integers, as onnxruntime itself tells by the graph that it loads."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import nn

from rankrl.onnx.export import export_onnx, quantise_onnx
from rankrl.onnx.export.int8 import integer_nodes, join_hard_swishes, pool_means

SHAPE = (8, 10, 10)


class Block(nn.Module):
    """A block of mobile networks: depthwise, activated, gated by its means, added to what came in."""

    def __init__(self, activation: Callable[[], nn.Module], gate: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.expand, self.depthwise = nn.Conv2d(8, 16, 1), nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(16, 4, 1), nn.ReLU(), nn.Conv2d(4, 16, 1), gate()
        )
        self.project, self.activation = nn.Conv2d(16, 8, 1), activation()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.activation(self.depthwise(self.activation(self.expand(x))))
        return x + self.project(inner * self.gate(inner))


def written(network: nn.Module, folder: Path) -> tuple[Path, Path]:
    torch.manual_seed(0)
    plain, target = folder / "plain.onnx", folder / "integers.onnx"
    export_onnx(network.eval(), plain, SHAPE)
    graph = ir.load(plain).graph
    products = [node for node in graph if node.op_type in ("Conv", "Gemm")]
    weights = {str(node.inputs[1].name) for node in products if node.attributes.get_int("group", 1) == 1}
    return plain, quantise_onnx(plain, target, [images()], weights=weights)


def images() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((32, *SHAPE), dtype=np.float32)


def loaded(path: Path) -> tuple[Counter[str], np.ndarray]:
    """Return the operators that onnxruntime runs, and what they give."""
    options, target = onnxruntime.SessionOptions(), path.with_suffix(".loaded.onnx")
    options.optimized_model_filepath = str(target)
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    output = session.run(None, {session.get_inputs()[0].name: images()})[0]
    return Counter(node.op_type for node in onnx.load(target).graph.node), output


@pytest.mark.parametrize(
    ("activation", "gate"),
    [
        (nn.SiLU, nn.Sigmoid),
        (nn.LeakyReLU, nn.Sigmoid),
        (nn.Hardswish, nn.Hardsigmoid),
        (nn.ReLU, nn.Hardsigmoid),
    ],
)
def test_blocks_of_mobile_networks_compute_in_integers(
    activation: Callable[[], nn.Module], gate: Callable[[], nn.Module], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    plain, target = written(Block(activation, gate), tmp_path)
    kinds, output = loaded(target)
    assert kinds["QLinearConv"] == 5
    assert kinds["QLinearGlobalAveragePool"] == 1
    assert kinds["QLinearAdd"] == 1
    assert not [kind for kind in kinds if "Linear" not in kind and kind != "Transpose"]
    _, exact = loaded(plain)
    assert np.mean((output - exact) ** 2) < 1e-3 * exact.var()


def test_a_probability_that_the_network_returns_is_not_rounded(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Conv2d(8, 4, 3), nn.SiLU(), nn.Conv2d(4, 1, 3), nn.Sigmoid())
    torch.manual_seed(0)
    kinds, output = loaded(written(network, tmp_path)[1])
    assert kinds["Sigmoid"] == kinds["QLinearSigmoid"] == 1
    assert np.isfinite(output).all()


def mean(attributes: str, axes: str | None, shape: str = "N,3,4,5") -> onnx.ModelProto:
    inputs, opset = ("x, axes", 18) if axes is not None else ("x", 13)
    stored = f"<int64[{axes.count(',') + 1}] axes = {{{axes}}}>" if axes is not None else ""
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}]> g (float[{shape}] x) => (float[] y) {stored}'
        f"{{ y = ReduceMean{attributes}({inputs}) }}"
    )


@pytest.mark.parametrize(
    ("model", "pooled"),
    [
        (mean("", "2, 3"), True),
        (mean("", "-1, -2"), True),
        (mean("<axes = [2, 3]>", None), True),
        (mean("<keepdims = 0>", "2, 3"), False),
        (mean("", "1, 2"), False),
        (mean("", "3"), False),
        (mean("", None), False),
        (mean("", "1, 2", "N,3,4"), False),
    ],
)
def test_means_over_rows_and_columns_become_poolings(model: onnx.ModelProto, pooled: bool) -> None:
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    x = np.random.default_rng(0).standard_normal(
        (2, 3, 4, 5) if len(model.graph.input[0].type.tensor_type.shape.dim) == 4 else (2, 3, 4), np.float32
    )
    expected = ReferenceEvaluator(model).run(None, {"x": x})[0]
    graph = ir.from_proto(model)
    assert pool_means(graph) == pooled
    assert ("GlobalAveragePool" in {node.op_type for node in graph.graph}) == pooled
    found = ReferenceEvaluator(ir.to_proto(graph)).run(None, {"x": x})[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_product_with_what_is_computed_in_floating_point_stays_there() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]>'
        "g (float[N,4] x, float[N,4] z, float[4,4] w) => (float[N,4] y) {"
        "a = MatMul(x, w) s = Sigmoid(z) b = Mul(a, s) c = Mul(b, z) y = MatMul(c, w) }"
    )
    chosen = integer_nodes(ir.from_proto(model).graph, {"w"})
    assert [node.op_type for node in chosen] == ["MatMul", "Mul", "MatMul"]  # the gate alone is rounded


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
