"""`verify_onnx` accepts the right file and refuses every other; `onnx_accuracy` counts right answers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from rankrl.errors import ExportError
from rankrl.onnx.export import export_onnx, onnx_accuracy, verify_onnx

SHAPE = (3, 8, 8)
Maker = Callable[[str], nn.Module]


@pytest.fixture
def exported(make: Maker, plain_file: Path, tmp_path: Path) -> tuple[nn.Module, Path]:
    return make("plain"), Path(shutil.copy(plain_file, tmp_path / "model.onnx"))


def test_a_changed_weight_is_found(exported: tuple[nn.Module, Path]) -> None:
    model, path = exported
    with torch.no_grad():
        next(model.parameters())[0] += 0.1
    with pytest.raises(ExportError, match="differs from the PyTorch model by"):
        verify_onnx(model, path, torch.randn(7, *SHAPE))


def test_a_weight_that_is_not_a_number_is_found(exported: tuple[nn.Module, Path]) -> None:
    model, path = exported
    proto = onnx.load(path)
    tensor = max(proto.graph.initializer, key=lambda t: int(np.prod(t.dims)))
    tensor.CopyFrom(numpy_helper.from_array(np.full(tuple(tensor.dims), np.nan, np.float32), tensor.name))
    onnx.save(proto, path)
    with pytest.raises(ExportError, match="differs from the PyTorch model by nan"):
        verify_onnx(model, path, torch.randn(7, *SHAPE))


def test_the_tolerance_grows_with_the_size_of_the_outputs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(512, 8)
    with torch.no_grad():
        model.weight.mul_(1e5)
    export_onnx(model, tmp_path / "model.onnx", (512,))
    assert 1e-4 < verify_onnx(model, tmp_path / "model.onnx", torch.randn(7, 512)) < 10


def test_another_number_of_classes_is_found(exported: tuple[nn.Module, Path]) -> None:
    _, path = exported
    with pytest.raises(ExportError, match=r"returns \[\(1, 5\)\] for a batch of 1"):
        verify_onnx(nn.Sequential(nn.Flatten(), nn.Linear(192, 4)), path, torch.randn(7, *SHAPE))


def test_one_image_is_enough_and_none_is_refused(exported: tuple[nn.Module, Path]) -> None:
    model, path = exported
    assert verify_onnx(model, path, torch.randn(1, *SHAPE)) <= 1e-4
    with pytest.raises(ExportError, match="holds no image"):
        verify_onnx(model, path, torch.randn(0, *SHAPE))


def test_the_model_is_not_changed(exported: tuple[nn.Module, Path]) -> None:
    model, path = exported
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    verify_onnx(model, path, torch.randn(7, *SHAPE))
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("as_array", [np.asarray, torch.as_tensor])
def test_accuracy_is_the_share_of_right_answers(
    exported: tuple[nn.Module, Path], as_array: Callable[[Tensor], Tensor]
) -> None:
    model, path = exported
    images = torch.randn(50, *SHAPE)
    with torch.no_grad():
        labels = model.eval()(images).argmax(1)
    labels[:20] = (labels[:20] + 1) % 5
    batches = [(as_array(images[part]), as_array(labels[part])) for part in (slice(0, 33), slice(33, 50))]
    assert onnx_accuracy(path, batches) == 30 / 50


def test_accuracy_of_no_images_is_refused(exported: tuple[nn.Module, Path]) -> None:
    with pytest.raises(ExportError, match="no images"):
        onnx_accuracy(exported[1], [])


def test_images_of_another_shape_are_refused(exported: tuple[nn.Module, Path]) -> None:
    with pytest.raises(ExportError, match=r"takes tensor\(float\) of shape .* fails on float32"):
        onnx_accuracy(exported[1], [(np.zeros((2, 1, 8, 8), np.float32), np.zeros(2, np.int64))])


def test_a_missing_or_damaged_file_is_refused(exported: tuple[nn.Module, Path], tmp_path: Path) -> None:
    model, path = exported
    with pytest.raises(ExportError, match="there is no ONNX file"):
        verify_onnx(model, tmp_path / "other.onnx", torch.randn(7, *SHAPE))
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ExportError, match="onnxruntime cannot load"):
        verify_onnx(model, path, torch.randn(7, *SHAPE))
