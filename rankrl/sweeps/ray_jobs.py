"""The jobs of a sweep as tasks on a Ray cluster."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, configure_log, run_job, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from rankrl.errors import ConfigError
from rankrl.wording import counted

log = logging.getLogger(__name__)


def run_jobs(
    hydra_context: HydraContext,
    task_function: TaskFunction,
    config: DictConfig,
    overrides: Sequence[list[str]],
    *,
    first: int,
    cpus: int,
    gpus: float,
    retries: int,
    init: Mapping[str, Any],
) -> list[JobReturn]:
    """Run jobs on a Ray cluster and wait for all of them.

    A job whose process is killed or whose node is lost is started again and goes on from its state; one that
    is killed every time counts as failed, and the others run on.

    Args:
        hydra_context: Hydra's.
        task_function: What a job runs.
        config: The configuration that the overrides are added to.
        overrides: Those of each job.
        first: Number of the first job.
        cpus: Processor cores of each job.
        gpus: GPUs of each job.
        retries: How often a job is started again.
        init: Further arguments of `ray.init`.

    Raises:
        ConfigError: Ray is not installed.
        WorkerError: The cluster cannot be reached.
    """
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(
            f"hydra/launcher=ray needs Ray, which cannot be imported ({error}); install the extra `ray`"
        ) from error
    from rankrl.plan_search.ray_cluster import connect

    setup_globals()
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    sweep_folder = Path(str(config.hydra.sweep.dir))
    sweep_folder.mkdir(parents=True, exist_ok=True)
    connect(ray, **init)
    log.info("Ray runs %s of the sweep %s", counted(len(overrides), "job"), sweep_folder)
    run = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=retries)(_run_job)
    shared = ray.put((hydra_context, task_function, config, Singleton.get_state(), str(Path.cwd())))
    tasks = {
        run.remote(shared, each, first + number, cpus): number for number, each in enumerate(overrides)
    }
    results: dict[int, JobReturn] = {}
    waiting = list(tasks)
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=1)
        for reference in done:
            results[tasks[reference]] = _result(ray, reference, overrides[tasks[reference]])
    return [results[number] for number in range(len(overrides))]


def _result(ray: Any, reference: Any, overrides: list[str]) -> JobReturn:
    try:
        result: JobReturn = ray.get(reference)
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines()[0]
        log.error("the job %s was killed, and so was every new start: %s", " ".join(overrides), reason)
        result = JobReturn(overrides=overrides, status=JobStatus.FAILED)
        result.return_value = error
    return result


def _run_job(
    shared: tuple[HydraContext, TaskFunction, DictConfig, dict[Any, Any], str],
    overrides: list[str],
    number: int,
    cpus: int,
) -> JobReturn:
    """Run one job, in a process of Ray's."""
    hydra_context, task_function, config, singletons, folder = shared
    os.chdir(folder)  # where the command was given; folders in the configuration are relative to it
    _compute_on(cpus)
    Singleton.set_state(singletons)
    setup_globals()
    job_config = hydra_context.config_loader.load_sweep_config(config, overrides)
    with open_dict(job_config):
        job_config.hydra.job.id = f"{job_config.hydra.job.name}_{number}"
        job_config.hydra.job.num = number
    return run_job(
        hydra_context=hydra_context,
        task_function=task_function,
        config=job_config,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )


def _compute_on(cpus: int) -> None:
    import torch

    torch.set_num_threads(cpus)
