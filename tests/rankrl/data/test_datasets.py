"""What holds for every dataset, and what is refused."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from rankrl.data import (
    Augmentation,
    ImageData,
    Images,
    SourceFiles,
    dataset_source,
    list_datasets,
    load_dataset,
    register_dataset,
)
from rankrl.data.datasets import channel_statistics, stratified_split
from rankrl.errors import ConfigError, DataError


def arrays(
    count: int = 40, size: int = 8, channels: int | None = 3, classes: int = 4
) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    shape = (size, size) if channels is None else (size, size, channels)
    return {
        "x_train": generator.integers(0, 256, (count, *shape), dtype=np.uint8),
        "y_train": np.arange(count) % classes,
        "x_test": generator.integers(0, 256, (count // 2, *shape), dtype=np.uint8),
        "y_test": np.arange(count // 2) % classes,
    }


def write_image_folder(root: Path, counts: dict[str, int]) -> None:
    for part, classes in (("train", counts), ("val", counts)):
        for number, (name, count) in enumerate(classes.items()):
            (root / part / name).mkdir(parents=True)
            for index in range(count):
                pixels = np.full((9 + index, 12, 3), 10 * number + index, dtype=np.uint8)
                Image.fromarray(pixels).save(root / part / name / f"{index}.png")


def load_any(name: str, folder: Path) -> ImageData:
    if name == "imagefolder":
        write_image_folder(folder / "images", {"cat": 6, "dog": 4})
        return load_dataset(name, path=folder / "images", size=8)
    if name == "digits":
        return load_dataset(name)
    shape = {"mnist": (None, 10), "cifar100": (3, 100)}.get(name, (3, 10))
    np.savez(folder / f"{name}.npz", **arrays(200, channels=shape[0], classes=shape[1]))  # type: ignore[arg-type]
    if name == "npz":
        return load_dataset(name, path=folder / "npz.npz")
    return load_dataset(name, root=folder)


@pytest.mark.parametrize("name", [name for name in list_datasets() if name != "inputs"])  # has no labels
def test_every_dataset_is_split_and_consistent(name: str, tmp_path: Path) -> None:
    data = load_any(name, tmp_path)
    test = data.test.for_report()
    assert data.name == name
    assert len(data.train) >= len(data.heldout) >= 1
    assert len(data.mean) == len(data.std) == data.input_shape[0]
    assert all(deviation > 0 for deviation in data.std)
    for images in (data.train, data.heldout, test):
        assert tuple(images.x.shape[1:]) == data.input_shape
        assert 0 <= int(images.y.min()) <= int(images.y.max()) < data.classes
    assert dataset_source(name).description


def test_digits_have_a_fixed_stratified_test_set_and_a_seeded_heldout_set() -> None:
    one, two = load_dataset("digits", seed=1), load_dataset("digits", seed=2)
    assert (len(one.train), len(one.heldout), len(one.test)) == (1151, 287, 359)
    assert one.input_shape == (1, 8, 8)
    assert int(one.train.x.max()) == 255
    assert torch.equal(one.test.for_report().x, two.test.for_report().x)
    assert not torch.equal(one.heldout.x, two.heldout.x)
    assert one.mean == two.mean
    assert not one.augmentation.flip


def test_train_and_heldout_partition_the_training_file(tmp_path: Path) -> None:
    raw = arrays(50)
    np.savez(tmp_path / "d.npz", **raw)  # type: ignore[arg-type]
    data = load_dataset("npz", path=tmp_path / "d.npz", heldout=13)
    assert len(data.heldout) == 13
    together = torch.cat([data.train.x, data.heldout.x]).permute(0, 2, 3, 1).numpy()
    assert {image.tobytes() for image in together} == {image.tobytes() for image in raw["x_train"]}
    assert np.array_equal(data.test.for_report().x.permute(0, 2, 3, 1).numpy(), raw["x_test"])


def test_measured_statistics_are_those_of_numpy() -> None:
    x = torch.randint(0, 256, (20, 2, 5, 5), dtype=torch.uint8)
    x[:, 1] = 51
    mean, std = channel_statistics(Images(x, torch.zeros(20, dtype=torch.int64)))
    assert mean == pytest.approx((np.mean(x[:, 0].numpy() / 255), 0.2))
    assert std == pytest.approx((np.std(x[:, 0].numpy() / 255), 1.0))


def test_normalisation_and_augmentation_can_be_given() -> None:
    data = load_dataset("digits", mean=[0.5], std=[0.25], padding=2, flip=True)
    assert (data.mean, data.std) == ((0.5,), (0.25,))
    assert data.augmentation == Augmentation(2, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heldout": 0}, "between 1 and 1437"),
        ({"heldout": 1438}, "between 1 and 1437"),
        ({"heldout": 0.5}, r"got 0\.5"),
        ({"std": [0.0]}, "std must be positive"),
        ({"colour": "red"}, "has no option 'colour'"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_dataset("digits", **options)  # type: ignore[arg-type]


def test_a_mean_for_other_channels_is_refused() -> None:
    with pytest.raises(DataError, match="mean has 3 values, but the images have 1 channel;"):
        load_dataset("digits", mean=[0.1, 0.2, 0.3])


def test_an_unknown_dataset_gets_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'cifar10'"):
        load_dataset("cifar1O")


@pytest.mark.parametrize("name", ["npz", "imagefolder"])
def test_a_path_must_be_given(name: str) -> None:
    with pytest.raises(ConfigError, match="needs the option 'path'"):
        load_dataset(name)
    with pytest.raises(ConfigError, match="needs the option 'path'"):
        load_dataset(name, path=None)


def test_a_name_is_registered_once() -> None:
    def read(root: Path) -> SourceFiles:
        raise AssertionError(root)

    with pytest.raises(ConfigError, match=r"there is a dataset .* already"):
        register_dataset("digits", "again", augmentation=Augmentation())(read)


# --- .npz files ------------------------------------------------------------------------------------------


def test_the_environment_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "mnist.npz", **arrays(60, channels=None, classes=10))  # type: ignore[arg-type]
    monkeypatch.setenv("RANKRL_DATA", str(tmp_path))
    assert load_dataset("mnist").input_shape == (1, 8, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_train": np.zeros((40, 8, 8, 3))}, "must be uint8"),
        ({"x_train": np.zeros((40, 192), np.uint8)}, r"\(N, height, width, channels\)"),
        ({"x_train": np.zeros((40, 3, 8, 8), np.uint8)}, "look like"),
        ({"x_test": np.zeros((20, 9, 9, 3), np.uint8)}, "must be the same"),
        ({"y_train": np.zeros(40)}, "must be integers"),
        ({"y_train": np.zeros((40, 1), np.int64)}, "must be integers of shape"),
        ({"y_train": np.arange(39)}, "40 images but 39 labels"),
        ({"y_train": np.full(40, -1)}, "from 0 on"),
        ({"y_train": np.arange(40) * 2**30}, "from 0 on, got 0 to 41875931136"),
        ({"y_train": np.zeros(40, np.int64)}, "at least 2"),
        ({"y_test": np.full(20, 4)}, "a test label is 4, but with 4 classes labels run from 0 to 3"),
        ({"x_train": np.zeros((0, 8, 8, 3), np.uint8), "y_train": np.zeros(0, int)}, "no training images"),
        ({"y_train": np.array([{}] * 40, dtype=object)}, "allow_pickle=False"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    change: dict[str, np.ndarray], message: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "d.npz", **(arrays() | change))  # type: ignore[arg-type]
    with pytest.raises(DataError, match=message):
        load_dataset("npz", path=tmp_path / "d.npz")


def test_a_missing_array_is_named(tmp_path: Path) -> None:
    raw = arrays()
    del raw["y_test"]
    np.savez(tmp_path / "d.npz", **raw)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="lacks y_test"):
        load_dataset("npz", path=tmp_path / "d.npz")


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "d.npz"
    with pytest.raises(DataError, match="there is no dataset file"):
        load_dataset("npz", path=path)
    np.savez_compressed(path, **arrays())  # type: ignore[arg-type]
    content = path.read_bytes()
    damaged = [
        content[: len(content) // 2],
        b"",
        b"not a zip file",
        content[:300] + bytes(400) + content[700:],
    ]
    for part in damaged:
        path.write_bytes(part)
        with pytest.raises(DataError, match="damaged"):
            load_dataset("npz", path=path)
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(DataError, match="single array"):
        load_dataset("npz", path=path)


# --- torchvision's files and downloads -------------------------------------------------------------------


class FakeDownload:
    """Stands for a class of torchvision.datasets."""

    def __init__(self, root: str, train: bool, download: bool) -> None:
        assert download
        generator = np.random.default_rng(train)
        self.data = generator.integers(0, 256, (60, 32, 32, 3), dtype=np.uint8)
        self.targets = [index % 10 for index in range(60)]


@pytest.mark.parametrize(("first", "given"), [(0, {}), (1, {}), (1, {"classes": 5})])
def test_labels_that_begin_at_one_are_pointed_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, first: int, given: dict[str, int]
) -> None:
    raw = arrays()
    np.savez(tmp_path / "d.npz", **(raw | {name: raw[name] + first for name in ("y_train", "y_test")}))  # type: ignore[arg-type]
    data = load_dataset("npz", path=tmp_path / "d.npz", **given)
    assert data.classes == 4 + first
    assert ("subtract 1 from all labels" in caplog.text) == (first == 1 and not given)


def test_torchvision_is_asked_when_there_is_no_npz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchvision.datasets, "CIFAR10", FakeDownload)
    data = load_dataset("cifar10", root=tmp_path)
    assert (len(data.train), len(data.heldout), len(data.test)) == (48, 12, 60)
    assert data.input_shape == (3, 32, 32)


def test_a_failed_download_says_what_to_place_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(root: str, train: bool, download: bool) -> None:
        raise OSError("network is unreachable")

    monkeypatch.setattr(torchvision.datasets, "CIFAR100", fail)
    with pytest.raises(DataError, match=r"network is unreachable.*Place a file .*cifar100\.npz.*RANKRL_DATA"):
        load_dataset("cifar100", root=tmp_path)


def test_without_torchvision_the_npz_still_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(DataError, match="torchvision fails"):
        load_dataset("mnist", root=tmp_path)
    np.savez(tmp_path / "mnist.npz", **arrays(60, channels=None, classes=10))  # type: ignore[arg-type]
    assert load_dataset("mnist", root=tmp_path).classes == 10


# --- image folders ---------------------------------------------------------------------------------------


def test_an_image_folder_is_decoded_resized_and_labelled(tmp_path: Path) -> None:
    write_image_folder(tmp_path, {"dog": 3, "cat": 5})
    data = load_dataset("imagefolder", path=tmp_path, size=8, resize=10, heldout=2)
    assert data.input_shape == (3, 8, 8)
    assert data.classes == 2
    test = data.test.for_report()
    # Classes are numbered alphabetically; the pixels written were 10 * (dog 0, cat 1) + index.
    assert test.y.tolist() == [0] * 5 + [1] * 3
    assert test.x[:, 0, 0, 0].tolist() == [10, 11, 12, 13, 14, 0, 1, 2]


def test_the_centre_of_a_grey_image_is_kept(tmp_path: Path) -> None:
    write_image_folder(tmp_path, {"a": 4, "b": 4})
    stripes = np.zeros((4, 12), dtype=np.uint8)
    stripes[:, 4:8] = 200
    Image.fromarray(stripes).save(tmp_path / "val" / "a" / "0.png")
    data = load_dataset("imagefolder", path=tmp_path, size=4)
    assert torch.equal(data.test.for_report().x[0], torch.full((3, 4, 4), 200, dtype=torch.uint8))


def test_folders_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no folder"):
        load_dataset("imagefolder", path=tmp_path / "none")
    (tmp_path / "train").mkdir()
    with pytest.raises(DataError, match="`val` or `test`"):
        load_dataset("imagefolder", path=tmp_path)
    (tmp_path / "val").mkdir()
    with pytest.raises(DataError, match="at least two class folders"):
        load_dataset("imagefolder", path=tmp_path)
    (tmp_path / "train" / "a").mkdir()
    (tmp_path / "train" / "b").mkdir()
    with pytest.raises(DataError, match=r"class folder .*train/a holds no image files"):
        load_dataset("imagefolder", path=tmp_path)


@pytest.mark.parametrize("part", ["train", "val"])
def test_a_class_without_images_is_named(tmp_path: Path, part: str) -> None:
    write_image_folder(tmp_path, {"a": 4, "b": 4, "c": 4})
    for file in (tmp_path / part / "b").iterdir():
        file.rename(file.with_suffix(".txt"))
    with pytest.raises(DataError, match=rf"class folder .*{part}/b holds no image files .*or remove it"):
        load_dataset("imagefolder", path=tmp_path)


def test_a_class_that_only_the_test_folder_has_is_refused(tmp_path: Path) -> None:
    write_image_folder(tmp_path, {"a": 4, "b": 4})
    (tmp_path / "val" / "c").mkdir()
    with pytest.raises(DataError, match="a class that the training folder lacks"):
        load_dataset("imagefolder", path=tmp_path)


def test_a_file_that_is_no_image_is_named(tmp_path: Path) -> None:
    write_image_folder(tmp_path, {"a": 4, "b": 4})
    (tmp_path / "train" / "b" / "broken.jpg").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"cannot decode the image .*broken\.jpg"):
        load_dataset("imagefolder", path=tmp_path)


@pytest.mark.parametrize(("size", "resize"), [(0, None), (2.5, None), (8, 7), (8, 9.5)])
def test_sizes_out_of_range_are_refused(tmp_path: Path, size: int, resize: int | None) -> None:
    with pytest.raises(ConfigError, match=r"dataset\.(size|resize) must be"):
        load_dataset("imagefolder", path=tmp_path, size=size, resize=resize)


def test_fewer_training_images_are_drawn_by_class_and_never_held_out() -> None:
    whole, part = load_dataset("digits"), load_dataset("digits", train_images=200)
    assert len(part.train) == 200
    assert torch.equal(part.heldout.x, whole.heldout.x)
    shares = [torch.bincount(data.train.y).double() / len(data.train) for data in (whole, part)]
    assert (shares[0] - shares[1]).abs().max() < 0.01
    known = {image.numpy().tobytes() for image in whole.train.x}
    assert all(image.numpy().tobytes() in known for image in part.train.x)


@pytest.mark.parametrize("count", [0, -1, 10_000])
def test_an_impossible_number_of_training_images_is_refused(count: int) -> None:
    with pytest.raises(ConfigError, match=r"dataset\.train_images must lie between 1 and"):
        load_dataset("digits", train_images=count)


@given(labels=st.lists(st.integers(0, 4), max_size=60), share=st.floats(0, 1), seed=st.integers(0, 9))
def test_the_two_sides_partition_the_indices_by_each_class_share(
    labels: list[int], share: float, seed: int
) -> None:
    y = torch.tensor(labels, dtype=torch.int64)
    size = int(share * len(labels))
    stay, drawn = stratified_split(y, size, seed)
    assert len(drawn) == size
    assert sorted(stay.tolist() + drawn.tolist()) == list(range(len(labels)))
    assert stay.tolist() == sorted(stay.tolist())
    for label in set(labels):
        exact = labels.count(label) * size / len(labels)
        assert abs(int((y[drawn] == label).sum()) - exact) < 1


def test_the_seed_decides_the_draw() -> None:
    y = torch.arange(100) % 5
    assert torch.equal(stratified_split(y, 20, 3)[1], stratified_split(y, 20, 3)[1])
    assert not torch.equal(stratified_split(y, 20, 3)[1], stratified_split(y, 20, 4)[1])


@pytest.mark.parametrize("size", [-1, 6])
def test_more_than_there_are_cannot_be_drawn(size: int) -> None:
    with pytest.raises(ValueError, match=f"cannot draw {size} of 5"):
        stratified_split(torch.zeros(5, dtype=torch.int64), size, 0)
