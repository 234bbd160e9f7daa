"""What is kept between runs: keys tell apart what values depend on, and only whole values are read."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decomposition.cache import Cache, digest
from decomposition.calibration.metric import RowFactor
from decomposition.errors import StorageError

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@dataclass
class Setting:
    """Something that a value depends on."""

    size: int
    name: str = ""


def refuse() -> Any:
    raise AssertionError("this should have come from the folder")


@given(PLAIN, PLAIN)
def test_values_have_equal_digests_where_they_are_written_alike(first: Any, second: Any) -> None:
    assert (digest(first) == digest(second)) == (repr(first) == repr(second))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("ab", "c"), ("a", "bc")),
        ((["a"], "b"), (["a", "b"],)),
        ((b"ab",), ("ab",)),
        ((torch.zeros(2, 3),), (torch.zeros(3, 2),)),
        ((torch.zeros(2),), (torch.zeros(2, dtype=torch.float64),)),
        ((torch.zeros(2),), (torch.tensor([0.0, 1e-30]),)),
        ((np.zeros(3),), (np.zeros((3, 1)),)),
        ((np.arange(3),), (np.arange(3.0),)),
        ((Setting(1),), (Setting(1, "a"),)),
        ((Setting(1),), ({"size": 1, "name": ""},)),
        ((RowFactor(torch.ones(1, 2), 0.0),), (RowFactor(torch.ones(1, 2), 1.0),)),
        (({"a": 1, "b": 2},), ({"b": 1, "a": 2},)),
    ],
)
def test_what_differs_has_another_digest(first: tuple[Any, ...], second: tuple[Any, ...]) -> None:
    assert digest(*first) != digest(*second)
    assert digest(*first) == digest(*first)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64, torch.int8, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 2), (4, 6)])
def test_tensors_count_by_their_numbers_however_they_lie_in_memory(kind: Any, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape).to(kind)
    assert digest(tensor) == digest(tensor.clone())
    if len(shape) == 2:
        assert digest(tensor) == digest(tensor.T.contiguous().T)
    if kind is not torch.bfloat16:
        assert digest(tensor.numpy()) == digest(tensor.numpy().copy())


def test_a_value_read_from_json_has_the_digest_that_it_had_before() -> None:
    value = {"sites": (1, 0.1), "fraction": 0.6}
    numpy = {"sites": (np.int64(1), np.float64(0.1)), "fraction": np.float64(0.6)}
    assert digest(value) == digest(json.loads(json.dumps(value))) == digest(numpy)


def test_an_object_that_only_says_where_it_lies_is_no_part_of_a_key() -> None:
    with pytest.raises(TypeError, match="cannot be part of a key"):
        digest([object()])


def test_a_value_is_computed_once(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "deep" / "cache")
    assert cache.value("times", "1", lambda: {"a": [1.5, None]}) == {"a": [1.5, None]}
    assert cache.value("times", "1", refuse) == {"a": [1.5, None]}
    assert cache.value("times", "2", lambda: (3, np.float64(0.1))) == [3, 0.1]
    assert cache.value("other", "1", lambda: 4) == 4


def test_tensors_come_back_bit_by_bit(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 4, dtype=torch.float64).T, "b": torch.tensor(0.1, dtype=torch.float64)}
    Cache(tmp_path).tensors("fit", "1", lambda: tensors)
    kept = Cache(tmp_path).tensors("fit", "1", refuse)
    assert set(kept) == set(tensors)
    assert all(
        torch.equal(kept[name], each) and kept[name].dtype == each.dtype for name, each in tensors.items()
    )


def test_without_a_folder_nothing_is_kept() -> None:
    cache = Cache(None)
    assert cache.value("times", "1", lambda: 1) == 1
    assert cache.value("times", "1", lambda: 2) == 2


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe", b"\x00" * 64])
def test_a_damaged_value_is_computed_again(tmp_path: Path, damage: bytes) -> None:
    cache = Cache(tmp_path)
    for _ in range(2):
        assert cache.value("times", "1", lambda: 5) == 5
        assert cache.tensors("fit", "1", lambda: {"a": torch.ones(2)})["a"].tolist() == [1, 1]
        for path in tmp_path.iterdir():
            path.write_bytes(damage)


def test_of_processes_that_compute_at_once_all_go_on_with_the_first_value(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    assert cache.value("times", "1", lambda: cache.value("times", "1", lambda: 1) + 1) == 1


def test_a_reader_never_sees_a_part(tmp_path: Path) -> None:
    def once(number: int) -> int:
        return len(Cache(tmp_path).value("times", str(number % 5), lambda: [0.5] * 10_000))

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(once, range(100))) == {10_000}
    assert len(list(tmp_path.iterdir())) == 5


def test_a_file_in_the_folders_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(StorageError, match="cannot write"):
        Cache(tmp_path / "cache").value("times", "1", lambda: 1)


def test_a_file_is_written_once_and_brought_to_every_place(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / "net.onnx"
        cache.file("dense", "1", path, lambda path: path.write_text(path.parent.name))
        assert path.read_text() == "a"
    Cache(None).file("dense", "1", path, lambda path: path.write_text("anew"))
    assert path.read_text() == "anew"
    assert [each.name for each in (tmp_path / "cache").iterdir()] == ["dense-1.onnx"]
