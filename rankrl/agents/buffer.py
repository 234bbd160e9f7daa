"""The replay buffer: whole episodes, every transition with the episode's reward."""

from __future__ import annotations

import numpy as np
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize


class EpisodeBuffer(ReplayBuffer):
    """Holds the episode's reward in each of its transitions, each marked as the last of its episode.

    A plan is known to be good or bad only as a whole, and an undiscounted return (gamma 1) is the same at
    every layer; so the return itself is the target of the critic at every layer, as in AMC (He et al., ECCV
    2018), and nothing is bootstrapped. Rewards are standardised over the buffer when they are sampled, since
    it is the small differences between plans that matter.

    Attributes:
        layers: Transitions in an episode.
        whole_share: Share of a draw, 0 to 1, that is taken from the last layer's transitions alone, which
            show the critic whole plans.
    """

    layers: int = 1
    whole_share: float = 0.0

    def add_episode(self, observations: np.ndarray, actions: np.ndarray, reward: float) -> None:
        """Add an episode.

        Args:
            observations: Shape (layers + 1, features).
            actions: Shape (layers, components).
            reward: The plan's reward.
        """
        for layer, action in enumerate(actions):
            self.add(
                observations[layer],
                observations[layer + 1],
                action,
                np.array(reward),
                np.array(True),
                [{}],
            )

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> ReplayBufferSamples:
        """Draw transitions, in random order."""
        indices = np.random.randint(self.size(), size=batch_size)
        last = indices // self.layers * self.layers + self.layers - 1
        whole = np.random.random(batch_size) < self.whole_share
        return self._get_samples(np.where(whole, last, indices), env=env)

    def state(self) -> dict[str, np.ndarray]:
        """Return the filled part of every array, and where the next transition goes."""
        filled = self.buffer_size if self.full else self.pos
        arrays = {name: getattr(self, name)[:filled] for name in _ARRAYS}
        return {**arrays, "position": np.array([self.pos, int(self.full)])}

    def restore(self, arrays: dict[str, np.ndarray]) -> None:
        """Take over what `state` returned from a buffer of the same size."""
        for name in _ARRAYS:
            getattr(self, name)[: len(arrays[name])] = arrays[name]
        self.pos, self.full = int(arrays["position"][0]), bool(arrays["position"][1])

    def _normalize_reward(self, reward: np.ndarray, env: VecNormalize | None = None) -> np.ndarray:  # type: ignore[override]
        known = self.rewards[: self.buffer_size if self.full else self.pos]
        return ((reward - known.mean()) / (known.std() + 1e-6)).astype(np.float32)


_ARRAYS = ("observations", "next_observations", "actions", "rewards", "dones")
