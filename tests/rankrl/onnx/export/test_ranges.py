"""Ranges of tensors, beside those of onnxruntime's calibrators."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod
from onnxruntime.quantization.calibrate import create_calibrator
from torch import nn

from rankrl.onnx.export import export_onnx, ranges
from rankrl.onnx.export.ranges import Feed, collect_ranges

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


def calibrated(path: Path, batches: list[Feed], folder: Path) -> dict[str, tuple[np.float32, np.float32]]:
    """Return the ranges by onnxruntime's calibrator."""
    calibrator = create_calibrator(
        path, augmented_model_path=str(folder / "more.onnx"), calibrate_method=CalibrationMethod.MinMax
    )
    calibrator.collect_data(Batches(batches))
    return {name: each.range_value for name, each in calibrator.compute_data().items()}


def test_ends_are_those_of_onnxruntimes_calibrator_to_the_bit(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "_BYTES", 1)
    model = onnx.shape_inference.infer_shapes(onnx.load(path))
    singly = calibrated(path, [part for feed in feeds(model) for part in cut(feed, 1)], tmp_path)
    together = calibrated(path, feeds(model), tmp_path)
    before = model.SerializeToString()
    ends = collect_ranges(model, list(singly), feeds(model), cut)
    assert model.SerializeToString() == before
    assert len(ends) > 5
    assert ends == singly
    product = next(node.output[0] for node in model.graph.node if node.op_type == "Gemm")
    same = {name for name in ends if ends[name] == together[name]}
    assert set(ends) - same <= {product, *model.graph.output[0].name.split()}  # sums in another order
    np.testing.assert_allclose(ends[product], np.ravel(together[product]), rtol=1e-6)


@pytest.mark.parametrize("held", [1, 2**16, 2**27])
def test_as_many_inputs_run_at_a_time_as_their_tensors_fit(
    held: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "_BYTES", held)
    model = onnx.load(path)
    names, sizes = [name for node in model.graph.node for name in node.output], []

    def noted(feed: Feed, size: int) -> Iterator[Feed]:
        sizes.append(size)
        return cut(feed, size)

    collect_ranges(model, names, feeds(model), noted)
    assert sizes[0] == 1  # nothing is known of their size
    one = 4 * 12 * 12 * 16
    assert sizes[1] == sizes[2]
    assert sizes[1] == 1 or held / (8 * one) < sizes[1] < held / (3 * one)
