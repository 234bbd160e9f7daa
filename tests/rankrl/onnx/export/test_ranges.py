"""Ranges of tensors, beside those of onnxruntime's calibrators."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod
from onnxruntime.quantization.calibrate import create_calibrator
from torch import nn

from rankrl.onnx.export import export_onnx
from rankrl.onnx.export.static_quantiser import Feed, Spread, collect_spreads

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
    """The network's file."""
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
