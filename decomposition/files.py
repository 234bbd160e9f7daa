"""Atomic file writes: a reader sees the old file or the new one, never a part of either."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path beside `path` to write to; it takes the name `path` when the block ends well.

    The file gets the mode of any new file (0666 less the umask), whichever mode a library writes it with.

    Args:
        path: The file to create or replace, in an existing folder.

    Yields:
        The path to write to; it is removed when the block raises.
    """
    temporary = path.with_name(f".{path.stem}-{secrets.token_hex(4)}{path.suffix}")
    try:
        mode = _mode_of_new_files(temporary)
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.chmod(mode)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _mode_of_new_files(path: Path) -> int:
    """Return the mode that a file made at `path` gets: the umask itself can only be read by setting it."""
    path.touch(exist_ok=False)
    mode = stat.S_IMODE(path.stat().st_mode)
    path.unlink()
    return mode
