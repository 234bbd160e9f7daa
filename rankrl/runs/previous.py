"""Results that wait in the folder of a run until the run that replaces them has ended."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

PREVIOUS = ".previous"
"""The folder in a run's own that they wait in."""


def set_aside(folder: Path, names: Sequence[str]) -> None:
    """Set a run's files aside; those of one that has not ended itself are removed.

    Args:
        folder: The run's folder.
        names: Files and folders in it. The first, which marks a run as finished, goes first: what is left
            when this is interrupted is never taken for a run.
    """
    aside = folder / PREVIOUS
    ended = (folder / names[0]).is_file()
    if ended:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(exist_ok=True)
    for path in (folder / name for name in names):
        if ended and path.exists():
            os.replace(path, aside / path.name)
        else:
            _remove(path)


def bring_back(folder: Path, names: Sequence[str]) -> bool:
    """Bring back what was set aside, in the place of files of a run that got nowhere.

    Args:
        folder: The run's folder.
        names: As those of `set_aside`; the first comes back last.

    Returns:
        Whether there was something.
    """
    aside = folder / PREVIOUS
    if not (aside / names[0]).is_file():
        return False
    for name in reversed(names):
        _remove(folder / name)
        if (aside / name).exists():
            os.replace(aside / name, folder / name)
    remove_previous(folder)
    return True


def remove_previous(folder: Path) -> None:
    """Remove what was set aside, once the run that replaces it has ended."""
    shutil.rmtree(folder / PREVIOUS, ignore_errors=True)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
