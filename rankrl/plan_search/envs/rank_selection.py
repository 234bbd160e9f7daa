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

from rankrl.errors import ConfigError
from rankrl.option_types import shown
from rankrl.plan_search.envs.actions import IMPORTANCE_SCALE, ActionKind, create_action_map
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

    The environment itself is deterministic: equal actions give equal observations and plans.

    Args:
        problem: The layers, their candidates and the budget that every plan keeps. It must be given: None is
            what `gymnasium.make` passes on when it gets the environment's name alone.
        reward: Reward of a plan; None when the caller scores `info["choices"]` itself, as several workers do.
        action: `importance`, `rank` or `ratio`; None for `importance` with a budget and `rank` without. With
            the first two, 0 everywhere is greedy's plan.
        features: Features beyond the layer's own and the previous action (`ObservationEncoder`).
        importance_scale: Log-importance of action 1, with `action="importance"`.
        descriptors: Names of the descriptors that the feature of that name holds; None for all there are.

    Raises:
        ConfigError: There is no problem, or options are unknown or contradict one another.
    """

    def __init__(
        self,
        problem: SearchProblem | None = None,
        reward: PlanReward | None = None,
        *,
        action: ActionKind | None = None,
        features: Sequence[Feature] = (),
        importance_scale: float = IMPORTANCE_SCALE,
        descriptors: Sequence[str] | None = None,
    ) -> None:
        if not isinstance(problem, SearchProblem):
            raise ConfigError(
                f"{ENVIRONMENT_ID} needs problem=SearchProblem, the layers that ranks are chosen for, got "
                f"{shown(problem)}; for example gymnasium.make({ENVIRONMENT_ID!r}, problem=SearchProblem."
                "from_model(model, candidates, (3, 32, 32), params=0.5), reward=function_of_a_plan); "
                "docs/agent.md has a program"
            )
        self._spec: EnvSpec | None = None
        self.problem = problem
        self.reward = reward
        self.map = create_action_map(problem, action, scale=importance_scale)
        self.encoder = ObservationEncoder(problem, features, descriptors)
        self.layers = len(problem.sites)
        self._actions = np.zeros(self.layers, dtype=np.float32)
        self._layer = self.layers
        self._last_reward = 0.0
        self.observation_space = spaces.Box(0.0, 1.0, (self.encoder.size,), dtype=np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (1,), dtype=np.float32)

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
            seed: Seed of the environment's generator, which nothing here draws from.
            options: `last_reward`: the reward of the previous plan, where the caller scores plans itself.
        """
        super().reset(seed=seed)
        if options is not None and "last_reward" in options:
            self._last_reward = float(options["last_reward"])
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
        if terminated and self.reward is not None:
            reward = self._last_reward = float(self.reward(info["choices"]))
        return self._observation(), reward, terminated, False, info

    def _info(self) -> dict[str, Any]:
        if self._layer < self.layers:
            return {"layer": self.problem.sites[self._layer].name}
        return {"choices": self.map.choices_of(self._actions)}

    def _observation(self) -> np.ndarray:
        taken = self._actions[: self._layer]
        left = self.map.budget_left(taken) if "budget_left" in self.encoder.features else 1.0
        return self.encoder(taken, left, self._last_reward)


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
