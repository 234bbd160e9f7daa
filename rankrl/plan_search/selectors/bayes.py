"""Bayesian optimisation: a Gaussian process chooses among local changes of the best plan so far."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from rankrl.options.agents import FINAL_SCALE, IMPORTANCE_SCALE
from rankrl.options.decomposition import AUTO
from rankrl.options.selectors import BayesOptions
from rankrl.plan_search.agents.options import AgentOptions, options_with_policy, resolved_policy
from rankrl.plan_search.agents.policy_file import PolicyFile, read_policy
from rankrl.plan_search.envs.actions import (
    ActionKind,
    check_action,
    create_action_map,
)
from rankrl.plan_search.selectors.base import (
    Proposal,
    Selector,
    SelectorState,
    generator_state,
    restore_generator,
)
from rankrl.plan_search.selectors.registry import register_selector
from rankrl.plan_search.selectors.reward_model import RewardModel
from rankrl.plan_search.space.problem import Choices, SearchProblem
from rankrl.plan_search.space.setting import SearchSetting

log = logging.getLogger(__name__)

# How often a plan is sought anew when it has been proposed before.
_ATTEMPTS = 8
# How many of the best candidates are changed again.
_PARENTS = 8
_REFINEMENTS = 2
# Standard deviation of the noise around greedy's, or the policy's, plan in the warm-up.
_WARMUP_NOISE = 0.15
# Standard deviations that are added to the expected reward.
_OPTIMISM = 0.5


@register_selector
class BayesSelector(Selector):
    """A Gaussian process over what the layers lose, and local changes of the best plan for it to choose from.

    After a warm-up around greedy's plan, each step imagines plans as changes of the best one so far, changes
    the most promising ones again, and proposes the one with the highest upper confidence bound of its reward
    (Srinivas et al., ICML 2010).

    A pretrained policy, by default the one that comes with rankrl where plans are ranks and roundings within
    a budget (`resolved_policy`), says beforehand how much each layer's loss counts: the process then learns
    only what this leaves unexplained. The first plan is the policy's own, the second greedy's, and the
    warm-up is around the first.

    Args:
        problem: What to choose for.
        seed: Seed of the draws.
        episodes: Plans that the decay of the step spans.
        **options: Those of `BayesOptions`.
    """

    name = "bayes"
    description = "a Gaussian process chooses among local changes of the best plan so far"
    own_options: ClassVar[type[BayesOptions]] = BayesOptions

    def __init__(self, problem: SearchProblem, *, seed: int, episodes: int, **options: Any) -> None:
        super().__init__(problem, seed=seed, episodes=episodes)
        own = self.own_options(**options)
        self.warmup_episodes, self.step = own.warmup_episodes, own.step
        self.candidates, self.plans_per_step = own.candidates, own.plans_per_step
        action, importance_scale = own.action, IMPORTANCE_SCALE
        policy = resolved_policy(own.policy, action, problem.setting)
        log.info("bayes begins with %s", "greedy's plan" if policy is None else f"the policy {policy}")
        known = None if policy is None else self._policy(policy, action)
        if known is not None:
            action, importance_scale = known.card.action, known.card.importance_scale
        self._map = create_action_map(problem, action, scale=importance_scale)
        self._generator = np.random.default_rng(seed)
        self._centre, counts = np.zeros(len(problem.sites)), None
        if known is not None:
            actions = known.actions_for(problem)
            self._centre, counts = actions, known.counts(actions)
        self._pretrained = known is not None
        self._model = RewardModel(counts)
        self._best = self._centre
        self._best_reward = -np.inf
        self._proposed: list[np.ndarray] = []
        self._played = 0
        self._seen: set[Choices] = set()
        # What the layers lose under the plans proposed, as bytes: it tells plans apart before they are made.
        self._known: set[bytes] = set()

    @classmethod
    def check_ranges(cls, options: Mapping[str, Any]) -> None:
        """Refuse options out of their ranges."""
        super().check_ranges(options)
        if options["policy"] not in (None, AUTO):
            cls._policy(options["policy"], options["action"])

    @classmethod
    def check_setting(cls, options: Mapping[str, Any], setting: SearchSetting) -> None:
        """Refuse an action that the search has no use for."""
        policy = resolved_policy(options["policy"], options["action"], setting)
        check_action(options["action"] if policy is None else "importance", setting=setting)

    def propose(self) -> list[Proposal]:
        """Choose plans; none that was proposed before if another can be found."""
        proposals, self._proposed = [], []
        alone = self._played <= int(self._pretrained)
        for _ in range(1 if alone else self.plans_per_step):
            for _ in range(_ATTEMPTS):
                actions, phase = self._choose()
                choices = self._map.choices_of(actions)
                if choices not in self._seen:
                    break
            self._seen.add(choices)
            self._known.add(self._map.loss_roots(actions[None])[0].tobytes())
            self._played += 1
            self._proposed.append(actions)
            proposals.append(Proposal(choices, phase))
        return proposals

    def observe(self, proposals: Sequence[Proposal], rewards: Sequence[float]) -> None:
        """Tell the process what the plans brought."""
        for actions, reward in zip(self._proposed, rewards, strict=False):
            self._model.add(self._map.loss_roots(actions[None])[0], reward)
            if reward > self._best_reward:
                self._best, self._best_reward = actions, reward

    def state(self) -> SelectorState:
        """Return the plans seen, the process, the best actions and the generator's state."""
        tensors = {f"model.{name}": value for name, value in self._model.state().items()}
        known = np.frombuffer(b"".join(sorted(self._known))).reshape(-1, len(self._centre))
        tensors |= {"best": torch.from_numpy(self._best.copy()), "known": torch.from_numpy(known.copy())}
        values: dict[str, Any] = {
            "played": self._played,
            "seen": [list(choices) for choices in sorted(self._seen)],
            "generator": generator_state(self._generator),
        }
        if np.isfinite(self._best_reward):
            values["best_reward"] = self._best_reward
        return SelectorState(tensors, values)

    def restore(self, state: SelectorState) -> None:
        """Take over what `state` returned."""
        prefix = "model."
        self._model.restore(
            {key.removeprefix(prefix): v for key, v in state.tensors.items() if key.startswith(prefix)}
        )
        self._best = state.tensors["best"].numpy().copy()
        self._known = {row.tobytes() for row in state.tensors["known"].numpy()}
        self._best_reward = float(state.values.get("best_reward", -np.inf))
        self._played = int(state.values["played"])
        self._seen = {tuple(choices) for choices in state.values["seen"]}
        restore_generator(self._generator, state.values["generator"])

    @staticmethod
    def _policy(policy: str | Path, action: ActionKind | None) -> PolicyFile:
        """Read a policy; refuse options that contradict it."""
        pretrained = read_policy(policy)
        asked = AgentOptions(policy=policy, action=action)
        options_with_policy(asked, pretrained)
        return pretrained

    def _choose(self) -> tuple[np.ndarray, str]:
        """Return the actions of the next plan, shape (sites,), and the phase."""
        if self._pretrained and self._played == 0:
            return self._centre, "pretrained"
        if self._played == int(self._pretrained):
            return np.zeros_like(self._centre), "preset"
        if self._played < self.warmup_episodes or not len(self._model):
            noise = _WARMUP_NOISE * self._generator.standard_normal(len(self._centre))
            return (self._centre + noise).clip(-1, 1), "warm-up"
        span = max(self.episodes - 1, self.warmup_episodes + 1) - self.warmup_episodes
        progress = min(1.0, (self._played - self.warmup_episodes) / span)
        scale = self.step * (min(FINAL_SCALE, self.step) / self.step) ** progress
        candidates = self._changed(np.tile(self._best, (self.candidates, 1)), scale)
        bounds = self._bounds(candidates)
        for _ in range(_REFINEMENTS):
            parents = candidates[np.argsort(-bounds, kind="stable")[:_PARENTS]]
            copies = parents[np.arange(len(candidates)) % len(parents)]
            candidates = np.concatenate([parents, self._changed(copies, scale)])
            bounds = self._bounds(candidates)
        return candidates[int(bounds.argmax())], "bayes"

    def _changed(self, actions: np.ndarray, scale: float) -> np.ndarray:
        """Change plans; each in a share of its layers of its own, from none to all."""
        touched = self._generator.random(actions.shape) < self._generator.random((len(actions), 1))
        noise = scale * self._generator.standard_normal(actions.shape)
        return (actions + touched * noise).clip(-1, 1)

    def _bounds(self, candidates: np.ndarray) -> np.ndarray:
        """Return the upper confidence bound of each plan's reward; no plan twice."""
        roots = self._map.loss_roots(candidates)
        mean, deviation = self._model.predict(roots)
        known = [row.tobytes() in self._known for row in roots]
        return np.where(known, -np.inf, mean + _OPTIMISM * deviation)
