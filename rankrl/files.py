"""Write files atomically; list, set aside and remove the files of a run."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any

from safetensors import SafetensorError

from decomposition import errors
from decomposition.files import cannot_write, replacing, watching_writes
from rankrl.errors import ConfigError, StorageError

_FULL = (errno.ENOSPC, errno.EDQUOT)  # the disk or the user's quota


def write_atomically(path: str | Path, data: bytes | str) -> None:
    """Write `data` to `path`, which never holds a part of it; create missing parent folders."""
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        file.write(data.encode("utf-8") if isinstance(data, str) else data)


def write_json(path: str | Path, value: Any) -> None:
    """Write `value` as indented, standard JSON, atomically."""
    write_atomically(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_object(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file; an empty one if it cannot be read or is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path for a library that writes to a path itself.

    The temporary name lies in the folder of `path` and keeps its suffix. When the block ends normally the
    temporary file is flushed to the disk and renamed to `path`, with the mode of any new file; when it
    raises, the file is removed.
    """
    target = Path(path)
    with storage_errors():
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(cannot_write(target, error)) from error
        with replacing(target) as temporary:
            yield temporary


@contextmanager
def storage_errors() -> Iterator[None]:
    """Turn errors of the operating system while writing into `StorageError`; a block or a decorator."""
    try:
        yield
    except errors.StorageError as error:
        raise StorageError(str(error)) from error
    except (OSError, SafetensorError) as error:  # most likely of a temporary folder
        full = isinstance(error, OSError) and error.errno in _FULL
        if not full and "No space left" not in str(error):
            raise
        where = getattr(error, "filename", None) or tempfile.gettempdir()
        raise StorageError(cannot_write(Path(where), error)) from error


FILE_LIST = "state/files.json"
"""The list, in the run's folder."""
RECORD = "state/configuration.json"
"""The configuration of the run, in its folder."""
METRICS = "metrics.json"
"""The mark that a run has ended, in its folder."""
PREVIOUS = ".previous"
"""The folder that results wait in, in the run's own, until the run that replaces them has ended."""

RESULTS = (
    *(METRICS, "plan.json", "model.safetensors", "model.onnx", "report.html"),
    *(f"plots/{name}.png" for name in ("reward", "layers", "finetune", "rewards")),
)
"""Files that a run writes last, the mark first."""
_FILES = (
    *RESULTS,
    *("episodes.csv", "search.json", "candidates.json", "tpe.sqlite3", "dense.safetensors"),
    *("optimizer_step.onnx", "compare.csv", "compare.md"),
)
# File names in these folders, unlike those of `_FILES`, are known only when they are written.
_FOLDERS = ("state", "plots", "searches", "kit", ".hydra", "tensorboard", "tracking", "wandb")


def written_files(folder: Path) -> frozenset[str] | None:
    """List the names that runs wrote into a folder, directories with a slash; None without a list."""
    try:
        names = json.loads((folder / FILE_LIST).read_text(encoding="utf-8"))["files"]
        return frozenset(name for name in names if _is_own(name))
    except FileNotFoundError:
        return None if (folder / RECORD).is_file() else frozenset()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


@contextmanager
def recording(folder: Path) -> Iterator[None]:
    """Record the files written into a folder within the block, each before it exists."""
    root, lock = Path(os.path.abspath(folder)), Lock()

    def list_file(path: Path) -> None:
        place = Path(os.path.abspath(path))
        name = place.relative_to(root).as_posix() if place.is_relative_to(root) else ""
        if not _is_own(name) or name == FILE_LIST:
            return
        with lock:
            known = written_files(root)
            if known is None or name in known:
                return
            if os.path.lexists(place):
                raise StorageError(_in_the_way(folder, name))
            _write_list(root, known | {name})

    with watching_writes(list_file):
        yield


@contextmanager
def recording_entries(folder: Path, name: str) -> Iterator[None]:
    """Record the files that a library writes below one name in a folder, under names of its own."""
    before = set(_entries(folder / name))
    yield
    known, new = written_files(folder), [each for each in _entries(folder / name) if each not in before]
    if known is not None and new:
        names = {f"{name}/{each.name}{'/' if each.is_dir() else ''}" for each in new}
        _write_list(folder, known | names)


def check_own(folder: Path) -> None:
    """Refuse a folder with a file that no run wrote and the next one may replace."""
    known = written_files(folder)
    for name in _FILES:
        if known is not None and name not in known and os.path.lexists(folder / name):
            raise ConfigError(_in_the_way(folder, name))


def remove_written(folder: Path, names: Iterable[str] | None = None) -> None:
    """Remove the files that runs wrote into a folder, by default all, and directories that are empty then."""
    if names is None:
        names = [] if written_files(folder) is None else [*_listed(folder), FILE_LIST]
    for name in names:
        path = folder / name
        if name.endswith("/"):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        _remove_empty(path.parent, folder)


def set_aside(folder: Path) -> None:
    """Set aside the files of a finished run, and no others; the files of an unfinished run are removed."""
    if written_files(folder) is None:
        raise ConfigError(
            f"{folder} holds a run whose list of files, {folder / FILE_LIST}, is missing or damaged; without "
            "it nobody knows which files are yours, and nothing was removed. Remove the run yourself, or "
            "choose another folder"
        )
    if not (folder / METRICS).is_file():
        remove_written(folder)
        return
    remove_previous(folder)
    check_own(folder / PREVIOUS)
    names = _listed(folder)
    _write_list(folder / PREVIOUS, names)
    _move(folder, folder / PREVIOUS, names)
    remove_written(folder)


def bring_back(folder: Path) -> bool:
    """Restore the files set aside, in place of a run without results; tell whether there were any."""
    aside = folder / PREVIOUS
    names = _listed(aside)
    if METRICS not in names or not (aside / METRICS).is_file():
        return False
    remove_written(folder)
    _write_list(folder, names)
    _move(aside, folder, reversed(names))
    remove_previous(folder)
    return True


def remove_previous(folder: Path) -> None:
    """Remove the files set aside, once the run that replaces them has ended."""
    remove_written(folder / PREVIOUS)
    _remove_empty(folder / PREVIOUS, folder)


def _listed(folder: Path) -> list[str]:
    """List the files of runs, `metrics.json` first, so that a part is never taken for a finished run."""
    return sorted(written_files(folder) or (), key=lambda name: (name != METRICS, name))


def _write_list(folder: Path, names: Iterable[str]) -> None:
    write_json(folder / FILE_LIST, {"files": sorted(names)})


def _move(source: Path, target: Path, names: Iterable[str]) -> None:
    for name in names:
        if os.path.lexists(source / name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(source / name, target / name)
            _remove_empty((source / name).parent, source)


def _remove_empty(directory: Path, root: Path) -> None:
    """Remove an empty directory, and its empty parents up to the root."""
    with suppress(OSError):
        while directory != root:
            directory.rmdir()
            directory = directory.parent


def _entries(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.is_dir() else []


def _is_own(name: str) -> bool:
    """Tell whether runs write a file of this name, and the name stays within the folder."""
    first, *rest = name.split("/")
    return first in (_FOLDERS if rest else _FILES) and ".." not in rest


def _in_the_way(folder: Path, name: str) -> str:
    return (
        f"{folder} holds {name}, which no run wrote and a run would replace; move it to another place, or "
        "choose another folder for the run"
    )
