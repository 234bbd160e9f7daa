"""Start the jobs of a sweep in other processes: on this machine by submitit, on a cluster by Ray."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, configure_log, run_job, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from rankrl.device import usable_cores
from rankrl.errors import ConfigError, RankrlError, counted
from rankrl.runs.sweeps.jobs import sweep_identifier, write_failure
from rankrl.workers.ray_cluster import connected_ray

log = logging.getLogger(__name__)

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


def run_on_ray(
    jobs: SweepJobs, *, cpus: int, gpus: float, retries: int, init: Mapping[str, Any]
) -> list[JobReturn]:
    """Run jobs on a Ray cluster and wait for all of them.

    A job whose process is killed or whose node is lost is restarted from its state; one that is killed every
    time counts as failed, and the others continue.
    """
    try:
        ray = connected_ray("hydra/launcher=ray", **init)
    except RankrlError as error:
        refuse(error)
    log.info("Ray runs %s of the sweep %s", counted(len(jobs), "job"), jobs.folder)
    run = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=retries)(SweepJobs.run)
    shared, results = ray.put(jobs), []
    for number, job in enumerate([run.remote(shared, number, cpus) for number in range(len(jobs))]):
        try:
            results.append(ray.get(job))
        except ray.exceptions.RayError as error:
            results.append(jobs.lost(number, error))
    return results


def run_locally(
    jobs: SweepJobs, folder: str, *, n_jobs: int, retries: int, parameters: Mapping[str, Any]
) -> list[JobReturn]:
    """Run jobs with submitit's local executor and wait for all of them.

    submitit starts all of its jobs at once, so it gets no more than may run. A job whose process is killed is
    restarted from its state; one that is killed every time counts as failed, and the others continue.
    """
    try:
        submitit = importlib.import_module("submitit")
    except ImportError as error:
        reason = f"hydra/launcher=local needs submitit, which cannot be imported ({error})"
        refuse(ConfigError(f"{reason}; install the extra `slurm`"))
    cores = usable_cores()
    together = cores if n_jobs == -1 else n_jobs
    if together < 1:
        refuse(ConfigError(f"hydra.launcher.n_jobs must be at least 1, or -1 for all cores; got {n_jobs}"))
    together = min(together, len(jobs))
    threads = parameters.get("cpus_per_task") or max(1, cores // together)
    executor = submitit.AutoExecutor(folder=folder, cluster="local")
    settings = {name: value for name, value in parameters.items() if value is not None}
    executor.update_parameters(**settings)
    log.info("submitit runs %s of the sweep %s", counted(len(jobs), "job"), jobs.folder)

    def run(number: int) -> JobReturn:
        for left in reversed(range(retries + 1)):
            try:
                result: JobReturn = executor.submit(jobs.run, number, threads).result()
                return result
            except submitit.core.utils.UncompletedJobError as error:
                if left == 0:
                    return jobs.lost(number, error)
                log.warning("the process of job %d was killed; it is started again", number)
        raise AssertionError("unreachable")

    with ThreadPoolExecutor(together) as pool:
        return list(pool.map(run, range(len(jobs))))
