"""Watch a sweep as Hydra's callback: identify it, show its progress, print its table and failed jobs."""

from __future__ import annotations

import logging
import math
import secrets
import sys
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from rankrl.cli.config.composition import ALL_COMBINATIONS
from rankrl.errors import counted
from rankrl.files import write_json
from rankrl.runs.sweeps.progress import SWEEP_FILE, SweepWatch, failures

log = logging.getLogger(__name__)

_IN_THIS_PROCESS = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"

FAILED_JOBS = 1
"""Exit code of a sweep of which a job failed."""


class SweepCallback(Callback):
    """Gives each sweep an identifier, shows how far it is, and ends with its table and its failed jobs.

    The identifier (`sweep.json` in the sweep's folder) tells this sweep's failures from those of an earlier
    one in the same folder. Configured under `hydra.callbacks`.
    """

    def __init__(self) -> None:
        self._watch: SweepWatch | None = None
        self._total: int | None = None

    def __reduce__(self) -> tuple[type[SweepCallback], tuple[()]]:
        """Pickle without the watching thread."""
        return SweepCallback, ()

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Write `sweep.json`; watch jobs that do not run in this process."""
        folder = Path(str(config.hydra.sweep.dir))
        write_json(folder / SWEEP_FILE, {"id": secrets.token_hex(8)})
        launcher, self._total = str(config.hydra.launcher._target_), number_of_jobs(config)
        if launcher != _IN_THIS_PROCESS:
            # joblib's processes write to this terminal themselves and would break a live line.
            live = "joblib" not in launcher
            self._watch = SweepWatch(folder, self._total, live=live)

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Say which job of how many begins, where they run one after the other."""
        if config.hydra.mode == RunMode.MULTIRUN and str(config.hydra.launcher._target_) == _IN_THIS_PROCESS:
            of_all = "" if self._total is None else f" of {self._total}"
            log.info("job %d%s: %s", int(config.hydra.job.num) + 1, of_all, config.hydra.sweep.subdir)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Print the table of the jobs, and list the failed ones."""
        if self._watch is not None:
            self._watch.stop()
            print(self._watch.line())
        folder = Path(str(config.hydra.sweep.dir))
        _show_results(folder)
        failed = failures(folder)
        if not failed:
            return
        jobs = counted(len(failed), "job")
        print(f"rankrl: {jobs} of the sweep failed:", file=sys.stderr)
        for failure in failed:
            print(f"  {failure.folder.relative_to(folder)}: {failure.error}", file=sys.stderr)
        print(
            f"The same command with hydra.sweep.dir={folder} runs these again and skips the finished ones.",
            file=sys.stderr,
        )
        raise SystemExit(FAILED_JOBS)


def _show_results(folder: Path) -> None:
    from rankrl.report import ReportError, results_table  # late, as it imports torch

    try:
        table = results_table(folder)
    except ReportError:  # jobs without results, as those of task=inspect
        return
    if table.row_count:
        Console().print(table)


def number_of_jobs(config: DictConfig) -> int | None:
    """Return the number of jobs of a sweep, or None if its sweeper chooses them on the way."""
    if str(config.hydra.sweeper._target_) != ALL_COMBINATIONS:
        return None
    params: Any = OmegaConf.to_container(config.hydra.sweeper.params or OmegaConf.create({}))
    assignments = [*(f"{name}={value}" for name, value in params.items()), *config.hydra.overrides.task]
    overrides = OverridesParser.create().parse_overrides([str(assignment) for assignment in assignments])
    return math.prod(
        len(list(override.sweep_iterator())) for override in overrides if override.is_sweep_override()
    )
