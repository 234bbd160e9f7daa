"""Define the choice of a rank for every layer as a Gymnasium environment."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from rankrl.errors import ConfigError, counted
from rankrl.option_types import shown
from rankrl.plan_search.envs.actions import IMPORTANCE_SCALE, ActionKind, ActionMap, create_action_map
from rankrl.plan_search.envs.observations import Feature, ObservationEncoder
from rankrl.plan_search.space.problem import Choices, SearchProblem
from rankrl.registration import ENVIRONMENT_ID, RankSelectionSpec

PlanReward = Callable[[Choices], float]
"""From the candidate of every layer to the plan's reward."""


class RankSelectionEnv(gymnasium.Env[np.ndarray, np.ndarray]):
    """One episode passes once over the compressible layers in forward order; one action chooses one rank.

    Observation: features in [0, 1] of the current layer (`ObservationEncoder`). Action: one number in
    [-1, 1], whose meaning depends on `action` (`envs.actions`). The reward is 0 until every layer has its
    action; the last step returns the plan's reward and ends the episode. `info` names the layer whose action
    comes next, and at the end holds the plan's `choices`.

    With several problems (networks, formats, budgets), every episode is of one of them, `info["task"]`: drawn
    by the environment's generator or named in `reset`. Observations then hold what may be kept (the feature
    `budget`). All else is deterministic: equal actions give equal observations and plans.

    Args:
        problem: The layers, their candidates and the budget that every plan keeps, as `rankrl.make_task` has
            them in `task.problem`; or a list of such problems. It must be given: None is what
            `gymnasium.make` passes on when it gets the environment's name alone.
        reward: Reward of a plan, one for each problem of a list; None when the caller scores
            `info["choices"]` itself, as several workers do.
        action: `importance`, `rank` or `ratio`; None for `importance` with a budget and `rank` without. With
            the first two, 0 everywhere is greedy's plan.
        features: Features beyond the layer's own and the previous action (`ObservationEncoder`).
        importance_scale: Log-importance of action 1, with `action="importance"`.

    Raises:
        ConfigError: There is no problem, or options are unknown or contradict one another.
    """

    def __init__(
        self,
        problem: SearchProblem | Sequence[SearchProblem] | None = None,
        reward: PlanReward | Sequence[PlanReward] | None = None,
        *,
        action: ActionKind | None = None,
        features: Sequence[Feature] = (),
        importance_scale: float = IMPORTANCE_SCALE,
    ) -> None:
        pairs = _pairs(problem, reward)
        if len(pairs) > 1:
            features = tuple(dict.fromkeys((*features, "budget")))
        self._spec: EnvSpec | None = None
        encoders = [ObservationEncoder(each, features) for each, _ in pairs]
        self._tasks = [
            _Task(each, function, create_action_map(each, action, scale=importance_scale), encoder)
            for (each, function), encoder in zip(pairs, encoders, strict=True)
        ]
        sizes = {encoder.size for encoder in encoders}
        if len(sizes) > 1:
            raise ConfigError(
                f"the problems' observations differ in length with features={list(features)}; leave out "
                "identity and plan, whose length is the network's"
            )
        self._enter(0)
        self.observation_space = spaces.Box(0.0, 1.0, (sizes.pop(),), dtype=np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (1,), dtype=np.float32)

    def _enter(self, number: int) -> None:
        """Make a problem the current one, its episode not yet begun."""
        self._number, self._task = number, self._tasks[number]
        self.layers = len(self._task.problem.sites)
        self._actions = np.zeros(self.layers, dtype=np.float32)
        self._layer = self.layers

    @property
    def encoder(self) -> ObservationEncoder:
        """The encoder of the current problem's observations."""
        return self._task.encoder

    @property
    def map(self) -> ActionMap:
        """The map from actions to candidates of the current problem."""
        return self._task.map

    @property
    def spec(self) -> EnvSpec | None:
        """Gymnasium's record of how the environment was made; None without `gymnasium.make`."""
        return self._spec

    @spec.setter
    def spec(self, spec: EnvSpec | None) -> None:
        fields = [] if spec is None else [each.name for each in dataclasses.fields(spec) if each.init]
        self._spec = RankSelectionSpec(**{name: getattr(spec, name) for name in fields}) if fields else None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin an episode.

        Args:
            seed: Seed of the environment's generator, which draws the problem where there are several.
            options: `task`: the number of the problem, from 0, instead of a draw; `last_reward`: the reward
                of the problem's previous plan, where the caller scores plans itself.

        Raises:
            ConfigError: There is no problem of that number.
        """
        super().reset(seed=seed)
        asked, count = options or {}, len(self._tasks)
        number = asked.get("task", self.np_random.integers(count) if count > 1 else 0)
        if number not in range(count):
            raise ConfigError(
                f"the option task={shown(number)} is none of the {counted(count, 'problem')}, from 0"
            )
        self._enter(int(number))
        self._task.last_reward = float(asked.get("last_reward", self._task.last_reward))
        self._layer = 0
        return self._observation(), self._info()

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Take the action of the current layer.

        Args:
            action: A number in [-1, 1], shape (1,); clipped to that range.

        Raises:
            gymnasium.error.ResetNeeded: The episode is over, or was never begun.
            ValueError: The action has another shape or is not finite.
        """
        if self._layer >= self.layers:
            raise gymnasium.error.ResetNeeded("the episode is over; call reset() before step()")
        values = np.asarray(action, dtype=np.float32)
        if values.shape != self.action_space.shape or not np.isfinite(values).all():
            raise ValueError(f"an action must hold a finite number in [-1, 1], shape (1,); got {action!r}")
        self._actions[self._layer] = values.clip(-1, 1)[0]
        self._layer += 1
        terminated, reward = self._layer == self.layers, 0.0
        info = self._info()
        if terminated and self._task.reward is not None:
            reward = self._task.last_reward = float(self._task.reward(info["choices"]))
        return self._observation(), reward, terminated, False, info

    def _info(self) -> dict[str, Any]:
        if self._layer < self.layers:
            return {"task": self._number, "layer": self._task.problem.sites[self._layer].name}
        return {"task": self._number, "choices": self._task.map.choices_of(self._actions)}

    def _observation(self) -> np.ndarray:
        taken, task = self._actions[: self._layer], self._task
        left = task.map.budget_left(taken) if "budget_left" in task.encoder.features else 1.0
        return task.encoder(taken, left, task.last_reward)


