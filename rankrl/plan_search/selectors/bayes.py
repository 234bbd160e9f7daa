"""A Gaussian process from what a plan's layers lose to the plan's reward."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from threadpoolctl import ThreadpoolController
from torch import Tensor

from rankrl.options.decomposition import AUTO
from rankrl.options.selectors import FINAL_SCALE, IMPORTANCE_SCALE, BayesOptions
from rankrl.plan_search.agents.policy_file import (
    AgentOptions,
    PolicyFile,
    options_with_policy,
    read_policy,
    resolved_policy,
)
from rankrl.plan_search.envs.actions import (
    ActionKind,
    check_action,
    create_action_map,
)
from rankrl.plan_search.selectors.selector import (
    Proposal,
    Selector,
    SelectorState,
    generator_state,
    register_selector,
    restore_generator,
)
from rankrl.plan_search.space.problem import Choices, SearchProblem, SearchSetting

if TYPE_CHECKING:
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import Kernel


# Plans between two searches for the kernel's hyper-parameters, and plans remembered at most: solving costs
# their third power.
_PERIOD = 10
_CAPACITY = 600


class RewardModel:
    """Gaussian-process regression (Rasmussen & Williams 2006) of rewards on layer losses, by scikit-learn.

    The reward depends on a plan through what every layer loses; the actions stand for that only through the
    allocation, which is neither smooth nor one to one. Seen from the losses the reward is smooth and nearly
    linear, so that some tens of plans teach what networks on actions need hundreds for. The kernel is a
    squared exponential plus a linear one and noise; its hyper-parameters are those of the highest likelihood.

    What the process learns may be what is left of an additive model's guess, its mean function (section 2.7
    there): a plan loses the sum of what its layers lose, each counted as `counts` says.
    """

    def __init__(self, counts: np.ndarray | None = None) -> None:
        self._counts = counts
        self._roots: list[np.ndarray] = []
        self._rewards: list[float] = []
        self._theta: np.ndarray | None = None
        self._chosen_at = 0
        self._process: GaussianProcessRegressor | None = None  # fitted to the plans known now

    def __len__(self) -> int:
        return len(self._rewards)

    def add(self, roots: np.ndarray, reward: float) -> None:
        """Remember a plan."""
        self._process = None
        self._roots.append(np.asarray(roots, dtype=float))
        self._rewards.append(reward)
        if len(self._rewards) > _CAPACITY:  # what is known of the worst plans helps least
            worst = int(np.argmin(self._rewards))
            del self._roots[worst], self._rewards[worst]

    def predict(self, roots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Predict rewards.

        Shapes: roots (N, layers); returns (N,).
        """
        if not self._rewards:
            return np.zeros(len(roots)), np.ones(len(roots))
        known, rewards = np.stack(self._roots), np.array(self._rewards)
        centre, scale = known.mean(0), known.std(0)
        # Layers that never changed tell nothing; without the floor a first change would be off any scale.
        scale = np.maximum(scale, 1e-2 * scale.max() + 1e-12)
        expected, guess = self._guesses(known, rewards, roots)
        left = rewards - expected
        spread = max(float(left.std()), 1e-9)
        with _quiet():
            if self._process is None:
                self._process = self._fitted((known - centre) / scale, (left - left.mean()) / spread)
            mean, deviation = self._process.predict((roots - centre) / scale, return_std=True)
        return guess + mean * spread + left.mean(), deviation * spread

    def state(self) -> dict[str, Tensor]:
        """Return everything as tensors."""
        theta = np.zeros(0) if self._theta is None else self._theta
        roots = np.stack(self._roots) if self._roots else np.zeros((0, 0))
        return {
            "roots": torch.from_numpy(roots.copy()),
            "rewards": torch.tensor(self._rewards, dtype=torch.float64),
            "theta": torch.from_numpy(theta.copy()),
            "chosen_at": torch.tensor(self._chosen_at),
        }

    def restore(self, state: dict[str, Tensor]) -> None:
        """Take over what `state` returned."""
        self._process = None
        self._roots = list(state["roots"].numpy().copy())
        self._rewards = state["rewards"].tolist()
        theta = state["theta"].numpy().copy()
        self._theta = theta if len(theta) else None
        self._chosen_at = int(state["chosen_at"])

    def _guesses(
        self, known: np.ndarray, rewards: np.ndarray, roots: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return what the additive model says of the known plans and of others, each but for a constant.

        How much reward a unit of loss costs is fitted to the known plans: by least squares, never below 0.
        """
        if self._counts is None:
            return np.zeros(len(known)), np.zeros(len(roots))
        losses = known**2 @ self._counts
        excess = losses - losses.mean()
        price = max(0.0, -float(excess @ rewards) / max(float(excess @ excess), 1e-300))
        return -price * losses, -price * (roots**2 @ self._counts)

    def _fitted(self, known: np.ndarray, targets: np.ndarray) -> GaussianProcessRegressor:
        from sklearn.gaussian_process import GaussianProcessRegressor

        due = len(self) >= self._chosen_at + _PERIOD
        kernel = _kernel(known.shape[1])
        if self._theta is not None:
            kernel = kernel.clone_with_theta(self._theta)
        process = GaussianProcessRegressor(kernel, alpha=1e-8, optimizer="fmin_l_bfgs_b" if due else None)
        process.fit(known, targets)
        if due:
            self._theta, self._chosen_at = process.kernel_.theta.copy(), len(self)
        return process


@cache
def _libraries() -> ThreadpoolController:
    """Find the process's libraries that keep threads, once: it takes milliseconds."""
    return ThreadpoolController()


@contextmanager
def _quiet() -> Iterator[None]:
    """Compute on one thread, on whose number the last bits of a result must not depend, without warnings.

    scikit-learn warns of hyper-parameters at their bounds, which are there to be reached.
    """
    from sklearn.exceptions import ConvergenceWarning

    with _libraries().limit(limits=1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.filterwarnings("ignore", message="Predicted variances smaller than 0")
        yield


def _kernel(layers: int) -> Kernel:
    """Return the kernel before any plan is known; lengths grow with the root of the number of layers."""
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct, WhiteKernel

    length = 2 * layers**0.5
    smooth = ConstantKernel(1.0, (1e-2, 1e2)) * RBF(length, (0.2 * length, 5 * length))
    linear = ConstantKernel(0.3 / layers, (1e-4 / layers, 1e2 / layers)) * DotProduct(0.0, "fixed")
    return smooth + linear + WhiteKernel(0.03, (1e-3, 1.0))


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
