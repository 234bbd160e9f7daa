"""Atomic file writes: a reader sees the old file or the new one, never half of either."""

from __future__ import annotations

import errno
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from decomposition import errors
from decomposition.files import cannot_write, replacing
from rankrl.errors import StorageError

_FULL = (errno.ENOSPC, errno.EDQUOT)


def write_atomically(path: str | Path, data: bytes | str) -> None:
    """Write `data` to `path` so that `path` never holds a part of it.

    Missing parent folders are created.

    Args:
        path: The file to create or replace.
        data: Its whole content; text is written as UTF-8.

    Raises:
        StorageError: The folder cannot be written or the disk is full; `path` is as it was before.
    """
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        file.write(data.encode("utf-8") if isinstance(data, str) else data)


def write_json(path: str | Path, value: Any) -> None:
    """Write `value` as indented, standard JSON, atomically.

    Args:
        path: The file to create or replace.
        value: Anything `json` can write; NaN and infinities are refused, because standard JSON has neither.

    Raises:
        StorageError: The file cannot be written.
        ValueError: `value` holds NaN or an infinity.
    """
    write_atomically(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Give a temporary path to a library that insists on writing to a path itself.

    The temporary name lies in the folder of `path` and keeps its suffix. When the block ends normally the
    temporary file is flushed to the disk and renamed to `path`, with the mode of any new file; when it
    raises, the file is removed.

    Args:
        path: The file to create or replace; missing parent folders are created.

    Yields:
        The path to write to.

    Raises:
        StorageError: The system refused something in the block or while renaming (full disk, unwritable
            folder).
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
    """Turn what the system refuses while files are written into our error, as a block or as a decorator.

    Raises:
        StorageError: A library below could not write a file, or the disk is full.
    """
    try:
        yield
    except errors.StorageError as error:
        raise StorageError(str(error)) from error
    except (OSError, SafetensorError) as error:  # in a temporary folder, most likely
        full = isinstance(error, OSError) and error.errno in _FULL
        if not full and "No space left" not in str(error):
            raise
        where = getattr(error, "filename", None) or tempfile.gettempdir()
        raise StorageError(cannot_write(Path(where), error)) from error
