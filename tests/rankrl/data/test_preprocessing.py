"""What a network's images go through is said once, and comes back from JSON as it went."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from rankrl.data import ImageData, Preprocessing, batches, load_dataset
from rankrl.errors import DataError

LETTERS = 'aZ 0."\\\n\x00\x7fé漢\u2028😀'
numbers = st.floats(-5, 5, allow_nan=False)


@st.composite
def preprocessings(draw: st.DrawFn) -> Preprocessing:
    channels = draw(st.integers(1, 4))
    size = st.integers(1, 300)
    return Preprocessing(
        channels=channels,
        height=draw(size),
        width=draw(size),
        mean=tuple(draw(st.lists(numbers, min_size=channels, max_size=channels))),
        std=tuple(draw(st.lists(st.floats(0.01, 5), min_size=channels, max_size=channels))),
        resize=draw(st.none() | size),
        colours=draw(st.sampled_from(["RGB", None])) if channels == 3 else None,
        class_names=draw(
            st.none() | st.lists(st.text(LETTERS, max_size=5), min_size=2, max_size=4).map(tuple)
        ),
        in_graph=draw(st.booleans()),
    )


@given(preprocessing=preprocessings())
def test_it_comes_back_from_json_as_it_went(preprocessing: Preprocessing) -> None:
    text = json.dumps(preprocessing.to_dict(), allow_nan=False)
    assert Preprocessing.from_dict(json.loads(text)) == preprocessing


def test_the_json_says_what_to_feed_in() -> None:
    described = Preprocessing(
        3, 8, 9, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), resize=10, colours="RGB", class_names=("cat", "dog")
    )
    expected = {
        "dtype": "float32",
        "layout": "NCHW",
        "channels": 3,
        "height": 8,
        "width": 9,
        "colours": "RGB",
        "resize": {"shorter_side": 10, "interpolation": "bilinear", "antialias": True, "crop": "centre"},
        "scale": 1 / 255,
        "mean": [0.1, 0.2, 0.3],
        "std": [0.4, 0.5, 0.6],
        "in_graph": False,
        "class_names": ["cat", "dog"],
    }
    assert described.to_dict() == expected
    assert described.input_shape == (3, 8, 9)
    inside = dataclasses.replace(described, in_graph=True)
    assert inside.to_dict() == expected | {"dtype": "uint8", "layout": "NHWC", "in_graph": True}
    assert inside.input_shape == (8, 9, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mean": [0.1]}, "mean has 1 value.*3 channels"),
        ({"std": [0.1, 0.2, 0.0]}, "std must be positive"),
        ({"mean": [0.1, 0.2, float("nan")]}, "mean must hold finite numbers"),
        ({"height": 0}, "height must be a whole number of at least 1, got 0"),
        ({"width": 2.5}, "width must be a whole number"),
        ({"resize": {"shorter_side": 10}}, "resize"),
        ({"resize": 10}, "resize"),
        ({"scale": 1.0}, "scale is 1.0"),
        ({"layout": "NHWC"}, "layout is 'NHWC'"),
        ({"dtype": "uint8"}, "dtype is 'uint8'"),
        ({"in_graph": 1}, "in_graph"),
        ({"colours": "BGR"}, "colours"),
        ({"class_names": ["cat", 1]}, "class_names"),
        ({"extra": 1}, r"unknown \['extra'\]"),
    ],
)
def test_json_that_says_something_else_is_refused(change: dict[str, Any], message: str) -> None:
    right = Preprocessing(3, 8, 8, (0.1,) * 3, (0.4,) * 3, colours="RGB").to_dict()
    with pytest.raises(DataError, match=message):
        Preprocessing.from_dict(right | change)
    del right["mean"]
    with pytest.raises(DataError, match=r"missing \['mean'\]"):
        Preprocessing.from_dict(right)
    with pytest.raises(DataError, match="object"):
        Preprocessing.from_dict([right])


def by_hand(data: ImageData, images: np.ndarray) -> np.ndarray:
    """What a reader of the JSON would write in numpy."""
    said = json.loads(json.dumps(data.preprocessing.to_dict()))
    mean, std = np.array(said["mean"]), np.array(said["std"])
    planes: np.ndarray = ((images * said["scale"] - mean) / std).transpose(0, 3, 1, 2)
    return planes.astype(said["dtype"])


def test_it_is_what_training_does_to_the_images() -> None:
    data = load_dataset("digits", mean=[0.3], std=[0.25])
    images = data.heldout.x[:20].permute(0, 2, 3, 1)
    (trained_on, _), *_ = batches(data.heldout, 20, mean=data.mean, std=data.std)
    normalised = data.preprocessing.normalised(images)
    assert torch.equal(normalised, trained_on)
    assert normalised.is_contiguous()
    np.testing.assert_allclose(by_hand(data, images.numpy()), trained_on.numpy(), atol=1e-6)


@pytest.mark.parametrize(
    "images", [torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.zeros(2, 8, 8, 1), torch.zeros(8, 8, 1)]
)
def test_other_images_are_refused(images: torch.Tensor) -> None:
    with pytest.raises(DataError, match=r"uint8 of shape \(N, 8, 8, 1\)"):
        load_dataset("digits").preprocessing.normalised(images)


def small_arrays(classes: int, channels: int = 3) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (2, 3 * classes, 8, 8, channels), dtype=np.uint8)
    labels = np.arange(3 * classes) % classes
    return {"x_train": images[0], "y_train": labels, "x_test": images[1], "y_test": labels}


def test_digits_are_named_by_their_digits(tmp_path: Path) -> None:
    np.savez(tmp_path / "mnist.npz", **small_arrays(10, 1))
    for data in (load_dataset("digits"), load_dataset("mnist", root=tmp_path)):
        assert data.class_names == tuple("0123456789")
        assert data.preprocessing.class_names == data.class_names
        assert data.preprocessing.colours is None
        assert data.preprocessing.resize is None


def test_cifar_has_its_published_names(tmp_path: Path) -> None:
    for classes in (10, 100):
        np.savez(tmp_path / f"cifar{classes}.npz", **small_arrays(classes))
    ten, hundred = (load_dataset(name, root=tmp_path).preprocessing for name in ("cifar10", "cifar100"))
    assert ten.class_names is not None
    assert hundred.class_names is not None
    assert (ten.class_names[0], ten.class_names[3], ten.class_names[9]) == ("airplane", "cat", "truck")
    # The fine labels are numbered in alphabetical order (Krizhevsky 2009).
    assert list(hundred.class_names) == sorted(set(hundred.class_names))
    assert (len(ten.class_names), len(hundred.class_names)) == (10, 100)
    assert (hundred.class_names[47], hundred.class_names[99]) == ("maple_tree", "worm")
    assert ten.colours == hundred.colours == "RGB"


def test_an_image_folder_has_its_folders_names_and_says_how_it_resizes(tmp_path: Path) -> None:
    for part in ("train", "val"):
        for name in ("zebra", "ant"):
            (tmp_path / part / name).mkdir(parents=True)
            for index in range(5):
                Image.new("RGB", (20, 12), (index, 50, 90)).save(tmp_path / part / name / f"{index}.png")
    preprocessing = load_dataset("imagefolder", path=tmp_path, size=8, resize=10).preprocessing
    assert preprocessing.class_names == ("ant", "zebra")
    assert (preprocessing.resize, preprocessing.height, preprocessing.width) == (10, 8, 8)
    assert preprocessing.colours == "RGB"
    assert load_dataset("imagefolder", path=tmp_path, size=8).preprocessing.resize == 8


def test_an_npz_may_name_its_classes(tmp_path: Path) -> None:
    raw = small_arrays(3)
    np.savez(tmp_path / "plain.npz", **raw)
    assert load_dataset("npz", path=tmp_path / "plain.npz").class_names is None
    np.savez(tmp_path / "named.npz", **raw, class_names=["cat", "dog", "eel", "fly"])
    named = load_dataset("npz", path=tmp_path / "named.npz")
    assert named.class_names == ("cat", "dog", "eel", "fly")
    assert named.classes == 4
    assert named.preprocessing.colours is None
    assert named.preprocessing.mean == named.mean


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["cat", "dog"], {}, "label is 2, but with 2 classes"),
        (["a", "b", "c"], {"classes": 4}, "3 class names for 4 classes"),
        ([1, 2, 3], {}, "class_names must be text of shape"),
        ([["a", "b", "c"]], {}, "class_names must be text of shape"),
        (["a", "b", "b"], {}, "names 'b' twice"),
    ],
)
def test_names_that_do_not_fit_are_refused(
    tmp_path: Path, names: list[Any], options: dict[str, Any], message: str
) -> None:
    np.savez(tmp_path / "d.npz", **small_arrays(3), class_names=names)
    with pytest.raises(DataError, match=message):
        load_dataset("npz", path=tmp_path / "d.npz", **options)


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.parametrize("name", ["cifar10", "cifar100", "mnist"])
def test_the_published_sets_have_a_name_for_every_label(name: str, data_folder: Path) -> None:
    if not (data_folder / f"{name}.npz").is_file():
        pytest.skip(f"{data_folder} holds no {name}.npz")
    data = load_dataset(name, root=data_folder)
    assert data.class_names is not None
    assert len(data.class_names) == data.classes == int(data.test.for_report().y.max()) + 1
