"""DDPG, TD3 and SAC of stable-baselines3 on the rank-selection environment."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from stable_baselines3 import DDPG, SAC, TD3
from stable_baselines3.common.logger import Logger
from torch import Tensor

from rankrl.errors import ConfigError
from rankrl.options.agents import IMPORTANCE_SCALE
from rankrl.plan_search.agents.options import AgentOptions, options_with_policy
from rankrl.plan_search.agents.policy_file import read_policy
from rankrl.plan_search.agents.randomness import RandomState, one_thread
from rankrl.plan_search.agents.starting import start_from
from rankrl.plan_search.agents.state import (
    Algorithm,
    actor_kept,
    buffer_tensors,
    model_tensors,
    restore_buffer,
    restore_model,
)
from rankrl.plan_search.envs.actions import create_action_map
from rankrl.plan_search.envs.rank_selection import RankSelectionEnv
from rankrl.plan_search.space.problem import SearchProblem

ALGORITHMS: dict[str, type[Algorithm]] = {"ddpg": DDPG, "td3": TD3, "sac": SAC}
"""DDPG (Lillicrap et al., ICLR 2016), TD3 (Fujimoto et al., ICML 2018), SAC (Haarnoja et al., ICML 2018)."""

# Share of the networks that their targets take over in each update.
_TAU = 0.01


class PolicyAgent:
    """A policy that acts layer by layer, and learns from whole episodes.

    The algorithm is stable-baselines3's own. Every transition's target is the reward at the end of its
    episode, as in AMC (He et al., ECCV 2018), which here is an n-step return over the whole episode; of that
    reward the first episode's, the preset plan's, is taken off. Stepping from outside (`act`, `learn`) takes
    the place of `learn()`, because many plans may be scored at once and a search is saved between episodes.

    With `options.policy` the actor begins with the weights of a pretrained policy.

    Args:
        problem: What to choose for.
        algorithm: A key of `ALGORITHMS`.
        options: Hyper-parameters.
        seed: Seed of networks, noise and draws from the buffer.
        episodes: Episodes that the replay buffer can hold.

    Raises:
        ConfigError: There is no such algorithm, or an option does not fit the problem or the policy.
        CheckpointError: The policy cannot be read.
    """

    def __init__(
        self, problem: SearchProblem, algorithm: str, options: AgentOptions, *, seed: int, episodes: int
    ) -> None:
        if algorithm not in ALGORITHMS:
            raise ConfigError(f"there is no algorithm {algorithm!r}; choose from {', '.join(ALGORITHMS)}")
        policy = None if options.policy is None else read_policy(options.policy)
        if policy is not None:
            options = options_with_policy(options, policy)
        self.problem, self.options = problem, options
        self._scale = IMPORTANCE_SCALE if policy is None else policy.card.importance_scale
        self.env = RankSelectionEnv(
            problem,
            action=options.action,
            features=options.features,
            importance_scale=self._scale,
        )
        self._random = RandomState.seeded(seed)
        with self._random.in_use():
            self.model = ALGORITHMS[algorithm](
                "MlpPolicy",
                self.env,
                learning_rate=options.learning_rate,
                buffer_size=episodes * self.env.layers,
                batch_size=options.batch_size,
                tau=_TAU,
                gamma=1.0,
                n_steps=self.env.layers,
                policy_kwargs={"net_arch": list(options.hidden)},
                device="cpu",  # networks this small are slower on a GPU
            )
        if policy is not None:
            start_from(self.model, policy, deviation=options.warmup_noise)
        self.model.set_logger(Logger(None, []))
        self._baseline: float | None = None
        self._last_reward = 0.0

    def act(self, noise: np.ndarray, *, deterministic: bool = False) -> np.ndarray:
        """Return the actions of noisy passes of the policy over all layers.

        Args:
            noise: What is added to the policy's actions, shape (episodes, layers). SAC's policy
                is stochastic itself and gets none.
            deterministic: Whether SAC's policy takes the mean of its actions instead.

        Returns:
            Actions in [-1, 1], of the same shape.
        """
        actions = np.zeros_like(noise, dtype=np.float32)
        stochastic = isinstance(self.model, SAC) and not deterministic
        with one_thread(), self._random.in_use():
            for layer in range(self.env.layers):
                observations = self._observe(layer, actions)
                predicted, _ = self.model.predict(observations, deterministic=not stochastic)
                actions[:, [layer]] = np.clip(
                    predicted if stochastic else predicted + noise[:, [layer]], -1, 1
                )
        return actions

    def learn(self, actions: np.ndarray, reward: float, *, keep_actor: bool = False) -> None:
        """Remember a rewarded episode and take gradient steps.

        Args:
            actions: Of every layer, shape (layers,).
            reward: The plan's reward.
            keep_actor: Whether the critics alone learn: those of a pretrained actor know nothing yet.
        """
        if self._baseline is None:
            self._baseline = reward
        observation, _ = self.env.reset(options={"last_reward": self._last_reward})
        for action in actions[:, None]:
            following, _, done, _, _ = self.env.step(action)
            earned = np.array(reward - self._baseline if done else 0.0)
            self._buffer.add(observation, following, action, earned, np.array(done), [{}])
            observation = following
        self._last_reward = reward
        if self._buffer.size() > self.options.batch_size:
            kept = actor_kept(self.model) if keep_actor else nullcontext()
            with one_thread(), self._random.in_use(), kept:
                self.model.train(self._updates, self.options.batch_size)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return arrays and plain values that `restore` takes."""
        tensors = model_tensors(self.model) | buffer_tensors(self._buffer)
        tensors["random.torch"] = self._random.torch_state
        tensors["random.numpy"] = torch.from_numpy(self._random.numpy_state)
        values: dict[str, Any] = {"baseline": self._baseline, "last_reward": self._last_reward}
        return tensors, values

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Take over the state of an agent with the same problem, algorithm and options."""
        restore_model(self.model, tensors)
        restore_buffer(self._buffer, tensors)
        self._random = RandomState(tensors["random.torch"].clone(), tensors["random.numpy"].numpy().copy())
        self._baseline, self._last_reward = values["baseline"], float(values["last_reward"])

    @property
    def _buffer(self) -> Any:
        return self.model.replay_buffer

    @property
    def _updates(self) -> int:
        """Gradient steps after an episode: whole rounds of an actor that learns at every other step.

        So nothing that an algorithm counts has to be kept between episodes.
        """
        wanted = self.options.updates_per_episode or self.env.layers
        delay: int = getattr(self.model, "policy_delay", 1)
        return math.ceil(wanted / delay) * delay

    def _observe(self, layer: int, actions: np.ndarray) -> np.ndarray:
        """Return the observations of episodes before the action of a layer, (episodes, features)."""
        if "budget_left" not in self.options.features:
            return self.env.encoder(layer, actions, last_reward=self._last_reward)
        left = []
        for episode in actions:
            played = create_action_map(self.problem, self.options.action, scale=self._scale)
            for taken in range(layer):
                played.take(taken, float(episode[taken]))
            left.append(played.budget_left())
        parts = [
            self.env.encoder(layer, actions[[j]], left[j], self._last_reward) for j in range(len(actions))
        ]
        return np.concatenate(parts)
