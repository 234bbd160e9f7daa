"""Inputs: reading, checking, splitting."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from call_options import layer_options
from chained_graphs import YES, Chain, X, assert_alike
from onnx import TensorProto, helper
from PIL import Image
from small_graphs import convolutions, images, model_of, network_of, save_photos, sentences, tokens
from torchvision import transforms

import rankrl
from rankrl.data.sources import image_files
from rankrl.errors import DataError
from rankrl.onnx.graph import ImagePreprocessing, OnnxGraphError, OnnxNetwork, read_inputs, split_inputs
from rankrl.onnx.graph.inputs import checked


@pytest.fixture
def words(tmp_path: Path) -> OnnxNetwork:
    return network_of(tokens(), tmp_path)


@pytest.fixture
def pictures(tmp_path: Path) -> OnnxNetwork:
    return network_of(convolutions(), tmp_path)


def test_an_npz_has_one_array_an_input_and_may_hold_labels(words: OnnxNetwork, tmp_path: Path) -> None:
    np.savez(tmp_path / "inputs.npz", **sentences(), labels=np.arange(60))
    found = read_inputs(tmp_path / "inputs.npz", words)
    assert set(found) == {"words", "extra"}


def test_one_array_will_do_for_one_input(pictures: OnnxNetwork, tmp_path: Path) -> None:
    np.save(tmp_path / "inputs.npy", images())
    np.savez(tmp_path / "inputs.npz", whatever=images())
    for name in ("inputs.npy", "inputs.npz"):
        np.testing.assert_array_equal(read_inputs(tmp_path / name, pictures)["x"], images())


@pytest.mark.parametrize("content", [b"", b"no arrays", b"PK\x03\x04rest"])
def test_other_files_are_refused(content: bytes, pictures: OnnxNetwork, tmp_path: Path) -> None:
    (tmp_path / "inputs.npz").write_bytes(content)
    with pytest.raises(OnnxGraphError, match=r"cannot be read as \.npz or \.npy"):
        read_inputs(tmp_path / "inputs.npz", pictures)
    with pytest.raises(OnnxGraphError, match=r"no file of inputs"):
        read_inputs(tmp_path / "other.npz", pictures)


def test_parts_are_disjoint_and_complete(pictures: OnnxNetwork) -> None:
    given = images(50)
    split = split_inputs(given, pictures, heldout=0.3, batch=8, seed=1)
    parts = [np.concatenate([feed["x"] for feed in part]) for part in (split.calibration, split.heldout)]
    assert [len(part) for part in parts] == [35, 15]
    assert {row.tobytes() for part in parts for row in part} == {row.tobytes() for row in given}
    fewer = split_inputs(given, pictures, heldout=7, batch=8, seed=1)
    assert [sum(len(feed["x"]) for feed in part) for part in (fewer.calibration, fewer.heldout)][1] == 7
    with pytest.raises(OnnxGraphError, match="heldout is 1000, of"):
        split_inputs(given, pictures, heldout=1000)
    again = split_inputs(given, pictures, heldout=0.3, batch=8, seed=1)
    np.testing.assert_array_equal(again.heldout[0]["x"], split.heldout[0]["x"])


@pytest.mark.parametrize(("inputs", "size"), [(0.5, 2), (3, 3), (100, 8)])
def test_batches_of_large_inputs_are_small(
    inputs: float, size: int, pictures: OnnxNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = images(50)
    monkeypatch.setattr("rankrl.onnx.graph.inputs._BATCH_BYTES", int(inputs * given[0].nbytes))
    split = split_inputs(given, pictures, heldout=0.2, batch=8)
    assert {len(feed["x"]) for feed in split.calibration[:-1]} == {size}
    assert sum(len(feed["x"]) for feed in [*split.calibration, *split.heldout]) == 50


def test_batches_of_different_sizes_stay_apart(words: OnnxNetwork) -> None:
    lengths = (3, 4, 5, 7)
    feeds = [{name: value[:4, :length] for name, value in sentences().items()} for length in lengths]
    split = split_inputs(iter(feeds), words, heldout=0.25)
    assert sorted(feed["words"].shape[1] for feed in (*split.calibration, *split.heldout)) == list(lengths)
    assert len(split.heldout) == 1


def test_a_fixed_batch_size_is_kept(tmp_path: Path) -> None:
    model = convolutions()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 4
    split = split_inputs(images(30), network_of(model, tmp_path))
    assert {split.axes.size(feed) for feed in (*split.calibration, *split.heldout)} == {4}
    assert split.heldout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"words": None}, r"inputs given are 'extra'.*takes 'words' \(int64, any, any\)"),
        ({"other": np.zeros(60)}, r"inputs given are"),
        ({"words": np.zeros((60, 7), np.float32)}, r"'words' is float32.*astype"),
        (
            {"words": np.zeros((60, 7, 1), np.int64)},
            r"'words' has the shape .60.*many axes as that .2",
        ),
        ({"extra": np.zeros((60, 7, 23), np.float32)}, r"axis 2 must have the size 24"),
        (
            {"extra": np.zeros((59, 7, 24), np.float32)},
            r"numbers of entries.*'words' 60 \(axis 0\), 'extra' 59.*batch_axes=\{words: 0, extra: 0\}",
        ),
        ({"extra": np.float32(1)}, r"'extra' has the shape"),
    ],
)
def test_inputs_that_do_not_fit_are_named(change: dict[str, Any], message: str, words: OnnxNetwork) -> None:
    given = {**sentences(), **change}
    with pytest.raises(OnnxGraphError, match=message):
        split_inputs({name: value for name, value in given.items() if value is not None}, words)


def test_types_that_lose_nothing_are_converted(words: OnnxNetwork) -> None:
    given = sentences()
    found = checked(
        {"words": given["words"].astype(np.uint8), "extra": given["extra"].astype(np.float64)}, words
    )
    assert [value.dtype for value in found.values()] == [np.int64, np.float32]


def test_too_few_inputs_are_refused(pictures: OnnxNetwork) -> None:
    for given in (images(0), images(1), []):
        with pytest.raises(OnnxGraphError, match=r"too few|no inputs"):
            split_inputs(given, pictures)


def test_one_array_for_several_inputs_is_refused(words: OnnxNetwork, tmp_path: Path) -> None:
    with pytest.raises(OnnxGraphError, match=r"one array for each by its name"):
        split_inputs(images(), words)
    np.save(tmp_path / "inputs.npy", images())
    with pytest.raises(OnnxGraphError, match=r"no 'words'"):
        read_inputs(tmp_path / "inputs.npy", words)


def test_a_file_that_is_onnx_is_no_file_of_inputs(pictures: OnnxNetwork, tmp_path: Path) -> None:
    onnx.save(convolutions(), tmp_path / "net2.onnx")
    with pytest.raises(OnnxGraphError, match=r"cannot be read"):
        read_inputs(tmp_path / "net2.onnx", pictures)


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


@pytest.mark.parametrize("reader", ["output", "If", "Loop"])
@pytest.mark.parametrize(("precision", "share"), [("float32", 0.8), ("int8", 0.4)])
def test_what_reads_a_value_before_an_activation_gets_its_negative_numbers(
    reader: str, precision: str, share: float, tmp_path: Path
) -> None:
    chain, random = Chain(), np.random.default_rng(2)
    for op_type in ("Conv", "Relu", "Conv", "Clip", "Conv"):
        chain.step(op_type, random)
    for value in ("v1", "v3"):
        if reader == "output":
            chain.outputs.append(value)
        else:
            chain.capture(value, reader)
    for name in ("w1", "w3", "w5"):
        factors = random.standard_normal((4, 2)), random.standard_normal((2, 36)) / 6
        chain.constants[name] = (factors[0] @ factors[1]).reshape(4, 4, 3, 3).astype(np.float32)
    model, path, target = chain.model(), tmp_path / "chain.onnx", tmp_path / "small.onnx"
    onnx.save(model, path)
    found = rankrl.compress(
        path,
        {"x": X, **YES},
        target,
        bytes=share,
        timing=rankrl.LatencyOptions(batch=4, reduce_range=True),
        decomposition=layer_options(
            precisions=[precision], candidates=4, iterations=5, final_iterations=10, weigh_outputs=False
        ),
    )
    assert any(layer.operations for layer in found.plan)
    assert_alike(model, onnx.load(target), {"x": X, **YES})
    assert [each.name for each in onnx.load(target).graph.output] == [
        each.name for each in model.graph.output
    ]
