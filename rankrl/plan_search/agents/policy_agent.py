"""Choose ranks layer by layer with DDPG, TD3 or SAC, learn from whole episodes, and save their state."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from stable_baselines3 import DDPG, SAC, TD3
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.logger import Logger
from torch import Tensor, nn
from torch.optim import Optimizer

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


def model_tensors(model: Algorithm) -> dict[str, Tensor]:
    """Return all tensors that training changes in a model, by name, except its replay buffer and counters."""
    tensors = {f"policy.{key}": value for key, value in model.policy.state_dict().items()}
    for name, optimizer in _optimizers(model).items():
        for index, entries in optimizer.state_dict()["state"].items():
            tensors |= {f"{name}.{index}.{key}": torch.as_tensor(value) for key, value in entries.items()}
    if isinstance(model, SAC) and model.log_ent_coef is not None:
        tensors["log_ent_coef"] = model.log_ent_coef.detach()
    return tensors


def restore_model(model: Algorithm, tensors: Mapping[str, Tensor]) -> None:
    """Load the tensors that `model_tensors` returned for a model of the same shape."""
    policy = {key.removeprefix("policy."): v for key, v in tensors.items() if key.startswith("policy.")}
    model.policy.load_state_dict(policy)
    for name, optimizer in _optimizers(model).items():
        entries: dict[int, dict[str, Any]] = {}
        for key, value in tensors.items():
            if key.startswith(f"{name}."):
                _, index, entry = key.split(".")
                entries.setdefault(int(index), {})[entry] = value.clone()
        optimizer.load_state_dict({**optimizer.state_dict(), "state": entries})
    if isinstance(model, SAC) and model.log_ent_coef is not None:
        with torch.no_grad():
            model.log_ent_coef.copy_(tensors["log_ent_coef"])


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


def _optimizers(model: Algorithm) -> dict[str, Optimizer]:
    optimizers: dict[str, Optimizer] = {
        "actor_optimizer": model.actor.optimizer,
        "critic_optimizer": model.critic.optimizer,
    }
    if isinstance(model, SAC) and model.ent_coef_optimizer is not None:
        optimizers["entropy_optimizer"] = model.ent_coef_optimizer
    return optimizers


def buffer_tensors(buffer: ReplayBuffer) -> dict[str, Tensor]:
    """Return the filled part of a replay buffer and the position of the next transition, by name."""
    filled = buffer.buffer_size if buffer.full else buffer.pos
    tensors = {f"buffer.{name}": torch.from_numpy(getattr(buffer, name)[:filled].copy()) for name in _ARRAYS}
    return tensors | {"buffer.position": torch.tensor([buffer.pos, int(buffer.full)])}


def restore_buffer(buffer: ReplayBuffer, tensors: Mapping[str, Tensor]) -> None:
    """Load the tensors that `buffer_tensors` returned for a buffer of the same size."""
    for name in _ARRAYS:
        filled = tensors[f"buffer.{name}"].numpy()
        getattr(buffer, name)[: len(filled)] = filled
    position, full = tensors["buffer.position"].tolist()
    buffer.pos, buffer.full = position, bool(full)


_ARRAYS = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")


@dataclass
class RandomState:
    """An agent's own states of torch's and numpy's global generators.

    stable-baselines3 draws from the global generators. They are set to these states while an agent works and
    restored afterwards, so that the agent's draws and those of the rest of the process do not interfere.
    """

    torch_state: torch.Tensor
    numpy_state: np.ndarray

    @classmethod
    def seeded(cls, seed: int) -> RandomState:
        """Return the states of freshly seeded generators."""
        numpy_state = np.random.RandomState(seed % 2**32).get_state(legacy=True)
        return cls(torch.Generator().manual_seed(seed).get_state(), _pack(numpy_state))

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Set the global generators to this state in the block; record their state at its end."""
        outside_torch, outside_numpy = torch.get_rng_state(), np.random.get_state(legacy=True)
        torch.set_rng_state(self.torch_state)
        np.random.set_state(_unpack(self.numpy_state))
        try:
            yield
        finally:
            self.torch_state = torch.get_rng_state()
            self.numpy_state = _pack(np.random.get_state(legacy=True))
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


def _pack(state: Any) -> np.ndarray:
    """Pack numpy's Mersenne-Twister state into one float64 array, which holds 32-bit integers exactly."""
    _, keys, position, has_gauss, gauss = state
    return np.concatenate([np.asarray(keys, dtype=np.float64), [position, has_gauss, gauss]])


def _unpack(packed: np.ndarray) -> tuple[str, np.ndarray, int, int, float]:
    return ("MT19937", packed[:-3].astype(np.uint32), int(packed[-3]), int(packed[-2]), float(packed[-1]))


ALGORITHMS: dict[str, type[Algorithm]] = {"ddpg": DDPG, "td3": TD3, "sac": SAC}
"""DDPG (Lillicrap et al., ICLR 2016), TD3 (Fujimoto et al., ICML 2018), SAC (Haarnoja et al., ICML 2018)."""

# Polyak coefficient of the target networks' updates.
_TAU = 0.01


class PolicyAgent:
    """A policy that acts layer by layer and learns from whole episodes.

    The algorithms are stable-baselines3's. Every transition's target is the reward at the end of its episode,
    as in AMC (He et al., ECCV 2018), here an n-step return over the whole episode; the reward of the first
    episode, the preset plan's, is subtracted as a baseline. `act` and `learn` replace stable-baselines3's own
    loop, because many plans may be scored at once and a search is saved between episodes.

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
        with one_thread(), self._random.in_use():
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
        if self._buffer.size() > self.options.batch_size:
            kept = actor_kept(self.model) if keep_actor else nullcontext()
            with one_thread(), self._random.in_use(), kept:
                self.model.train(self._updates, self.options.batch_size)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the agent's state as tensors and plain values, for `restore`."""
        tensors = model_tensors(self.model) | buffer_tensors(self._buffer)
        tensors["random.torch"] = self._random.torch_state
        tensors["random.numpy"] = torch.from_numpy(self._random.numpy_state)
        values: dict[str, Any] = {"baseline": self._baseline, "last_reward": self._last_reward}
        return tensors, values

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Restore the state of an agent with the same problem, algorithm and options."""
        restore_model(self.model, tensors)
        restore_buffer(self._buffer, tensors)
        self._random = RandomState(tensors["random.torch"].clone(), tensors["random.numpy"].numpy().copy())
        self._baseline, self._last_reward = values["baseline"], float(values["last_reward"])

    @property
    def _buffer(self) -> Any:
        return self.model.replay_buffer

    @property
    def _updates(self) -> int:
        """Gradient steps after an episode, a multiple of TD3's policy delay.

        So the algorithms' update counters need not be saved between episodes.
        """
        wanted = self.options.updates_per_episode or self.env.layers
        delay: int = getattr(self.model, "policy_delay", 1)
        return math.ceil(wanted / delay) * delay

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
