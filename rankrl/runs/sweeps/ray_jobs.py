"""Run the jobs of a sweep as tasks on a Ray cluster."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from typing import Any

from hydra.core.utils import JobReturn

from rankrl.errors import ConfigError, RankrlError, counted
from rankrl.runs.sweeps.launching import SweepJobs, refuse
from rankrl.workers.ray_cluster import connect

log = logging.getLogger(__name__)


def run_on_ray(
    jobs: SweepJobs, *, cpus: int, gpus: float, retries: int, init: Mapping[str, Any]
) -> list[JobReturn]:
    """Run jobs on a Ray cluster and wait for all of them.

    A job whose process is killed or whose node is lost is restarted from its state; one that is killed every
    time counts as failed, and the others continue.
    """
    try:
        ray = _ray()
        connect(ray, **init)
    except RankrlError as error:
        refuse(error)
    log.info("Ray runs %s of the sweep %s", counted(len(jobs), "job"), jobs.folder)
    run = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=retries)(SweepJobs.run)
    shared = ray.put(jobs)
    numbers = {run.remote(shared, number, cpus): number for number in range(len(jobs))}
    results: dict[int, JobReturn] = {}
    waiting = list(numbers)
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=1)
        for reference in done:
            number = numbers[reference]
            try:
                results[number] = ray.get(reference)
            except ray.exceptions.RayError as error:
                results[number] = jobs.lost(number, error)
    return [results[number] for number in range(len(jobs))]


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(
            f"hydra/launcher=ray needs Ray, which cannot be imported ({error}); install the extra `ray`"
        ) from error
