"""Images are checked once, and test images cannot be taken for others."""

import dataclasses
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from rankrl.data import (
    Augmentation,
    ImageData,
    Images,
    Preprocessing,
    TestImages,
    augmented_copy,
    batches,
    load_dataset,
)
from rankrl.data.sources import decode_images
from rankrl.errors import ConfigError, DataError


def make(count: int = 6) -> Images:
    x = torch.arange(count * 2 * 3 * 4, dtype=torch.uint8).reshape(count, 2, 3, 4)
    return Images(x, torch.arange(count))


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (torch.zeros(2, 1, 4, 4), torch.zeros(2, dtype=torch.int64), "uint8"),
        (torch.zeros(2, 4, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64), r"\(N, C, H, W\)"),
        (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(2), "int64"),
        (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.int64), r"\(N,\)"),
        (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64), "2 images but 3"),
        (torch.zeros(1, 1, 4, 4, dtype=torch.uint8), torch.tensor([-1]), "from 0 on, got -1"),
    ],
)
def test_what_does_not_fit_is_refused(x: torch.Tensor, y: torch.Tensor, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Images(x, y)


def test_a_subset_holds_the_chosen_images_in_order() -> None:
    images = make()
    subset = images.subset(torch.tensor([4, 1]))
    assert torch.equal(subset.x, images.x[[4, 1]])
    assert subset.y.tolist() == [4, 1]
    assert len(images.subset(torch.tensor([], dtype=torch.int64))) == 0


def test_test_images_show_their_pixels_only_on_request() -> None:
    images = make()
    test = TestImages(images)
    assert not isinstance(test, Images)
    assert not hasattr(test, "x")
    assert len(test) == len(images)
    assert test.for_report() is images


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


SHADES = np.arange(256, dtype=np.uint8).reshape(16, 16)
WIDE = SHADES.astype(np.uint16) * 257


def decoded(file: Path) -> NDArray[np.uint8]:
    return decode_images([file], 16, 16, 16, "L")[0, ..., 0]


def png(samples: NDArray[np.uint16], colour_type: int) -> bytes:
    """Write samples (height, width, channels) as a PNG of 16 bits, which Pillow writes of grey alone."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    height, width, _ = samples.shape
    header = struct.pack(">IIBBBBB", width, height, 16, colour_type, 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in samples)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def tiff(bits: int, photometric: int, rows: bytes) -> bytes:
    """Write grey samples of 16 x 16 pixels as a little-endian TIFF of one strip."""
    tags = {256: 16, 257: 16, 258: bits, 259: 1, 262: photometric, 273: 8, 277: 1, 278: 16, 279: len(rows)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return (
        b"II*\0"
        + struct.pack("<I", 8 + len(rows))
        + rows
        + struct.pack("<H", len(tags))
        + entries
        + b"\0" * 4
    )


def twelve_bits(values: NDArray[np.uint16]) -> bytes:
    """Pack two samples into three bytes."""
    first, second = values.reshape(-1, 2).T
    packed = np.stack([first >> 4, (first & 15) << 4 | second >> 8, second & 255], axis=1)
    return packed.astype(np.uint8).tobytes()


@pytest.mark.parametrize(
    ("name", "pixels"),
    [
        ("grey.png", WIDE),
        ("grey.tif", WIDE),
        ("big_endian.tif", WIDE.astype(">u2")),
        ("floats.tif", (SHADES / 255).astype(np.float32)),
    ],
)
def test_shades_of_more_than_8_bits_are_those_of_8(
    name: str, pixels: NDArray[np.generic], tmp_path: Path
) -> None:
    Image.fromarray(pixels).save(tmp_path / name)
    np.testing.assert_array_equal(decoded(tmp_path / name), SHADES)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("alpha.png", png(np.stack([WIDE, WIDE[::-1]], axis=-1), 4)),
        ("colours.png", png(np.stack([WIDE] * 3, axis=-1), 2)),
        ("grey.ppm", b"P5 16 16 65535\n" + WIDE.astype(">u2").tobytes()),
        ("white_is_zero.tif", tiff(16, 0, (65535 - WIDE).astype("<u2").tobytes())),
    ],
)
def test_files_of_other_writers_show_the_same(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    np.testing.assert_array_equal(decoded(tmp_path / name), SHADES)


def test_samples_of_12_bits_go_up_to_4095(tmp_path: Path) -> None:
    shades = np.rint(SHADES * (4095 / 255)).astype(np.uint16)
    (tmp_path / "camera.tif").write_bytes(tiff(12, 1, twelve_bits(shades)))
    np.testing.assert_array_equal(decoded(tmp_path / "camera.tif"), SHADES)


@pytest.mark.parametrize("mode", ["LA", "P", "CMYK", "1"])
def test_other_modes_are_what_pillow_makes_of_them(mode: str, tmp_path: Path) -> None:
    image = (
        Image.fromarray(SHADES).convert("RGB").convert(mode)
        if mode != "LA"
        else Image.new("LA", (16, 16), (9, 3))
    )
    image.save(tmp_path / "image.tif")
    np.testing.assert_array_equal(decoded(tmp_path / "image.tif"), np.asarray(image.convert("L")))


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (SHADES.astype(np.float32), r"numbers from 0 to 255, .*scale them to \[0, 1\]"),
        (np.full((16, 16), np.nan, np.float32), "numbers from nan"),
        (SHADES.astype(np.int32), "32 bits or with a sign"),
    ],
)
def test_files_that_do_not_say_what_white_is_are_named(
    pixels: NDArray[np.generic], message: str, tmp_path: Path
) -> None:
    Image.fromarray(pixels).save(tmp_path / "odd.tif")
    with pytest.raises(DataError, match=rf"odd\.tif: its pixels are .*{message}"):
        decoded(tmp_path / "odd.tif")


@given(
    count=st.integers(1, 5),
    channels=st.integers(1, 4),
    height=st.integers(1, 7),
    width=st.integers(1, 7),
    padding=st.integers(0, 3),
    flip=st.booleans(),
    seed=st.integers(0, 100),
)
def test_crops_equal_slicing_each_padded_image(
    count: int, channels: int, height: int, width: int, padding: int, flip: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(1, 256, (count, channels, height, width), dtype=torch.uint8, generator=generator)
    crops = Augmentation(padding, flip).draw(count, generator)
    result = crops.apply(x)
    assert result.dtype == torch.uint8
    for image, top, left, mirrored, found in zip(
        x, crops.top.tolist(), crops.left.tolist(), crops.mirrored.tolist(), result, strict=True
    ):
        crop = F.pad(image, (padding,) * 4)[:, top : top + height, left : left + width]
        assert torch.equal(found, crop.flip(2) if mirrored else crop)


def test_every_offset_occurs_and_half_of_the_images_are_mirrored() -> None:
    crops = Augmentation(padding=2, flip=True).draw(5000, torch.Generator().manual_seed(0))
    assert set(crops.top.tolist()) == set(crops.left.tolist()) == set(range(5))
    assert abs(crops.mirrored.double().mean().item() - 0.5) < 0.03


def test_nothing_happens_without_padding_and_flip() -> None:
    x = torch.randint(0, 256, (4, 3, 5, 6), dtype=torch.uint8)
    crops = Augmentation(padding=0, flip=False).draw(4, torch.Generator().manual_seed(0))
    assert torch.equal(crops.apply(x), x)


@pytest.mark.parametrize("padding", [-1, 1.5, True])
def test_a_padding_that_is_no_pixel_count_is_refused(padding: float) -> None:
    with pytest.raises(ConfigError, match="padding"):
        Augmentation(padding=padding)  # type: ignore[arg-type]


def test_a_copy_is_augmented_once_keeps_labels_and_follows_its_seed() -> None:
    images = Images(torch.randint(0, 256, (1203, 1, 8, 8), dtype=torch.uint8), torch.arange(1203))
    augmentation = Augmentation(padding=1, flip=True)
    first, again, other = (augmented_copy(images, augmentation, seed) for seed in (1, 1, 2))
    assert torch.equal(first.x, again.x)
    assert not torch.equal(first.x, other.x)
    assert torch.equal(first.y, images.y)
    crops = augmentation.draw(1203, torch.Generator().manual_seed(1))
    assert torch.equal(first.x, crops.apply(images.x))
