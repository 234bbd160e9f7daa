"""Ranges of tensors, beside those of onnxruntime's calibrators."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from chained_graphs import STEPS, YES, Chain, X, assert_alike, run
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod
from onnxruntime.quantization.calibrate import create_calibrator
from torch import nn

from rankrl.errors import DefectError, ExportError
from rankrl.onnx.export import export_onnx, quantise_onnx
from rankrl.onnx.export.int8 import QuantiserCopy
from rankrl.onnx.export.static_quantiser import Feed, Spread, collect_spreads, correct_biases, mean_moves
from rankrl.onnx.protobuf import load_model, save_model

SHAPE = (3, 12, 12)


class Summed(nn.Module):
    """Two convolutions whose results are added."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        x = torch.relu(x + self.second(x))
        return torch.softmax(self.head(x.mean((2, 3))), 1)


class Batches(CalibrationDataReader):
    """Hands batches to a calibrator."""

    def __init__(self, feeds: list[Feed]) -> None:
        self.feeds = iter(feeds)

    def get_next(self) -> Feed | None:
        return next(self.feeds, None)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return export_onnx(Summed().eval(), tmp_path_factory.mktemp("ranges") / "float.onnx", SHAPE).path


def feeds(model: onnx.ModelProto) -> list[Feed]:
    generator = np.random.default_rng(0)
    name = model.graph.input[0].name
    return [{name: generator.standard_normal((16, *SHAPE), dtype=np.float32)} for _ in range(3)]


def cut(feed: Feed, size: int) -> Iterator[Feed]:
    for first in range(0, 16, size):
        yield {name: array[first : first + size] for name, array in feed.items()}


_ROUNDING = ReferenceEvaluator(
    onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]>'
        "rounding (float[N] x, float scale, uint8 zero) => (float[N] y) "
        "{ q = QuantizeLinear(x, scale, zero) y = DequantizeLinear(q, scale, zero) }"
    )
)


def calibrated(path: Path, batches: list[Feed], folder: Path) -> dict[str, tuple[np.float32, np.float32]]:
    """Return the ranges by onnxruntime's calibrator, with one thread: sums depend on it."""
    more = folder / "more.onnx"
    calibrator = create_calibrator(
        path, augmented_model_path=str(more), calibrate_method=CalibrationMethod.MinMax
    )
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    calibrator.infer_session = onnxruntime.InferenceSession(more, options, calibrator.execution_providers)
    calibrator.collect_data(Batches(batches))
    return {name: each.range_value for name, each in calibrator.compute_data().items()}


def test_ends_are_those_of_onnxruntimes_calibrator_to_the_bit(path: Path, tmp_path: Path) -> None:
    model = onnx.shape_inference.infer_shapes(onnx.load(path))
    singly = calibrated(path, [part for feed in feeds(model) for part in cut(feed, 1)], tmp_path)
    together = calibrated(path, feeds(model), tmp_path)
    before = model.SerializeToString()
    spreads = collect_spreads(model, list(singly), [part for feed in feeds(model) for part in cut(feed, 1)])
    ends = {name: spread.ends for name, spread in spreads.items()}
    assert model.SerializeToString() == before
    assert len(ends) > 5
    assert ends == singly
    product = next(node.output[0] for node in model.graph.node if node.op_type == "Gemm")
    same = {name for name in ends if ends[name] == together[name]}
    assert set(ends) - same <= {product, *model.graph.output[0].name.split()}  # sums in another order
    np.testing.assert_allclose(ends[product], np.ravel(together[product]), rtol=1e-6)


def rounded(values: np.ndarray, ends: tuple[np.float32, np.float32]) -> np.ndarray:
    """Round by ONNX's own operators."""
    low, high = min(0.0, ends[0]), max(0.0, ends[1])
    scale = np.float32((high - low) / 255)
    found: np.ndarray = _ROUNDING.run(
        None, {"x": values, "scale": scale, "zero": np.uint8(np.round(-low / scale))}
    )[0]
    return found


@pytest.mark.parametrize("kind", ["normal", "one-sided", "far", "negative"])
def test_the_least_square_is_less_than_that_of_other_ranges(kind: str, path: Path) -> None:
    generator = np.random.default_rng(0)
    values = generator.standard_normal(20_000, dtype=np.float32)
    if kind == "one-sided":
        values = np.maximum(values, 0)
    elif kind == "far":
        values[:3] *= 100
    elif kind == "negative":
        values = -np.abs(values)
    spread = Spread()
    spread.add(values)

    def error(ends: tuple[np.float32, np.float32]) -> float:
        return float(np.mean((rounded(values, ends) - values) ** 2))

    best = error(spread.least_square())
    assert best <= 1.001 * error(spread.ends)
    assert best <= 1.03 * min(
        error((np.float32(low * spread.lowest), np.float32(high * spread.highest)))
        for low in np.linspace(0.05, 1, 20)
        for high in np.linspace(0.05, 1, 20)
    )


