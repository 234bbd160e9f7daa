"""Inputs: reading, checking, splitting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from small_graphs import convolutions, images, network_of, sentences, tokens

from rankrl.onnx.graph import OnnxGraphError, OnnxNetwork, read_inputs, split_inputs
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
