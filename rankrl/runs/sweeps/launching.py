"""Run a job of a sweep in the process that a launcher sent it to."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, configure_log, run_job, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from rankrl.errors import RankrlError
from rankrl.runs.sweeps.progress import sweep_identifier, write_failure

_CONFIGURING = threading.Lock()  # Hydra's configuration is global to all threads


class SweepJobs:
    """The jobs of a sweep, pickled with everything that a job needs on another machine."""

    def __init__(
        self,
        hydra_context: HydraContext,
        task_function: TaskFunction,
        config: DictConfig,
        overrides: Sequence[Sequence[str]],
        first: int,
    ) -> None:
        self._context, self._function, self._config = hydra_context, task_function, config
        self._overrides, self._first = [list(job) for job in overrides], first
        self._singletons: dict[Any, Any] = Singleton.get_state()
        self._current = Path.cwd()  # folders in the configuration are relative to it
        setup_globals()
        configure_log(config.hydra.hydra_logging, config.hydra.verbose)
        self.folder = Path(str(config.hydra.sweep.dir))
        self.folder.mkdir(parents=True, exist_ok=True)

    def __len__(self) -> int:
        return len(self._overrides)

    def run(self, number: int, threads: int | None) -> JobReturn:
        """Run a job in the process that it was sent to."""
        os.chdir(self._current)
        sys.path.insert(0, str(self._current))  # finds users' own networks, as the command itself does
        if threads is not None:
            import torch

            torch.set_num_threads(threads)
        Singleton.set_state(self._singletons)
        setup_globals()
        return run_job(
            hydra_context=self._context,
            task_function=self._function,
            config=self._job_config(number),
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )

    def lost(self, number: int, error: Exception) -> JobReturn:
        """Record the failure of a job that was restarted without a result, and return an empty result."""
        with _CONFIGURING:
            config, before = self._job_config(number), HydraConfig.instance().cfg
            HydraConfig.instance().set_config(config)  # resolves `${hydra:...}`
            folder = self.folder / str(config.hydra.sweep.subdir)
            HydraConfig.instance().cfg = before
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        folder.mkdir(parents=True, exist_ok=True)
        write_failure(
            folder,
            error,
            f"its process ended without a result each time that it was started ({reason}); memory may have "
            "run out",
            self._overrides[number],
            sweep_identifier(self.folder),
        )
        # COMPLETED, as with FAILED Hydra would end the sweep before the failed jobs are listed.
        result = JobReturn(overrides=self._overrides[number], status=JobStatus.COMPLETED)
        result.return_value = None
        return result

    def _job_config(self, number: int) -> DictConfig:
        config = self._context.config_loader.load_sweep_config(self._config, self._overrides[number])
        with open_dict(config):
            config.hydra.job.id = f"{config.hydra.job.name}_{self._first + number}"
            config.hydra.job.num = self._first + number
        return config


def refuse(error: RankrlError) -> NoReturn:
    """Exit with one paragraph; Hydra would print a traceback of its own code."""
    print(f"rankrl: {' '.join(str(error).split())}", file=sys.stderr)
    raise SystemExit(2) from error
