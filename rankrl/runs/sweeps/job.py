"""One job of a sweep: skipped when finished, resumed when not; a failure does not end the others."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rankrl.errors import RunStoppedError
from rankrl.files import recording
from rankrl.progress import listening
from rankrl.runs.run_folder import RunFolder
from rankrl.runs.sweeps.devices import runs_in_pool, take_one_gpu
from rankrl.runs.sweeps.failures import sweep_identifier, write_failure
from rankrl.runs.sweeps.known_jobs import job_folder
from rankrl.runs.sweeps.progress import JobProgress

log = logging.getLogger(__name__)


def run_sweep_job(
    run: Callable[[RunFolder], object],
    folder: RunFolder,
    *,
    number: int,
    config: Mapping[str, Any],
    overrides: Sequence[str],
    paths: Callable[[], Mapping[str, Sequence[str]]],
    record: Callable[[RunFolder], object],
    sweep_folder: Path,
    explain: Callable[[Exception], str],
) -> None:
    """Carry out a job unless its results are there; write a failure to `error.json`."""
    try:
        folder = job_folder(folder, config, sweep_folder)
        with folder.held():
            folder.prepare()
            folder.error.unlink(missing_ok=True)
            if config.get("overwrite"):
                folder.replace(config)
                folder.prepare()
            folder.claim(config, overrides, paths=paths())
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
    except Exception as error:  # whatever it is, the other jobs go on; the traceback is in the file
        folder.bring_back()
        paragraph = " ".join(explain(error).split())
        print(f"rankrl: {folder.path}: {paragraph}", file=sys.stderr)
        with recording(folder.path):
            write_failure(folder.path, error, paragraph, overrides, sweep_identifier(sweep_folder))
