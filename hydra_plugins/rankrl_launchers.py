"""Register rankrl's launchers of sweeps; Hydra searches for plugins in the package `hydra_plugins` alone.

Hydra imports this at every start, so the code of the launchers is in `rankrl.runs.sweeps.launching`.
configs/hydra/launcher/ holds their options.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class LocalLauncher(Launcher):
    """Runs the jobs of a sweep in processes of this machine, with `hydra/launcher=local`."""

    function = "run_locally"

    def __init__(self, **options: Any) -> None:
        self.options = options

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep the configuration that the jobs share."""
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs and return their results in order."""
        from rankrl.runs.sweeps import launching

        jobs = launching.SweepJobs(
            self.hydra_context, self.task_function, self.config, job_overrides, initial_job_idx
        )
        results: Sequence[JobReturn] = getattr(launching, self.function)(jobs, **self.options)
        return results


class RayLauncher(LocalLauncher):
    """Runs the jobs of a sweep on Ray, with `hydra/launcher=ray`."""

    function = "run_on_ray"
