"""Jobs that earlier commands left in a folder, known by their whole configuration."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from rankrl.runs.configurations import digest
from rankrl.runs.run_folder import RunFolder
from rankrl.runs.run_lock import LOCK_FILE, locked
from rankrl.runs.sweeps.failures import sweep_identifier

log = logging.getLogger(__name__)


def job_folder(folder: RunFolder, config: Mapping[str, Any], sweep_folder: Path) -> RunFolder:
    """Return the folder that holds a job from now on, with what there is of it already.

    A job with the same options that lies elsewhere in the sweep's folder gets the new name where that says
    more (`budget.params-0.5+seed-0`), and keeps its own where that is shorter, or another job's. A finished
    one below the folder `reuse` is copied.
    """
    own, sweep = digest(config), sweep_identifier(sweep_folder)
    known = _known_jobs(sweep_folder, sweep).get(own, folder)
    if known != folder and known.path.is_dir():
        if folder.holds_results or len(known.path.name) >= len(folder.path.name):
            folder.discard()
            return known
        with locked(known.path), locked(folder.path):
            log.info("%s was %s in an earlier command", folder.path, known.path.name)
            _hand_over(known.path, folder.path, os.replace)
        shutil.rmtree(known.path)
    elif config.get("reuse") and not folder.holds_results:
        known = _known_jobs(Path(config["reuse"]), sweep).get(own, folder)
        if known.finished:
            with locked(folder.path):
                log.info("%s is copied from %s", folder.path, known.path)
                _hand_over(known.path, folder.path, _copy)
    return folder


def _hand_over(source: Path, target: Path, hand_over: Callable[[Path, Path], object]) -> None:
    """Move or copy a run, its mark that it is finished last: what is interrupted is an unfinished run."""
    mark = RunFolder(source).metrics
    for path in sorted(source.iterdir(), key=lambda path: path == mark):
        place = target / path.name
        if path.name == LOCK_FILE:
            continue
        if place.is_dir():
            shutil.rmtree(place)
        with suppress(PermissionError):  # Windows keeps a log that is open
            hand_over(path, place)


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy2(source, target)


@lru_cache(maxsize=4)
def _known_jobs(folder: Path, sweep: str | None) -> dict[str, RunFolder]:
    """Return the runs below a folder when a sweep began, by the digest of their configurations."""
    del sweep  # the jobs of another one are read anew
    runs = sorted(RunFolder.below(folder), key=lambda run: run.finished)
    recorded = [(run, run.recorded()) for run in runs]
    return {digest(config): run for run, config in recorded if config is not None}
