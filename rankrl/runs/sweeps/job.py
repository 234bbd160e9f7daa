"""Run a job of a sweep: assign a GPU, reuse finished results, and record failures."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from decomposition.progress import listening
from rankrl.errors import RunStoppedError
from rankrl.runs.run_folder import LOCK_FILE, RunFolder, digest, locked
from rankrl.runs.sweeps.progress import JobProgress, sweep_identifier, write_failure

log = logging.getLogger(__name__)

VISIBLE = "CUDA_VISIBLE_DEVICES"


def runs_in_pool() -> bool:
    """Tell whether this process is one of a pool's workers."""
    return multiprocessing.current_process().name != "MainProcess"


def worker_number(job: int) -> int:
    """Return the number of this worker in its pool, from 0; the number of the job without a pool.

    A pool's worker keeps the first GPU that it has used, so GPUs are assigned to workers there.
    """
    number = re.search(r"-(\d+)$", multiprocessing.current_process().name)
    return job if number is None else int(number[1]) - 1


def take_one_gpu(job: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Restrict this process to one GPU, by the number of its worker or job.

    The choice of a cluster's scheduler (one device in CUDA_VISIBLE_DEVICES, or none) is kept. Call it before
    anything uses a GPU.
    """
    visible = environment.get(VISIBLE)
    if visible is None:
        import torch  # late, as the command line handles sweeps without torch

        devices = [str(index) for index in range(torch.cuda.device_count())]
    else:
        devices = [name for name in visible.split(",") if name.strip()]
    if len(devices) > 1:
        environment[VISIBLE] = devices[worker_number(job) % len(devices)]


def job_folder(folder: RunFolder, config: Mapping[str, Any], sweep_folder: Path) -> RunFolder:
    """Return the folder of a job, with earlier results of the same job moved or copied into it.

    Elsewhere in the sweep's folder it is renamed if the new name is longer; below `reuse` a finished one is
    copied.
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
    """Move or copy a run, `metrics.json` last, so that an interruption leaves an unfinished run."""
    mark = RunFolder(source).metrics
    for path in sorted(source.iterdir(), key=lambda path: path == mark):
        place = target / path.name
        if path.name == LOCK_FILE:
            continue
        if place.is_dir():
            shutil.rmtree(place)
        with suppress(PermissionError):  # Windows does not move an open log
            hand_over(path, place)


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy2(source, target)


@lru_cache(maxsize=4)
def _known_jobs(folder: Path, sweep: str | None) -> dict[str, RunFolder]:
    """Return the runs below a folder at the start of a sweep, by the digest of their configurations."""
    del sweep  # only a key of the cache, so that another sweep reads the jobs anew
    runs = sorted(RunFolder.below(folder), key=lambda run: run.finished)
    recorded = [(run, run.recorded()) for run in runs]
    return {digest(config): run for run, config in recorded if config is not None}


def run_sweep_job(
    run: Callable[[RunFolder], object],
    folder: RunFolder,
    *,
    number: int,
    config: Mapping[str, Any],
    overrides: Sequence[str],
    choices: Sequence[str],
    record: Callable[[RunFolder], object],
    sweep_folder: Path,
    explain: Callable[[Exception], str],
) -> None:
    """Run a job unless its results exist; write a failure to `error.json`."""
    try:
        folder = job_folder(folder, config, sweep_folder)
        with folder.held():
            folder.prepare()
            folder.error.unlink(missing_ok=True)
            if config.get("overwrite"):
                folder.replace(config)
                folder.prepare()
            folder.claim(config, overrides, choices=choices)
            if folder.finished:
                log.info("finished already: %s", folder.path)
                return
            record(folder)
            if runs_in_pool():
                take_one_gpu(number)
            with listening(JobProgress(folder)):
                run(folder)
    except RunStoppedError:
        raise
    except Exception as error:  # of any kind, as the other jobs go on; the file holds the traceback
        folder.bring_back()
        paragraph = " ".join(explain(error).split())
        print(f"rankrl: {folder.path}: {paragraph}", file=sys.stderr)
        write_failure(folder.path, error, paragraph, overrides, sweep_identifier(sweep_folder))
