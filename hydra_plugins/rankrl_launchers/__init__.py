"""Register rankrl's launchers of sweeps; Hydra searches for plugins in the package `hydra_plugins` alone.

Hydra imports this at every start, so the code that starts jobs is in `rankrl.runs.sweeps`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class _JobsLauncher(Launcher):
    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep the configuration that the jobs share."""
        self._shared = (hydra_context, task_function, config)


class LocalLauncher(_JobsLauncher):
    """Runs every job in a process of submitit's local executor, a few at a time: `hydra/launcher=local`."""

    def __init__(self, n_jobs: int, retries: int, submitit_folder: str, **parameters: Any) -> None:
        self._options: dict[str, Any] = {"n_jobs": n_jobs, "retries": retries, "parameters": parameters}
        self._folder = submitit_folder

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs and return their results in order."""
        from rankrl.runs.sweeps.launching import SweepJobs, run_locally

        return run_locally(
            SweepJobs(*self._shared, job_overrides, initial_job_idx), self._folder, **self._options
        )


class RayLauncher(_JobsLauncher):
    """Runs every job as a task of Ray's: `hydra/launcher=ray`."""

    def __init__(self, cpus: int, gpus: float, retries: int, init: Mapping[str, Any]) -> None:
        self._options: dict[str, Any] = {"cpus": cpus, "gpus": gpus, "retries": retries, "init": dict(init)}

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs and return their results in order."""
        from rankrl.runs.sweeps.launching import SweepJobs, run_on_ray

        return run_on_ray(SweepJobs(*self._shared, job_overrides, initial_job_idx), **self._options)
