"""The agent: imagines episodes, lets its critics choose one, plays it, and learns from its reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rankrl.agents.algorithms import create_algorithm
from rankrl.agents.buffer import EpisodeBuffer
from rankrl.agents.critics import CriticEnsemble
from rankrl.agents.options import AgentOptions
from rankrl.agents.plan_critic import PlanCritic
from rankrl.agents.randomness import RandomState, one_thread
from rankrl.agents.state import model_tensors, restore_model
from rankrl.envs.actions import create_action_map
from rankrl.envs.rank_selection import RankSelectionEnv
from rankrl.plan_search.problem import Choices, SearchProblem

# How often an episode is imagined anew when its plan has been played before.
_ATTEMPTS = 8
# How many of the best candidates are changed again.
_PARENTS = 8


@dataclass(frozen=True, eq=False)
class Episode:
    """One pass over the layers, played and not yet rewarded.

    Attributes:
        observations: Shape (layers + 1, features).
        actions: Shape (layers, components).
        choices: The plan that the actions stand for: the candidate of every layer.
        phase: `preset`, `warm-up` or `policy`.
    """

    observations: np.ndarray
    actions: np.ndarray
    choices: Choices
    phase: str


class RankAgent:
    """A stable-baselines3 agent on `RankSelectionEnv`.

    After a warm-up around the preset, every episode goes like this: candidates are imagined, some as noisy
    passes of the policy, some as changes of the best episode so far; the critics value each whole plan, and
    the one with the highest mean plus `optimism` standard deviations is played in the environment (an upper
    confidence bound over an ensemble; Chen et al. 2017, "UCB Exploration via Q-Ensembles"). Evaluating a
    plan takes a hundred times as long as imagining one, so this is where the samples are saved.

    Args:
        problem: What to choose for.
        algorithm: `ddpg`, `td3` or `sac`.
        options: Hyper-parameters.
        seed: Seed of networks and noise.
        episodes: Episodes that the noise's decay spans.
    """

    def __init__(
        self, problem: SearchProblem, algorithm: str, options: AgentOptions, *, seed: int, episodes: int
    ) -> None:
        self.options = options
        self.episodes = episodes
        self.env = RankSelectionEnv(
            problem,
            action=options.action,
            per_bond=options.per_bond,
            features=options.features,
            importance_scale=options.importance_scale,
        )
        self._problem = problem
        self._shape = (self.env.layers, self.env.map.components)
        self._random = RandomState.seeded(seed)
        with self._random.in_use():
            held = episodes if options.buffer_episodes is None else options.buffer_episodes
            buffer_size = held * self.env.layers
            self.model = create_algorithm(algorithm, self.env, options, buffer_size=buffer_size)
        self._plan_critic = PlanCritic() if options.plan_critic else None
        self._buffer.layers, self._buffer.whole_share = self.env.layers, options.whole_share
        self._played = 0
        self._last_reward = 0.0
        self._best = np.zeros(self._shape, dtype=np.float32)
        self._best_reward = -np.inf
        self._seen: set[Choices] = set()
        # What the layers lose under the plans played, as bytes: it tells plans apart before they are made.
        self._known: set[bytes] = set()

    def play(self) -> Episode:
        """Choose an episode and play it; the environment leaves its plan to be scored by the caller."""
        with one_thread(), self._random.in_use(), torch.no_grad():
            for _ in range(_ATTEMPTS):
                actions, phase = self._choose()
                episode = self._play(actions, phase)
                if episode.choices not in self._seen:
                    break
        self._seen.add(episode.choices)
        self._played += 1
        return episode

    def learn(self, episodes: Sequence[Episode], rewards: Sequence[float]) -> None:
        """Remember rewarded episodes and take gradient steps."""
        for episode, reward in zip(episodes, rewards, strict=True):
            if self._plan_critic is not None:
                roots = self._loss_roots(episode.actions[None])[0]
                self._plan_critic.add(roots, reward)
                self._known.add(roots.numpy().tobytes())
            self._buffer.add_episode(episode.observations, episode.actions, reward)
            self._last_reward = reward
            if reward > self._best_reward:
                self._best, self._best_reward = episode.actions, reward
        steps = self.options.updates_per_episode * len(episodes)
        if self._buffer.size() > self.options.batch_size and steps:
            with one_thread(), self._random.in_use():
                self.model.train(steps, self.options.batch_size)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return arrays and plain values that `restore` takes."""
        tensors = model_tensors(self.model)
        tensors |= {f"buffer.{name}": torch.from_numpy(v) for name, v in self._buffer.state().items()}
        if self._plan_critic is not None:
            tensors |= {f"plan_critic.{name}": value for name, value in self._plan_critic.state().items()}
            known = np.frombuffer(b"".join(sorted(self._known)))
            tensors["known"] = torch.from_numpy(known.reshape(-1, self.env.layers).copy())
        tensors["best"] = torch.from_numpy(self._best)
        tensors["random.torch"] = self._random.torch_state
        tensors["random.numpy"] = torch.from_numpy(self._random.numpy_state)
        values: dict[str, Any] = {
            "played": self._played,
            "updates": self.model._n_updates,
            "last_reward": self._last_reward,
            "seen": [list(choices) for choices in sorted(self._seen)],
        }
        if np.isfinite(self._best_reward):
            values["best_reward"] = self._best_reward
        return tensors, values

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Take over the state of an agent with the same problem, algorithm and options."""
        restore_model(self.model, tensors)
        prefix = "buffer."
        self._buffer.restore(
            {key.removeprefix(prefix): v.numpy() for key, v in tensors.items() if key.startswith(prefix)}
        )
        if self._plan_critic is not None:
            prefix = "plan_critic."
            self._plan_critic.restore(
                {key.removeprefix(prefix): v for key, v in tensors.items() if key.startswith(prefix)}
            )
            self._known = {row.tobytes() for row in tensors["known"].numpy()}
        self._best = tensors["best"].numpy().copy()
        self._random = RandomState(tensors["random.torch"].clone(), tensors["random.numpy"].numpy().copy())
        self._played, self.model._n_updates = int(values["played"]), int(values["updates"])
        self._last_reward = float(values["last_reward"])
        self._best_reward = float(values.get("best_reward", -np.inf))
        self._seen = {tuple(choices) for choices in values["seen"]}

    @property
    def _buffer(self) -> EpisodeBuffer:
        buffer = self.model.replay_buffer
        if not isinstance(buffer, EpisodeBuffer):
            raise TypeError(f"the agent's replay buffer is a {type(buffer).__name__}, not an EpisodeBuffer")
        return buffer

    def _noise_scale(self) -> float:
        """Return the standard deviation of the policy's noise in the episode at hand."""
        first, last = self.options.warmup_episodes, max(self.episodes - 1, self.options.warmup_episodes + 1)
        progress = min(1.0, (self._played - first) / (last - first))
        if self.options.noise == 0:
            return 0.0
        return self.options.noise * (self.options.final_noise / self.options.noise) ** progress

    def _choose(self) -> tuple[np.ndarray, str]:
        """Return the actions of the next episode, shape (layers, components), and its phase."""
        if self._played == 0:
            return np.zeros(self._shape, dtype=np.float32), "preset"
        if self._played < self.options.warmup_episodes:
            noise = self.options.warmup_noise * torch.randn(self._shape).numpy()
            return noise.clip(-1, 1), "warm-up"
        count = self.options.candidates
        noise = self._noise_scale() * torch.randn(count, *self._shape).numpy()
        elites = round(self.options.elite_share * count)
        # Every change of the best episode touches a share of the layers of its own, from none to all.
        touched = torch.rand(elites, *self._shape).numpy() < torch.rand(elites, 1, 1).numpy()
        changed = (self._best + touched * noise[:elites]).clip(-1, 1)
        candidates = np.concatenate([changed, self._imagine(noise[elites:])])
        if self._plan_critic is None:
            return candidates[self._most_promising(candidates)], "policy"
        return self._refined(candidates, self._plan_critic), "policy"

    def _refined(self, candidates: np.ndarray, critic: PlanCritic) -> np.ndarray:
        """Return the candidate that the plan critic expects most of, after changing the best ones again."""
        bounds = self._bounds(candidates, critic)
        for _ in range(self.options.refinements):
            parents = candidates[np.argsort(-bounds, kind="stable")[:_PARENTS]]
            copies = parents[np.arange(len(candidates)) % len(parents)]
            touched = torch.rand(copies.shape).numpy() < torch.rand(len(copies), 1, 1).numpy()
            noise = self._noise_scale() * torch.randn(copies.shape).numpy()
            children = (copies + touched * noise).clip(-1, 1).astype(np.float32)
            candidates = np.concatenate([parents, children])
            bounds = self._bounds(candidates, critic)
        return candidates[int(bounds.argmax())]

    def _bounds(self, candidates: np.ndarray, critic: PlanCritic) -> np.ndarray:
        """Return the upper confidence bound of each candidate's reward, shape (candidates,)."""
        roots = self._loss_roots(candidates)
        mean, deviation = critic.values(roots)
        bounds = (mean + self.options.optimism * deviation).numpy()
        known = [row.tobytes() in self._known for row in roots.numpy()]
        return np.where(known, -np.inf, bounds)

    def _loss_roots(self, actions: np.ndarray) -> Tensor:
        """Return the roots of what each layer loses under whole episodes, shape (episodes, layers)."""
        return torch.from_numpy(self.env.map.loss_roots(actions))

    def _imagine(self, noise: np.ndarray) -> np.ndarray:
        """Return the actions of noisy passes of the policy, shape (episodes, layers, components)."""
        actions = np.zeros_like(noise)
        if not len(noise):
            return actions
        for layer in range(self._shape[0]):
            chosen = self.model.actor(torch.from_numpy(self._observe(layer, actions))).numpy()
            actions[:, layer] = (chosen + noise[:, layer]).clip(-1, 1)
        return actions

    def _most_promising(self, candidates: np.ndarray) -> int:
        """Return which candidate the critics expect most of, seen from the last layer."""
        if len(candidates) == 1:
            return 0
        observations = torch.from_numpy(self._observe(self._shape[0] - 1, candidates))
        critic = self.model.critic
        if not isinstance(critic, CriticEnsemble):
            raise TypeError(f"the agent's critic is a {type(critic).__name__}, not a CriticEnsemble")
        values = critic.values(observations, torch.from_numpy(candidates[:, -1]))
        bound = values.mean(0) + self.options.optimism * values.std(0, correction=0)
        return int(bound.argmax())

    def _observe(self, layer: int, actions: np.ndarray) -> np.ndarray:
        """Return the observations of imagined episodes before the action of a layer, (episodes, features)."""
        if "budget_left" not in self.options.features:
            return self.env.encoder(layer, actions, last_reward=self._last_reward)
        left = []
        for episode in actions:
            imagined = create_action_map(
                self._problem,
                self.options.action,
                per_bond=self.options.per_bond,
                scale=self.options.importance_scale,
            )
            for taken in range(layer):
                imagined.take(taken, episode[taken])
            left.append(imagined.budget_left())
        parts = [
            self.env.encoder(layer, actions[[j]], left[j], self._last_reward) for j in range(len(actions))
        ]
        return np.concatenate(parts)

    def _play(self, actions: np.ndarray, phase: str) -> Episode:
        observation, info = self.env.reset(options={"last_reward": self._last_reward})
        observations = [observation]
        for action in actions:
            observation, _, _, _, info = self.env.step(action)
            observations.append(observation)
        return Episode(np.stack(observations), actions, info["choices"], phase)
