"""Launch local processes with `hydra/launcher=local`; configs/hydra/launcher/local.yaml holds its options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class LocalLauncher(Launcher):
    """Runs every job of a sweep in a process of submitit's local executor, a few at a time."""

    def __init__(self, n_jobs: int, retries: int, submitit_folder: str, **parameters: Any) -> None:
        self.n_jobs, self.retries = n_jobs, retries
        self.folder, self.parameters = submitit_folder, parameters

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep the configuration that the jobs share."""
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs and return their results in order."""
        from rankrl.runs.sweeps.launching import SweepJobs, run_locally

        jobs = SweepJobs(self.hydra_context, self.task_function, self.config, job_overrides, initial_job_idx)
        return run_locally(
            jobs, self.folder, n_jobs=self.n_jobs, retries=self.retries, parameters=self.parameters
        )
