"""Imagined episodes: plans that were never scored, rewarded by the model of those that were (Dyna)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.buffers import NStepReplayBuffer
from torch import Tensor

from rankrl.plan_search.envs.rank_selection import RankSelectionEnv
from rankrl.plan_search.space.reward_model import RewardModel

# Scored plans before the model is believed.
_LEAST_KNOWN = 10


class Imagination:
    """Episodes around the best plan so far and of the policy's own, rewarded by a fitted model (Sutton 1991).

    The model is the Gaussian process of `bayes`, from what layers lose to the plan's reward. Its episodes are
    made anew, with the model as it is then, whenever the agent learns from them; none is kept.

    Args:
        env: The agent's environment.
        episodes: Episodes imagined at a time.
        scale: Standard deviation of their noise.
        counts: How much each layer's loss counts by a pretrained policy, (layers,), or None (`RewardModel`).
    """

    def __init__(
        self, env: RankSelectionEnv, episodes: int, scale: float, counts: np.ndarray | None = None
    ) -> None:
        self.env, self.episodes, self.scale = env, episodes, scale
        self.model = RewardModel(counts)
        self._shape = (env.layers, env.map.components)
        self._best = np.zeros(self._shape, dtype=np.float32)
        self._best_reward = -np.inf

    @property
    def ready(self) -> bool:
        """Whether enough plans were scored for the model to be believed."""
        return len(self.model) >= _LEAST_KNOWN

    def remember(self, actions: np.ndarray, reward: float) -> None:
        """Tell the model a scored plan; actions (layers, components)."""
        self.model.add(self.env.map.loss_roots(actions[None])[0], reward)
        if reward > self._best_reward:
            self._best, self._best_reward = actions.astype(np.float32), reward

    def imagine(
        self, noise: np.ndarray, share: np.ndarray, act: Callable[[np.ndarray], np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Imagine episodes: half of them changes of the best plan, the others the policy's.

        Args:
            noise: Standard normal, shape (episodes, layers, components).
            share: Uniform in [0, 1], of the same shape, and one more column of layers for each episode's
                share of layers that change.
            act: From noise to the policy's actions.

        Returns:
            Actions of the shape of the noise, and their expected rewards (episodes,).
        """
        half = len(noise) // 2
        touched = share[:half, :-1] < share[:half, -1:]
        changed = (self._best + touched * self.scale * noise[:half]).clip(-1, 1).astype(np.float32)
        actions = np.concatenate([changed, act(self.scale * noise[half:])])
        mean, _ = self.model.predict(self.env.map.loss_roots(actions))
        return actions, mean

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return arrays and plain values that `restore` takes."""
        tensors = {f"imagination.{name}": tensor for name, tensor in self.model.state().items()}
        tensors["imagination.best"] = torch.from_numpy(self._best.copy())
        known = np.isfinite(self._best_reward)
        return tensors, {"imagination_best": float(self._best_reward) if known else None}

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Take over what `state` returned."""
        prefix = "imagination."
        own = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        self._best = own.pop("best").numpy().copy()
        self.model.restore(own)
        best = values["imagination_best"]
        self._best_reward = -np.inf if best is None else float(best)


def filled(
    like: NStepReplayBuffer, observations: np.ndarray, actions: np.ndarray, rewards: np.ndarray
) -> NStepReplayBuffer:
    """Return a replay buffer that holds whole episodes.

    Args:
        like: A buffer of the same environment.
        observations: Shape (episodes, layers + 1, features).
        actions: Shape (episodes, layers, components).
        rewards: Shape (episodes, layers).
    """
    episodes, layers = rewards.shape
    buffer = NStepReplayBuffer(
        episodes * layers,
        like.observation_space,
        like.action_space,
        device=like.device,
        n_steps=like.n_steps,
        gamma=like.gamma,
    )
    dones = np.zeros_like(rewards)
    dones[:, -1] = 1
    for name, values in {
        "observations": observations[:, :-1],
        "next_observations": observations[:, 1:],
        "actions": actions,
        "rewards": rewards,
        "dones": dones,
    }.items():
        held = getattr(buffer, name)
        held[:] = values.reshape(held.shape)
    buffer.full = True
    return buffer
