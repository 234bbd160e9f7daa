"""`hydra/launcher=ray`: the jobs of a sweep on a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class RayLauncherConfig:
    """Options of the launcher.

    Attributes:
        cpus: Processor cores of each job; it computes with so many threads.
        gpus: GPUs of each job; 0.5 lets two share one.
        retries: How often a job whose process was killed or whose node was lost is started again. It goes on
            from its state.
        init: Further arguments of `ray.init`, such as `address` or, for a cluster made here, `num_cpus`.
    """

    _target_: str = "hydra_plugins.rankrl_launchers.ray.RayLauncher"
    cpus: int = 1
    gpus: float = 0.0
    retries: int = 3
    init: dict[str, Any] = field(default_factory=dict)


class RayLauncher(Launcher):
    """Runs every job as a task of Ray's; see `RayLauncherConfig` for the arguments."""

    def __init__(self, cpus: int, gpus: float, retries: int, init: Mapping[str, Any]) -> None:
        self.cpus, self.gpus, self.retries, self.init = cpus, gpus, retries, dict(init)

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Keep what the jobs have in common."""
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs and return what came of them, in their order."""
        from rankrl.sweeps.ray_jobs import run_jobs

        return run_jobs(
            self.hydra_context,
            self.task_function,
            self.config,
            [list(each) for each in job_overrides],
            first=initial_job_idx,
            cpus=self.cpus,
            gpus=self.gpus,
            retries=self.retries,
            init=self.init,
        )


ConfigStore.instance().store(
    group="hydra/launcher", name="ray", node=RayLauncherConfig, provider="rankrl_launchers"
)
