"""Failed jobs: `error.json` in a job's folder, and the list of them at the end of a sweep."""

from __future__ import annotations

import json
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rankrl.files import write_json

ERROR_FILE = "error.json"
SWEEP_FILE = "sweep.json"


@dataclass(frozen=True)
class Failure:
    """A job that ended with an error."""

    folder: Path
    error: str


def write_failure(
    folder: Path, error: BaseException, paragraph: str, overrides: Sequence[str], sweep: str | None
) -> None:
    """Write `error.json`."""
    content = {
        "error": paragraph,
        "type": type(error).__name__,
        "traceback": "".join(traceback.format_exception(error)),
        "overrides": list(overrides),
        "sweep": sweep,
    }
    write_json(folder / ERROR_FILE, content)


def read_failure(folder: Path) -> str | None:
    """Return the error that a job ended with as one paragraph, or None where it did not fail."""
    path = folder / ERROR_FILE
    if not path.is_file():
        return None
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["error"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"{path} cannot be read"


def sweep_identifier(sweep_folder: Path) -> str | None:
    """Return the identifier of the sweep that was started last in a folder, or None where there is none."""
    try:
        return str(json.loads((sweep_folder / SWEEP_FILE).read_text(encoding="utf-8"))["id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def failures(sweep_folder: Path) -> list[Failure]:
    """Return the failed jobs of the sweep that was started last in a folder, by their folders' names."""
    sweep = sweep_identifier(sweep_folder)
    failed = []
    for path in sorted(sweep_folder.rglob(ERROR_FILE)):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            content = {}
        if sweep is None or content.get("sweep", sweep) == sweep:
            failed.append(Failure(path.parent, read_failure(path.parent) or ""))
    return failed
