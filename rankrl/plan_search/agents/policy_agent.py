"""Choose ranks layer by layer with DDPG, TD3 or SAC, learn from whole episodes, and save their state."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import numpy as np
import torch
from stable_baselines3 import DDPG, SAC, TD3
from stable_baselines3.common.logger import Logger
from torch import nn

from rankrl.errors import ConfigError
from rankrl.options.selectors import IMPORTANCE_SCALE
from rankrl.plan_search.agents.policy_file import (
    AgentOptions,
    PolicyFile,
    actor_layers,
    load_layers,
    options_with_policy,
    read_policy,
)
from rankrl.plan_search.envs.actions import create_action_map
from rankrl.plan_search.envs.rank_selection import RankSelectionEnv
from rankrl.plan_search.space.problem import SearchProblem


def start_from(model: Algorithm, policy: PolicyFile, *, deviation: float) -> None:
    """Load a pretrained policy's weights into a model's actor and target actor."""
    policy.check_observed(int(model.observation_space.shape[0]))  # type: ignore[index]
    actors = [model.actor]
    if not isinstance(model, SAC):
        actors.append(model.actor_target)
    for actor in actors:
        load_layers(actor_layers(actor), policy)
    if isinstance(model, SAC):
        with torch.no_grad():
            spread = cast(nn.Linear, model.actor.log_std)
            spread.weight.zero_()
            spread.bias.fill_(math.log(max(deviation, 1e-3)))  # 0 has no logarithm


Algorithm = TD3 | SAC
"""Every algorithm here is one of these; DDPG is a TD3."""


@contextmanager
def actor_kept(model: Algorithm) -> Iterator[None]:
    """Restore the actor, its target and its optimizer after training in the block."""
    parts = [model.actor, model.actor.optimizer]
    if not isinstance(model, SAC):
        parts.append(model.actor_target)
    before = [copy.deepcopy(part.state_dict()) for part in parts]
    yield
    for part, state in zip(parts, before, strict=True):
        part.load_state_dict(state)


@contextmanager
def seeded(*seeds: int) -> Iterator[None]:
    """Seed torch's and numpy's global generators, from which stable-baselines3 draws, and restore them."""
    seed = int(np.random.SeedSequence(seeds).generate_state(1)[0])
    outside_torch, outside_numpy = torch.get_rng_state(), np.random.get_state(legacy=True)
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(outside_torch)
        np.random.set_state(outside_numpy)


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread: for tiny networks, several cost more than they gain."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


ALGORITHMS: dict[str, type[Algorithm]] = {"ddpg": DDPG, "td3": TD3, "sac": SAC}
"""DDPG (Lillicrap et al., ICLR 2016), TD3 (Fujimoto et al., ICML 2018), SAC (Haarnoja et al., ICML 2018)."""

# What the global generators are seeded for, besides an agent's seed and the episodes it has learned from.
_ACTING, _LEARNING = 0, 1
# Polyak coefficient of the target networks' updates.
_TAU = 0.01


class PolicyAgent:
    """A policy that acts layer by layer and learns from whole episodes.

    The algorithms are stable-baselines3's. Every transition's target is the reward at the end of its episode,
    as in AMC (He et al., ECCV 2018), here an n-step return over the whole episode; the reward of the first
    episode, the preset plan's, is subtracted as a baseline. `act` and `learn` replace stable-baselines3's own
    loop, because many plans may be scored at once and a search is recorded between episodes.

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
            descriptors=None if policy is None else policy.card.descriptors,
        )
        self._seed = seed
        with seeded(seed):
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
        self._learned = 0

    def act(self, noise: np.ndarray, *, deterministic: bool = False) -> np.ndarray:
        """Roll out the policy with noise over all layers, for several episodes at once.

        Args:
            noise: What is added to the policy's actions, shape (episodes, layers). SAC's policy
                is stochastic itself and gets none.
            deterministic: Whether SAC's policy takes the mean of its actions instead.

        Returns:
            Actions in [-1, 1], of the same shape.
        """
        actions = np.zeros_like(noise, dtype=np.float32)
        stochastic = isinstance(self.model, SAC) and not deterministic
        with one_thread(), seeded(self._seed, self._learned, _ACTING):
            for layer in range(self.env.layers):
                observations = self._observe(layer, actions)
                predicted, _ = self.model.predict(observations, deterministic=not stochastic)
                actions[:, [layer]] = np.clip(
                    predicted if stochastic else predicted + noise[:, [layer]], -1, 1
                )
        return actions

    def learn(self, actions: np.ndarray, reward: float, *, keep_actor: bool = False) -> None:
        """Add a rewarded episode to the replay buffer and take gradient steps.

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
        self._learned += 1
        if self._buffer.size() > self.options.batch_size:
            updates = self.options.updates_per_episode or self.env.layers
            kept = actor_kept(self.model) if keep_actor else nullcontext()
            with one_thread(), seeded(self._seed, self._learned, _LEARNING), kept:
                self.model.train(updates, self.options.batch_size)

    @property
    def _buffer(self) -> Any:
        return self.model.replay_buffer

    def _observe(self, layer: int, actions: np.ndarray) -> np.ndarray:
        """Return the episodes' observations before a layer's action, (episodes, features)."""
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
