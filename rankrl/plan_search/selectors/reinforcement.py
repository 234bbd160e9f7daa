"""Select plans by reinforcement learning: stable-baselines3's DDPG, TD3 and SAC in `RankSelectionEnv`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch

from rankrl.options.selectors import FINAL_SCALE, AgentOptions
from rankrl.plan_search.envs.actions import check_action
from rankrl.plan_search.envs.rank_selection import Act, Episode, RankSelectionEnv, repeat, rollout
from rankrl.plan_search.scores.evaluation import EpisodeRow
from rankrl.plan_search.selectors.selector import Proposal, Selector, register_selector
from rankrl.plan_search.space.problem import SearchProblem, SearchSetting

if TYPE_CHECKING:
    from stable_baselines3 import SAC, TD3

# What the global generators are seeded for, besides the seed and the number of episodes.
_ACTING, _LEARNING = 0, 1
# Polyak coefficient of the target networks' updates.
_TAU = 0.01
DETERMINISTIC_EVERY = 10
"""Every so many episodes the policy acts without noise: its learning curve, apart from exploration."""


@contextmanager
def seeded(*seeds: int) -> Iterator[None]:
    """Seed the global generators that stable-baselines3 draws from, on one thread; restore both."""
    seed = int(np.random.SeedSequence(seeds).generate_state(1)[0])
    outside, threads = np.random.get_state(legacy=True), torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            np.random.set_state(outside)


def noise_at(options: AgentOptions, episode: int, episodes: int) -> float:
    """Return the standard deviation of the policy's noise in an episode, from 0 on, of so many."""
    if options.noise == 0:
        return 0.0
    if options.noise_decay is not None:
        return options.noise * options.noise_decay ** max(0, episode - options.warmup_episodes)
    first, last = options.warmup_episodes, max(episodes - 1, options.warmup_episodes + 1)
    progress = min(1.0, max(0.0, (episode - first) / (last - first)))
    return options.noise * (min(FINAL_SCALE, options.noise) / options.noise) ** progress


@dataclass(frozen=True)
class PlayedPlan(Proposal):
    episode: Episode = field(kw_only=True, compare=False, repr=False)


