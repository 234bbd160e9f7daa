"""A folder of images as inputs: torchvision's transforms are the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper
from PIL import Image
from small_graphs import convolutions, model_of, network_of, save_photos, tokens
from torchvision import transforms

from rankrl.data.imagefolder import image_files
from rankrl.errors import DataError
from rankrl.onnx.graph import ImagePreprocessing, OnnxGraphError, OnnxNetwork, read_inputs

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    save_photos(tmp_path / "photos")
    return tmp_path / "photos"


def taking(folder: Path, shape: list[Any], kind: int = TensorProto.FLOAT) -> OnnxNetwork:
    """A network that returns what it takes."""
    nodes, types = [helper.make_node("Identity", ["x"], ["y"])], {"x": kind, "y": kind}
    return network_of(model_of(nodes, {}, {"x": shape}, {"y": shape}, types=types), folder)


def expected(folder: Path, size: tuple[int, int], resize: int, **normalised: Any) -> torch.Tensor:
    steps: list[Any] = [transforms.Resize(resize), transforms.CenterCrop(size), transforms.ToTensor()]
    steps += [transforms.Normalize(**normalised)] if normalised else []
    transform = transforms.Compose(steps)
    return torch.stack([transform(Image.open(file)) for file in image_files(folder)])


def test_images_become_what_torchvision_makes_of_them(photos: Path, tmp_path: Path) -> None:
    network = network_of(convolutions(), tmp_path)
    found = read_inputs(photos, network, ImagePreprocessing(MEAN, STD, size=32, resize=48))
    assert found["x"].shape == (12, 3, 32, 32)
    assert found["x"].dtype == np.float32
    wanted = expected(photos, (32, 32), 48, mean=MEAN, std=STD)
    torch.testing.assert_close(torch.from_numpy(found["x"]), wanted, atol=1e-5, rtol=0)


def test_the_network_says_size_layout_and_number_of_channels(photos: Path, tmp_path: Path) -> None:
    whole = expected(photos, (30, 40), 30).movedim(1, 3)
    found = read_inputs(photos, taking(tmp_path, ["n", 30, 40, 3]))
    torch.testing.assert_close(torch.from_numpy(found["x"]), whole, atol=1e-6, rtol=0)
    grey = read_inputs(photos, taking(tmp_path, ["n", 1, 30, 40]))["x"]
    shades = np.array([0.299, 0.587, 0.114])  # ITU-R 601-2, of whole images before they are resized
    assert np.abs(grey[:, 0] - (whole.numpy() * shades).sum(-1)).max() < 3 / 255


def test_the_order_of_channels_and_the_scale_are_stated(photos: Path, tmp_path: Path) -> None:
    network = taking(tmp_path, ["n", 3, 30, 40])
    plain = read_inputs(photos, network)["x"]
    turned = read_inputs(photos, network, ImagePreprocessing(order="bgr", scale=255))["x"]
    np.testing.assert_allclose(turned, plain[:, ::-1] * 255, atol=1e-3)
    assert plain.max() <= 1 < turned.max() <= 255


def test_a_network_of_pixels_gets_pixels(photos: Path, tmp_path: Path) -> None:
    network = taking(tmp_path, ["n", 30, 40, 3], TensorProto.UINT8)
    found = read_inputs(photos, network)["x"]
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, (expected(photos, (30, 40), 30).movedim(1, 3) * 255).round())
    with pytest.raises(OnnxGraphError, match="leave out mean, std and scale"):
        read_inputs(photos, network, ImagePreprocessing(scale=255))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"images of any size; say which \(dataset\.size=224"),
        ({"size": 0}, "size is a number of pixels, at least 1, got 0"),
        ({"size": 32, "resize": 16}, "resize is 16, less than the 32 pixels of the crop"),
        ({"size": 32, "mean": (0.5, 0.5)}, "mean is .*; give one number for each of the 3 channels"),
        ({"size": 32, "std": (0.5, 0.5, 0.0)}, "std is .*; give one number .*, greater than 0"),
        ({"size": 32, "order": "grb"}, "the order of the channels is rgb or bgr, got 'grb'"),
    ],
)
def test_what_does_not_fit_is_refused(
    options: dict[str, Any], message: str, photos: Path, tmp_path: Path
) -> None:
    network = network_of(convolutions(), tmp_path)
    with pytest.raises(OnnxGraphError, match=message):
        read_inputs(photos, network, ImagePreprocessing(**options))


def test_other_networks_folders_and_files_are_refused(photos: Path, tmp_path: Path) -> None:
    fixed = taking(tmp_path, ["n", 3, 30, 40])
    with pytest.raises(OnnxGraphError, match="images of 30 x 40, but size is 20; leave it out"):
        read_inputs(photos, fixed, ImagePreprocessing(size=20))
    with pytest.raises(OnnxGraphError, match="which is not one batch of images with 1 or 3 channels"):
        read_inputs(photos, network_of(tokens(), tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(OnnxGraphError, match="holds no image files"):
        read_inputs(tmp_path / "empty", fixed)
    np.save(tmp_path / "inputs.npy", np.zeros((4, 3, 30, 40), np.float32))
    with pytest.raises(OnnxGraphError, match="is no folder of images"):
        read_inputs(tmp_path / "inputs.npy", fixed, ImagePreprocessing())
    (photos / "broken.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"cannot decode the image .*broken\.png"):
        read_inputs(photos, fixed)
