"""Launch jobs on Ray with `hydra/launcher=ray`; configs/hydra/launcher/ray.yaml holds its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class RayLauncher(Launcher):
    """Runs every job of a sweep as a task of Ray's."""

    def __init__(self, cpus: int, gpus: float, retries: int, init: Mapping[str, Any]) -> None:
        self.cpus, self.gpus, self.retries, self.init = cpus, gpus, retries, dict(init)

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep the configuration that the jobs share."""
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs and return their results in order."""
        from rankrl.runs.sweeps.launching import SweepJobs, run_on_ray

        jobs = SweepJobs(self.hydra_context, self.task_function, self.config, job_overrides, initial_job_idx)
        return run_on_ray(jobs, cpus=self.cpus, gpus=self.gpus, retries=self.retries, init=self.init)
