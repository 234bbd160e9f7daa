"""Files that take the bytes of images: what is done to them stands in the graph and in the metadata."""

import dataclasses
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

from rankrl.data import Preprocessing
from rankrl.errors import ExportError
from rankrl.onnx.export import ExportResult, export_onnx, onnx_accuracy, verify_onnx
from rankrl.timing import compare_latency, measure_latency

SHAPE = (3, 8, 8)
Maker = Callable[[str], nn.Module]
HOW = Preprocessing(3, 8, 8, (0.5, 0.4, 0.3), (0.2, 0.25, 0.3), colours="RGB", class_names=tuple("abcde"))


@pytest.fixture(scope="module")
def images() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (9, 8, 8, 3), generator=generator, dtype=torch.uint8)


def by_hand(model: nn.Module, images: Tensor) -> np.ndarray:
    """The formula of any textbook, in double precision, and the network behind it."""
    planes = images.numpy().transpose(0, 3, 1, 2) / 255.0
    mean, std = (np.array(values)[:, None, None] for values in (HOW.mean, HOW.std))
    with torch.no_grad():
        scores: np.ndarray = model.eval()(
            torch.from_numpy(((planes - mean) / std).astype(np.float32))
        ).numpy()
    return scores


@pytest.fixture(scope="module")
def taking_bytes(make: Maker, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ExportResult]:
    """Return the file of a network by name that takes bytes, for all tests to read."""

    @cache
    def export(name: str) -> ExportResult:
        path = tmp_path_factory.mktemp(name) / "model.onnx"
        return export_onnx(make(name), path, SHAPE, preprocessing=HOW, metadata={"plan": "{}"})

    return export


@pytest.fixture
def bytes_file(taking_bytes: Callable[[str], ExportResult]) -> Path:
    """The plain network's file that takes bytes."""
    return taking_bytes("plain").path


@pytest.mark.parametrize("name", ["plain", "residual"])
def test_bytes_go_in_and_the_networks_scores_come_out(
    name: str, make: Maker, taking_bytes: Callable[[str], ExportResult], images: Tensor
) -> None:
    model, result = make(name), taking_bytes(name)
    path = result.path
    expected = by_hand(model, images)
    session = onnxruntime.InferenceSession(path)
    (entry,) = session.get_inputs()
    assert (entry.name, entry.type, entry.shape) == ("input", "tensor(uint8)", ["batch", 8, 8, 3])
    np.testing.assert_allclose(session.run(None, {"input": images.numpy()})[0], expected, atol=1e-4)
    reference = ReferenceEvaluator(str(path)).run(None, {"input": images.numpy()})[0]
    np.testing.assert_allclose(reference, expected, atol=1e-4)
    assert verify_onnx(model, path, images, preprocessing=HOW) <= 1e-4
    assert "BatchNormalization" not in result.operators
    assert result.operators["Cast"] == 1


def test_the_file_says_what_it_takes(bytes_file: Path) -> None:
    stored = {entry.key: entry.value for entry in onnx.load(bytes_file).metadata_props}
    assert stored["plan"] == "{}"
    described = Preprocessing.from_dict(json.loads(stored["preprocessing"]))
    assert described == dataclasses.replace(HOW, in_graph=True)


@pytest.mark.parametrize("opset", [18, 21])
def test_any_opset_will_do(tmp_path: Path, images: Tensor, opset: int) -> None:
    model = nn.Conv2d(3, 4, 3, padding=1)
    result = export_onnx(model, tmp_path / "model.onnx", SHAPE, preprocessing=HOW, opset=opset)
    assert result.opset == opset
    assert verify_onnx(model, tmp_path / "model.onnx", images, preprocessing=HOW) <= 1e-4


def test_a_network_that_needs_its_planes_in_a_row_gets_them(tmp_path: Path, images: Tensor) -> None:
    class Viewing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(192, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(x.view(x.shape[0], -1))

    model = Viewing()
    export_onnx(model, tmp_path / "model.onnx", SHAPE, preprocessing=HOW)
    assert verify_onnx(model, tmp_path / "model.onnx", images, preprocessing=HOW) <= 1e-4


def test_a_network_that_hands_its_input_on_does_so(tmp_path: Path, images: Tensor) -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x.mean((2, 3))

    export_onnx(Both(), tmp_path / "model.onnx", SHAPE, preprocessing=HOW)
    assert verify_onnx(Both(), tmp_path / "model.onnx", images, preprocessing=HOW) <= 1e-5


def test_a_fixed_batch_stays_fixed(tmp_path: Path, images: Tensor) -> None:
    model, path = nn.Conv2d(3, 4, 3), tmp_path / "model.onnx"
    export_onnx(model, path, SHAPE, preprocessing=HOW, dynamic_batch=False, sample=torch.zeros(4, *SHAPE))
    assert onnxruntime.InferenceSession(path).get_inputs()[0].shape == [4, 8, 8, 3]
    assert verify_onnx(model, path, images, preprocessing=HOW) <= 1e-4


def test_a_wrong_mean_is_found(make: Maker, bytes_file: Path, images: Tensor) -> None:
    other = dataclasses.replace(HOW, mean=(0.5, 0.4, 0.31))
    with pytest.raises(ExportError, match="differs from the PyTorch model"):
        verify_onnx(make("plain"), bytes_file, images, preprocessing=other)


def test_accuracy_is_measured_on_bytes(make: Maker, bytes_file: Path, images: Tensor) -> None:
    labels = torch.from_numpy(by_hand(make("plain"), images).argmax(1))
    labels[:3] = (labels[:3] + 1) % 5
    assert onnx_accuracy(bytes_file, [(images, labels)]) == 6 / 9


def test_images_of_the_other_kind_are_refused(bytes_file: Path, plain_file: Path, images: Tensor) -> None:
    labels = torch.zeros(9, dtype=torch.long)
    with pytest.raises(ExportError, match=r"takes tensor\(uint8\) of shape .* fails on float32"):
        onnx_accuracy(bytes_file, [(torch.zeros(9, 8, 8, 3), labels)])
    with pytest.raises(ExportError, match=r"takes tensor\(float\) of shape .* fails on uint8"):
        onnx_accuracy(plain_file, [(images.permute(0, 3, 1, 2), labels)])


def test_files_that_take_bytes_are_timed(bytes_file: Path, plain_file: Path) -> None:
    assert measure_latency(bytes_file, batch=3, runs=2).ms > 0
    assert compare_latency(plain_file, bytes_file, batch=3, runs=2).ratio > 0


def test_inputs_that_cannot_be_made_up_are_refused(tmp_path: Path) -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.table(x)

    sample = torch.zeros(2, 4, dtype=torch.long)
    export_onnx(Lookup(), tmp_path / "model.onnx", (4,), sample=sample)
    with pytest.raises(ExportError, match=r"takes tensor\(int64\).*cannot be timed"):
        measure_latency(tmp_path / "model.onnx", batch=2, runs=1)


def test_preprocessing_for_other_images_is_refused(make: Maker, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"preprocessing is for inputs of shape \(3, 8, 9\).*\(3, 8, 8\)"):
        export_onnx(
            make("plain"), tmp_path / "m.onnx", SHAPE, preprocessing=dataclasses.replace(HOW, width=9)
        )
    assert not list(tmp_path.iterdir())