class ReinforcementSelector(Selector):
    """Plays episodes with a policy that learns from the plans' rewards.

    Every transition's target is the reward at the end of its episode, as in AMC (He et al., ECCV 2018), here
    an n-step return over the whole episode; the reward of the first episode is subtracted as a baseline.

    The first plan is greedy's, if actions know it; a warm-up around it follows, then the policy acts, with
    noise.

    The episodes are not those of stable-baselines3's `learn`, which draws noise from generators that run on
    from one episode to the next, and holds the loop while plans are scored: a search is resumed from
    `episodes.csv` alone, and workers score several plans of a step. Updates are its own `train`.
    """

    own_options: ClassVar[type[AgentOptions]] = AgentOptions
    algorithm: ClassVar[str]
    """Name of stable-baselines3's class."""
    stochastic: ClassVar[bool] = False
    """Whether the policy draws its actions, so that they need no noise."""

    def __init__(self, problem: SearchProblem, *, seed: int, episodes: int, **options: Any) -> None:
        super().__init__(problem, seed=seed, episodes=episodes)
        own = AgentOptions(**options)
        self.env = RankSelectionEnv(problem, action=own.action, features=own.features)
        self.action_kind = self.env.map.action
        self.agent_options = own
        self.model = self._model()
        self._baseline: float | None = None
        self._last_reward = 0.0

    @classmethod
    def check_setting(cls, options: Mapping[str, Any], setting: SearchSetting) -> None:
        """Refuse a kind of action that does not suit the search."""
        check_action(options["action"], setting=setting)

    def propose(self) -> list[Proposal]:
        options = self.agent_options
        if self.env.map.knows_greedy and not self.observed:
            return self._play([("preset", repeat(np.zeros(self.env.layers, dtype=np.float32)))])
        noise = self.generator().standard_normal((options.plans_per_step, self.env.layers))
        if self._warming_up:
            explored = (options.warmup_noise * noise).astype(np.float32)
            return self._play([("warm-up", repeat(actions)) for actions in explored])
        noise *= noise_at(options, self.observed, self.episodes)
        policies = []
        for number, of_episode in enumerate(noise, self.observed + 1):
            deterministic = number % DETERMINISTIC_EVERY == 0
            phase = "deterministic" if deterministic else "policy"
            policies.append((phase, self._policy(None if deterministic else of_episode)))
        return self._play(policies)

    def observe(self, proposals: Sequence[Proposal], rewards: Sequence[float]) -> None:
        """Learn from the episodes; replay those of an earlier process."""
        episodes = [self._episode_of(proposal) for proposal in proposals]
        first = self.observed + 1
        super().observe(proposals, rewards)
        for number, (episode, reward) in enumerate(zip(episodes, rewards, strict=True), first):
            self._learn(number, episode, reward)

    @property
    def _warming_up(self) -> bool:
        return self.observed < self.agent_options.warmup_episodes

    def _model(self) -> TD3 | SAC:
        import stable_baselines3  # a second to import, for agents alone
        from stable_baselines3.common.logger import Logger

        options = self.agent_options
        with seeded(self.seed):
            model = getattr(stable_baselines3, self.algorithm)(
                "MlpPolicy",
                self.env,
                learning_rate=options.learning_rate,
                buffer_size=self.episodes * self.env.layers,
                batch_size=options.batch_size,
                tau=_TAU,
                gamma=1.0,
                n_steps=self.env.layers,
                policy_kwargs={"net_arch": list(options.hidden)},
                device="cpu",  # networks this small are slower on a GPU
            )
        model.set_logger(Logger(None, []))
        return cast("TD3 | SAC", model)

    def _policy(self, noise: np.ndarray | None) -> Act:
        """Return the policy, with the noise of each layer if it draws nothing itself; None for no noise."""

        def act(layer: int, observation: np.ndarray) -> np.ndarray:
            drawn = self.stochastic and noise is not None
            action, _ = self.model.predict(observation, deterministic=not drawn)
            return action if noise is None or drawn else action + noise[layer]

        return act

    def _play(self, policies: Sequence[tuple[str, Act]]) -> list[Proposal]:
        with seeded(self.seed, self.observed, _ACTING):
            episodes = [rollout(self.env, act, last_reward=self._last_reward) for _, act in policies]
        return [
            PlayedPlan(each.choices, phase, tuple(each.actions[:, 0].tolist()), episode=each)
            for (phase, _), each in zip(policies, episodes, strict=True)
        ]

    def _episode_of(self, proposal: Proposal) -> Episode:
        if isinstance(proposal, PlayedPlan):
            return proposal.episode
        return rollout(self.env, repeat(np.array(proposal.actions)), last_reward=self._last_reward)

    def account(self, row: EpisodeRow, last_reward: float) -> list[dict[str, Any]]:
        actions = np.array(json.loads(row.actions))
        episode = rollout(self.env, repeat(actions), last_reward=last_reward)
        names, sites = self.env.encoder.names, self.problem.sites
        return [
            {
                "layer": site.name,
                "observation": dict(zip(names, seen.astype(float).round(3).tolist(), strict=True)),
                "action": float(action[0]),
                "taken": str(site.candidates[choice]),
            }
            for site, seen, action, choice in zip(
                sites, episode.observations[:-1], episode.actions, row.key, strict=True
            )
        ]

    def _learn(self, number: int, episode: Episode, reward: float) -> None:
        """Add an episode to the replay buffer and take gradient steps."""
        if self._baseline is None:
            self._baseline = reward
        self._last_reward = reward
        buffer, options = self.model.replay_buffer, self.agent_options
        assert buffer is not None
        for layer, action in enumerate(episode.actions):
            seen, following = episode.observations[layer : layer + 2]
            done = layer == self.env.layers - 1
            earned = reward - self._baseline if done else 0.0
            buffer.add(seen, following, action, np.array(earned), np.array(done), [{}])
        if buffer.size() <= options.batch_size:
            return
        with seeded(self.seed, number, _LEARNING):
            self.model.train(options.updates_per_episode or self.env.layers, options.batch_size)
        if self.on_update is not None:
            self.on_update(number, self._numbers(number, episode))

    def _numbers(self, number: int, episode: Episode) -> dict[str, float]:
        """Return the mean losses of the last update, and values and noise of the episode's actions."""
        seen, acted = torch.from_numpy(episode.observations[:-1]), torch.from_numpy(episode.actions)
        warming_up = number <= self.agent_options.warmup_episodes
        with torch.no_grad():
            values = torch.cat(self.model.critic(seen, acted))
            noise = self.agent_options.warmup_noise if warming_up else self._noise(number, seen)
        logged = self.model.logger.name_to_value
        losses = {name: logged.get(f"train/{name}", math.nan) for name in ("actor_loss", "critic_loss")}
        return {**losses, "mean_q": float(values.mean()), "noise": noise}

    def _noise(self, number: int, seen: torch.Tensor) -> float:
        """Return the standard deviation of the policy's actions in an episode, from 1 on."""
        del seen
        return noise_at(self.agent_options, number - 1, self.episodes)


@register_selector
class DDPGSelector(ReinforcementSelector):
    """Deep deterministic policy gradient (Lillicrap et al., ICLR 2016), by stable-baselines3."""

    name = "ddpg"
    description = "deep deterministic policy gradient, from greedy's plan"
    algorithm = "DDPG"


@register_selector
class TD3Selector(ReinforcementSelector):
    """Twin delayed DDPG (Fujimoto et al., ICML 2018), by stable-baselines3.

    It has two critics, and an actor that learns at every other step.
    """

    name = "td3"
    description = "twin delayed DDPG: two critics, an actor that learns at every other step"
    algorithm = "TD3"


@register_selector
class SACSelector(ReinforcementSelector):
    """Soft actor-critic (Haarnoja et al., ICML 2018), by stable-baselines3: a stochastic policy."""

    name = "sac"
    description = "soft actor-critic: a stochastic policy that is paid for entropy"
    algorithm = "SAC"
    stochastic = True

    def _noise(self, number: int, seen: torch.Tensor) -> float:
        _, spread, _ = cast("SAC", self.model).actor.get_action_dist_params(seen)
        return float(spread.exp().mean())
