"""A file is whole or absent, whatever goes wrong while it is written."""

import errno
import json
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from decomposition import apply_plan, errors, make_plan, save_compressed
from decomposition.files import replacing
from rankrl.errors import StorageError
from rankrl.files import atomic_path, storage_errors, write_atomically, write_json
from rankrl.models import save_checkpoint
from rankrl.state_file import write_state

REFUSED = (StorageError, errors.StorageError)


def test_text_and_bytes_arrive_whole_and_nothing_else_is_left(tmp_path: Path) -> None:
    write_atomically(tmp_path / "new" / "a.txt", "é\n")
    write_atomically(tmp_path / "new" / "b.bin", b"\x00\x01")
    assert (tmp_path / "new" / "a.txt").read_bytes() == "é\n".encode()
    assert (tmp_path / "new" / "b.bin").read_bytes() == b"\x00\x01"
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["a.txt", "b.bin"]


def test_a_failed_write_leaves_the_old_file_and_no_temporary_one(tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    target.write_text("old")

    def write_half() -> None:
        with atomic_path(target) as temporary:
            temporary.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        write_half()
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_the_temporary_name_keeps_folder_and_suffix(tmp_path: Path) -> None:
    with atomic_path(tmp_path / "model.onnx") as temporary:
        assert temporary.parent == tmp_path
        assert temporary.suffix == ".onnx"
        temporary.write_bytes(b"x")
    assert (tmp_path / "model.onnx").read_bytes() == b"x"


def test_a_full_disk_is_a_storage_error_that_names_the_file(tmp_path: Path) -> None:
    with (
        pytest.raises(StorageError, match=r"cannot write .*a\.bin.*No space left"),
        atomic_path(tmp_path / "a.bin"),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let the system refuse what makes a file larger than `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_whoever_writes_a_file_says_what_to_do_where_the_system_refuses_it(tmp_path: Path) -> None:
    """safetensors writes from Rust and has errors of its own."""
    dense = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval()
    plan = make_plan(dense, (64,), "tucker", ranks=16)
    small = apply_plan(dense, plan)
    writers: list[Callable[[Path], object]] = [
        lambda path: save_compressed(small, plan, path),
        lambda path: write_atomically(path, bytes(5000)),
        lambda path: save_checkpoint(dense, path),
        lambda path: write_state(path, dense.state_dict(), {}, version=1),
    ]
    path = tmp_path / "model.safetensors"
    path.write_text("before")
    for write in writers:
        with largest_file(4096), pytest.raises(REFUSED, match=r"cannot write .*/model\.safetensors"):
            write(path)
        assert [each.name for each in tmp_path.iterdir()] == [path.name]
        assert path.read_text() == "before"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_temporary_folder_is_a_storage_error_too(number: int) -> None:
    with (
        pytest.raises(StorageError, match=r"cannot write /scratch/x\.onnx: .*that the disk has room"),
        storage_errors(),
    ):
        raise OSError(number, os.strerror(number), "/scratch/x.onnx")
    with pytest.raises(StorageError, match="No space left"), storage_errors():
        raise SafetensorError("I/O error: No space left on device (os error 28)")
    with pytest.raises(FileNotFoundError), storage_errors():  # of something that was to be read
        Path("nowhere").read_text()


def test_a_folder_that_cannot_be_made_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        write_atomically(tmp_path / "file" / "below", "x")


def test_json_is_standard_json(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": [1, 2.5, None]})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": [1, 2.5, None]}
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "a.json", {"x": float("nan")})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": [1, 2.5, None]}


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_a_file_has_the_mode_of_any_new_file_whoever_writes_it(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        write_json(tmp_path / "own.json", {})
        with atomic_path(tmp_path / "tensors.safetensors") as temporary:
            save_file({"x": torch.zeros(2)}, temporary)  # safetensors writes for the owner alone
        with replacing(tmp_path / "model.safetensors") as temporary:
            save_file({"x": torch.zeros(2)}, temporary)
    finally:
        os.umask(before)
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {
        "own.json": mode,
        "tensors.safetensors": mode,
        "model.safetensors": mode,
    }


def test_a_block_that_writes_nothing_makes_no_file(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot write"), atomic_path(tmp_path / "a.txt"):
        pass
    assert not list(tmp_path.iterdir())
