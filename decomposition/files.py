"""Write files atomically: a reader sees the old file or the new one, never a part of either."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from decomposition.errors import StorageError

_watchers: list[Callable[[Path], None]] = []


@contextmanager
def watching_writes(watch: Callable[[Path], None]) -> Iterator[None]:
    """Call `watch` with the path of every file before the block, in any thread, writes it."""
    _watchers.append(watch)
    try:
        yield
    finally:
        _watchers.remove(watch)


def announce_write(path: Path) -> None:
    """Notify the watchers of a file that is about to be written by other means than `replacing`."""
    for watch in tuple(_watchers):
        watch(path)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`, which is renamed to `path` if the block succeeds."""
    announce_write(path)
    temporary = path.with_name(f".{path.stem}-{secrets.token_hex(4)}{path.suffix}")
    try:
        mode = _mode_of_new_files(temporary)
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.chmod(mode)
        os.replace(temporary, path)
    except StorageError:  # from a nested write, with its own message
        raise
    except (OSError, SafetensorError) as error:  # safetensors wraps the system's errors in its own
        raise StorageError(cannot_write(path, error)) from error
    finally:
        temporary.unlink(missing_ok=True)


def cannot_write(path: Path, error: Exception) -> str:
    """Return the error message for a file that could not be written."""
    reason = (isinstance(error, OSError) and error.strerror) or str(error)
    return (
        f"cannot write {path}: {reason}. Check that the folder is writable and that the disk has room, or "
        "choose another folder"
    )


def _mode_of_new_files(path: Path) -> int:
    """Return the mode that a file made at `path` gets: the umask itself can only be read by setting it."""
    path.touch(exist_ok=False)
    mode = stat.S_IMODE(path.stat().st_mode)
    path.unlink()
    return mode
