"""Run the jobs of a sweep in processes that submitit starts on this machine."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hydra.core.utils import JobReturn

from rankrl.device import usable_cores
from rankrl.errors import ConfigError, counted
from rankrl.runs.sweeps.launching import SweepJobs, refuse

log = logging.getLogger(__name__)


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
