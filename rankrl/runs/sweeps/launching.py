"""Run the jobs of a sweep in other processes, on this machine or on a Ray cluster."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, configure_log, run_job, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from decomposition.choose.processes import WorkerPool, local_pool
from rankrl.device import usable_cores
from rankrl.errors import ConfigError, RankrlError, counted
from rankrl.runs.sweeps.progress import sweep_identifier, write_failure
from rankrl.workers.processes import WorkerError, connected_ray, ray_pool

log = logging.getLogger(__name__)

_OUTPUTS = ".jobs"  # in the sweep's folder: what processes of this machine print


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

    def run(self, number: int, *, threads: int, to_file: bool = False) -> JobReturn:
        """Run a job in the process that it was sent to; `to_file` keeps its output off the terminal."""
        os.chdir(self._current)
        if to_file:
            self._write_output(number)
        sys.path.insert(0, str(self._current))  # finds users' own networks, as the command itself does
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

    def _write_output(self, number: int) -> None:
        """Write what this process prints to a file of the job."""
        place = self.folder / _OUTPUTS / f"{self._first + number}.log"
        place.parent.mkdir(exist_ok=True)
        with place.open("a") as file:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
                os.dup2(file.fileno(), stream.fileno())

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


def run_on_ray(
    jobs: SweepJobs, *, cpus: int, gpus: float, retries: int, init: Mapping[str, Any]
) -> list[JobReturn]:
    """Run jobs on a Ray cluster and wait for all of them."""
    try:
        connected_ray("hydra/launcher=ray", **init)
    except RankrlError as error:
        refuse(error)
    log.info("Ray runs %s of the sweep %s", counted(len(jobs), "job"), jobs.folder)

    def build() -> Callable[[int], JobReturn]:
        return partial(jobs.run, threads=cpus)

    pool = ray_pool(build, len(jobs), cpus=cpus, gpus=gpus, deaths=retries, lost=WorkerError)
    return _results(jobs, pool)


def run_locally(jobs: SweepJobs, *, n_jobs: int, retries: int) -> list[JobReturn]:
    """Run jobs in processes of this machine and wait for all of them."""
    cores = usable_cores()
    together = min(cores if n_jobs == -1 else n_jobs, len(jobs))
    if together < 1:
        refuse(ConfigError(f"hydra.launcher.n_jobs must be at least 1, or -1 for all cores; got {n_jobs}"))
    log.info("%s of the sweep %s run, %d at a time", counted(len(jobs), "job"), jobs.folder, together)

    def build() -> Callable[[int], JobReturn]:
        return partial(jobs.run, threads=max(1, cores // together), to_file=True)

    return _results(jobs, local_pool(build, together, deaths=retries, lost=WorkerError))


def _results(jobs: SweepJobs, pool: WorkerPool) -> list[JobReturn]:
    """Return the results of jobs.

    A job whose process is killed is started again and goes on from its state; one that is killed every time
    counts as failed, and the others continue.
    """
    results: dict[int, JobReturn] = {}
    with closing(pool):
        for number, future in pool.finished(range(len(jobs))):
            try:
                results[number] = future.result()
            except WorkerError as error:
                results[number] = jobs.lost(number, error)
    return [results[number] for number in range(len(jobs))]