@dataclass
class _Task:
    """One problem of an environment; `last_reward` is that of its previous plan."""

    problem: SearchProblem
    reward: PlanReward | None
    map: ActionMap
    encoder: ObservationEncoder
    last_reward: float = 0.0


def _pairs(problem: Any, reward: Any) -> list[tuple[SearchProblem, PlanReward | None]]:
    """Return every problem with its reward."""
    problems = problem if isinstance(problem, list | tuple) else [problem]
    rewards = (
        reward if isinstance(reward, list | tuple) else [reward] * (len(problems) if reward is None else 1)
    )
    if not problems or not all(isinstance(each, SearchProblem) for each in problems):
        raise ConfigError(
            f"{ENVIRONMENT_ID} needs problem=, the layers that ranks are chosen for, got {shown(problem)}; "
            "rankrl.make_task(model, inputs, params=0.4).env() makes a network's environment (docs/agent.md)"
        )
    if len(rewards) != len(problems):
        raise ConfigError(
            f"{counted(len(problems), 'problem')} and {counted(len(rewards), 'reward')}: give one of each, "
            "such as reward=[task.reward for task in tasks]"
        )
    return list(zip(problems, rewards, strict=True))


Act = Callable[[int, np.ndarray], np.ndarray]
"""From a layer's number and the observation before its action to the action, shape (1,)."""


@dataclass(frozen=True)
class Episode:
    """A played episode: observations of the shape (layers + 1, size), actions of the shape (layers, 1)."""

    observations: np.ndarray
    actions: np.ndarray
    choices: Choices
    reward: float


def rollout(env: RankSelectionEnv, act: Act, *, last_reward: float | None = None) -> Episode:
    """Play one episode; `last_reward` as the option of `reset`."""
    observation, _ = env.reset(options=None if last_reward is None else {"last_reward": last_reward})
    observations, actions = [observation], np.zeros((env.layers, 1), dtype=np.float32)
    for layer in range(env.layers):
        actions[layer] = np.clip(act(layer, observation), -1, 1)
        observation, reward, _, _, info = env.step(actions[layer])
        observations.append(observation)
    return Episode(np.stack(observations), actions, info["choices"], reward)


def repeat(actions: np.ndarray) -> Act:
    """Return the policy that takes given actions, (layers,), whatever it sees."""
    return lambda layer, _: actions[layer]