@pytest.mark.parametrize("share", [1e-1, 1e-2, 1e-3])
def test_percentiles_are_those_of_numpy_but_for_the_width_of_a_part(share: float) -> None:
    values = np.random.default_rng(0).standard_normal(50_000, dtype=np.float32)
    spread = Spread()
    for part in np.split(values, 5):
        spread.add(part)
    width = (spread.highest - spread.lowest) / 2048
    expected = np.quantile(values, [share, 1 - share])
    np.testing.assert_allclose(spread.percentile(share), expected, atol=2 * width)


def test_a_tensor_that_never_changes_keeps_its_value() -> None:
    spread = Spread()
    assert spread.ends == (0, 0)
    spread.add(np.full(3, 2, np.float32))
    assert spread.least_square() == spread.percentile(1e-4) == (2, 2)


BIASED_SHAPE = (3, 8, 8)


def cut_layers(feed: Feed, size: int) -> Iterator[Feed]:
    for first in range(0, 64, size):
        yield {name: array[first : first + size] for name, array in feed.items()}


def means(path: Path, feed: Feed) -> np.ndarray:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    output: np.ndarray = session.run(None, feed)[0]
    return output.mean(tuple(axis for axis in range(output.ndim) if axis != 1))


@pytest.mark.parametrize("kind", ["convolution", "activated", "product"])
def test_the_mean_of_every_channel_is_that_in_floating_point(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    parts: list[nn.Module] = [nn.Conv2d(3, 16, 3), nn.ReLU()]
    if kind == "product":
        parts = [nn.Flatten(), nn.Linear(3 * 8 * 8, 16)]
    network = nn.Sequential(*parts[: 1 if kind == "convolution" else 2]).eval()
    plain, integers, corrected = (tmp_path / f"{name}.onnx" for name in ("plain", "integers", "corrected"))
    export_onnx(network, plain, BIASED_SHAPE)
    images = np.random.default_rng(0).uniform(1, 2, (64, *BIASED_SHAPE)).astype(np.float32)
    feed = {load_model(plain).graph.inputs[0].name or "": images}
    quantise_onnx(plain, integers, [feed], fitted=False, reduce_range=True)
    quantised = load_model(integers)
    network = load_model(plain)
    correct_biases(network, quantised, mean_moves(network, quantised, cut_layers(feed, 1)))
    values = [value for node in quantised.graph for value in node.outputs]
    assert all(value.uses() or value in quantised.graph.outputs for value in values)
    save_model(quantised, corrected)
    exact = means(plain, feed)
    before, after = (np.abs(means(path, feed) - exact) for path in (integers, corrected))
    assert before.max() > 1e-3
    assert after.mean() < 0.4 * before.mean()
    assert after.max() < before.max()


def in_integers(model: onnx.ModelProto, folder: Path, weights: list[str] | None) -> onnx.ModelProto:
    path, target = folder / "plain.onnx", folder / "integers.onnx"
    onnx.save(model, path)
    quantise_onnx(path, target, [{"x": X, **YES}], weights=weights, reduce_range=True)
    return onnx.load(target)


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    chain, random = Chain(), np.random.default_rng(draw(st.integers(0, 99)))
    chain.step("Conv", random)
    for op_type in draw(st.lists(st.sampled_from(STEPS), min_size=1, max_size=5)):
        chain.step(op_type, random)
    computed = st.sampled_from(chain.values[1:])
    for value in draw(st.lists(computed, max_size=2, unique=True)):
        chain.capture(value, draw(st.sampled_from(["If", "Loop"])))
    chain.outputs += draw(st.lists(computed, max_size=2, unique=True))
    return chain


@settings(max_examples=20, deadline=None)
@given(chain=chains(), alone=st.booleans())
def test_whatever_reads_a_value_gets_it_as_it_is_but_for_rounding(chain: Chain, alone: bool) -> None:
    model = chain.model()
    weights = [node.input[1] for node in chain.nodes if node.op_type == "Conv"] if alone else None
    with tempfile.TemporaryDirectory() as folder:
        assert_alike(model, in_integers(model, Path(folder), weights), {"x": X, **YES})


@pytest.mark.parametrize("behind", ["Relu", "Clip"])
@pytest.mark.parametrize("reader", ["output", "body", "both"])
def test_negative_numbers_before_an_activation_stay_where_something_else_reads_them(
    behind: str, reader: str, tmp_path: Path
) -> None:
    chain, random = Chain(), np.random.default_rng(0)
    for op_type in ("Conv", behind, "Conv"):
        chain.step(op_type, random)
    if reader != "output":
        chain.capture("v1")
    if reader != "body":
        chain.outputs.append("v1")
    model = chain.model()
    rounded = in_integers(model, tmp_path, ["w1", "w3"])
    assert_alike(model, rounded, {"x": X, **YES})
    kinds = [node.op_type for node in rounded.graph.node]
    assert "Identity" not in kinds  # what sets readers apart is gone again
    assert kinds.count("QuantizeLinear") == 4  # x, v1 and what is made of it, the last output


def test_names_that_the_quantiser_would_give_may_be_taken_and_stay(tmp_path: Path) -> None:
    chain, random = Chain(), np.random.default_rng(0)
    for op_type in ("Conv", "Relu", "Conv"):
        chain.step(op_type, random)
    chain.outputs += ["v1"]
    model = chain.model()
    taken = {
        "v2": "x_QuantizeLinear_Output",
        "v1": "x_quantized",
        "w1": "x_scale",
        "w1_bias": "x_zero_point",
        "w3": "x",
        "x": "w3",
    }
    for value in (*model.graph.node, *model.graph.initializer, *model.graph.input, *model.graph.output):
        if isinstance(value, onnx.NodeProto):
            value.input[:] = [taken.get(name, name) for name in value.input]
            value.output[:] = [taken.get(name, name) for name in value.output]
            value.name = {"node_v1": "w3_QuantizeLinear", "node_v2": ""}.get(value.name, value.name)
        else:
            value.name = taken.get(value.name, value.name)
    path, target = tmp_path / "plain.onnx", tmp_path / "integers.onnx"
    onnx.save(model, path)
    feed = {"w3": X, **YES}
    quantise_onnx(path, target, [feed], weights=["x_scale", "x"], reduce_range=True)
    rounded = onnx.load(target)
    assert_alike(model, rounded, feed)
    names = [node.name for node in rounded.graph.node if node.op_type == "Conv"]
    assert names == ["w3_QuantizeLinear", "node_v3"]
    nodes = [node.name for node in rounded.graph.node if node.name]
    assert len(set(nodes)) == len(nodes)
    again = tmp_path / "again.onnx"  # the names are those of a file in integers now
    with pytest.raises(ExportError, match="quantised already"):
        quantise_onnx(target, again, [feed])


def test_a_captured_weight_and_a_bias_among_the_outputs_stay(tmp_path: Path) -> None:
    chain, random = Chain(), np.random.default_rng(0)
    for op_type in ("Conv", "Relu", "Conv"):
        chain.step(op_type, random)
    model = chain.model()
    body = helper.make_graph(
        [helper.make_node("Identity", ["w1"], ["inner"], "inner")],
        "body",
        [],
        [helper.make_tensor_value_info("inner", TensorProto.FLOAT, [4, 4, 3, 3])],
    )
    model.graph.node.append(
        helper.make_node("If", ["yes"], ["weight"], "if", then_branch=body, else_branch=body)
    )
    model.graph.output.append(helper.make_tensor_value_info("weight", TensorProto.FLOAT, [4, 4, 3, 3]))
    model.graph.output.append(helper.make_tensor_value_info("w3_bias", TensorProto.FLOAT, [4]))
    rounded = in_integers(model, tmp_path, ["w1", "w3"])
    assert_alike(model, rounded, {"x": X, **YES})
    np.testing.assert_array_equal(run(rounded, {"x": X, **YES})["weight"], chain.constants["w1"])


def test_nothing_is_written_beside_the_original(tmp_path: Path) -> None:
    chain = Chain()
    chain.step("Conv", np.random.default_rng(0))
    in_integers(chain.model(), tmp_path, None)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["integers.onnx", "plain.onnx"]


def test_a_file_that_is_damaged_on_the_way_never_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(copy: QuantiserCopy, model: ir.Model) -> None:
        first = model.graph[0]
        again = [ir.val(output.name) for output in first.outputs]
        model.graph.append(ir.node(first.op_type, first.inputs, first.attributes, outputs=again))

    monkeypatch.setattr(QuantiserCopy, "restore", damaged)
    chain, target = Chain(), tmp_path / "integers.onnx"
    chain.step("Conv", np.random.default_rng(0))
    target.write_bytes(b"what was there")
    with pytest.raises(DefectError, match=r"plain\.onnx in integers is damaged, .* fault of rankrl's"):
        in_integers(chain.model(), tmp_path, None)
    assert target.read_bytes() == b"what was there"
