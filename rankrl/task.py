"""Hold one search as a task for agents of one's own: problem, score, environments, application of plans."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from decomposition import CompressionPlan
from rankrl.errors import ConfigError
from rankrl.options.selectors import ActionKind, AgentOptions, Feature
from rankrl.plan_search.envs.rank_selection import PlanReward, RankSelectionEnv
from rankrl.plan_search.session import SearchSession
from rankrl.plan_search.space.problem import Choices, SearchProblem
from rankrl.result import Compression
from rankrl.verbs import verb

if TYPE_CHECKING:
    from stable_baselines3.common.vec_env import VecEnv

FileWriter = Callable[[CompressionPlan, Path, Mapping[str, torch.Tensor]], Compression]
"""Carries a plan out on a file, from the plan, the target and the sensitivities of its nodes."""


class PlanTask(ABC):
    """The choice of a plan for one network, for agents.

    A plan is a tuple of choices: for every compressible layer, in forward order, the index of a candidate in
    `problem.sites`.

    Attributes:
        problem: Layers, candidates, costs and budget.
    """

    def __init__(self, problem: SearchProblem) -> None:
        self.problem = problem
        self._scored: dict[Choices, float] = {}  # the rewards

    @property
    def greedy(self) -> Choices:
        """Greedy's plan, which actions of 0 give, too."""
        return tuple(self.problem.preset.tolist())

    @property
    def best(self) -> Choices:
        """The scored plan with the best reward that keeps the budget; greedy's before any."""
        within = filter(self.problem.keeps_budget, self._scored)
        return max(within, key=self._scored.__getitem__, default=self.greedy)

    @property
    def plans(self) -> int:
        """Number of different plans that were scored; a repeated one costs nothing."""
        return len(self._scored)

    def score(self, choices: Sequence[int]) -> float:
        """Score a plan as the search does, also one over the budget (`within_budget`).

        Raises:
            ConfigError: The choices are no plan of the problem.
        """
        return self._evaluated(choices)[0]

    def reward(self, choices: Sequence[int]) -> float:
        """Score a plan and return its reward, the score itself unless the reward weighs size."""
        return self._evaluated(choices)[1]

    def _evaluated(self, choices: Sequence[int]) -> tuple[float, float]:
        key = self.problem.checked(choices)
        score, self._scored[key] = self._evaluate(key)
        return score, self._scored[key]

    @abstractmethod
    def _evaluate(self, choices: Choices) -> tuple[float, float]:
        """Return the score and the reward of a plan of the problem."""

    def within_budget(self, choices: Sequence[int]) -> bool:
        """Whether a plan keeps the budget; always true without one."""
        return self.problem.keeps_budget(self.problem.checked(choices))

    def env(
        self,
        reward: PlanReward | None = None,
        *,
        action: ActionKind | None = None,
        features: Sequence[Feature] = AgentOptions.features,
    ) -> RankSelectionEnv:
        """Make the environment in which agents choose the plan.

        Args:
            reward: From choices to the reward of the plan; None for the task's own (`reward`).
            action: `importance`, `rank` or `ratio`; None for what `selector=ddpg` takes.
            features: What is observed besides the layer itself and the previous action; by default what
                `selector=ddpg` observes.

        Raises:
            ConfigError: The action or a feature is unknown or does not suit the budget.
        """
        return RankSelectionEnv(self.problem, reward or self.reward, action=action, features=features)

    def vec_env(self, count: int, reward: PlanReward | None = None, **options: Any) -> VecEnv:
        """Make a vector of so many environments for stable-baselines3, with the arguments of `env`."""
        from stable_baselines3.common.env_util import make_vec_env  # a second to import

        return make_vec_env(partial(self.env, reward, **options), count)

    def plan(self, choices: Sequence[int], chosen_by: str = "agent") -> CompressionPlan:
        """Return the plan of choices, to save, or for `rankrl.apply_plan`."""
        return self.problem.plan(self.problem.checked(choices), chosen_by)


class SearchTask(PlanTask):
    """The choice of a plan for one network, as `rankrl.search` and the command line search it.

    `rankrl.make_task` makes tasks; `close` one that has worker processes.

    Attributes:
        problem: Layers, candidates, costs and budget.
    """

    def __init__(
        self,
        session: SearchSession,
        write: FileWriter | None = None,
        *,
        scratch: TemporaryDirectory[str] | None = None,
    ) -> None:
        self._session, self._write = session.__enter__(), write
        self._scratch = scratch  # removed with the task
        super().__init__(session.problem)

    def close(self) -> None:
        """End the worker processes, if there are any."""
        self._session.__exit__(None, None, None)

    @verb()
    def apply(self, choices: Sequence[int], target: str | Path | None = None) -> Any:
        """Apply a plan: every layer is fitted to the inputs that reach it.

        Args:
            choices: The plan.
            target: The ONNX file to write, for a file.

        Returns:
            The compressed module, or the `Compression` of the file.

        Raises:
            ConfigError: The choices are no plan of the problem or over the budget (`rankrl.apply_plan` takes
                any `plan`), or the target is missing or means nothing.
        """
        plan = self.plan(choices)
        if not self.within_budget(choices):
            raise ConfigError(
                "the plan is over the budget; task.within_budget(choices) says so beforehand, and "
                "rankrl.apply_plan(network, task.plan(choices), inputs) applies it all the same"
            )
        if (target is None) != (self._write is None):
            raise ConfigError(
                "apply of a module returns it; leave target= out, and write it with rankrl.export_onnx"
                if self._write is None
                else 'apply writes a file; name it: task.apply(choices, "small.onnx")'
            )
        if self._write is None or target is None:
            return self._session.applied(plan)
        return self._write(plan, Path(target), self._session.library.sensitivities)

    @verb()
    def _evaluate(self, choices: Choices) -> tuple[float, float]:
        (evaluation,) = self._session.evaluator.evaluate([choices])
        return evaluation.score, self._session.reward(evaluation)
