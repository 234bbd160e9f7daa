"""Select plans by Bayesian optimisation: a Gaussian process on the layers' losses predicts rewards."""

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


# Plans between two fits of the kernel's hyper-parameters, and most plans remembered: the cost of a fit grows
# with their third power.
_PERIOD = 10
_CAPACITY = 600


class RewardModel:
    """Gaussian-process regression (Rasmussen & Williams 2006) of rewards on layer losses, by scikit-learn.

    The inputs are the losses, not the actions: the allocation from actions to losses is neither smooth nor
    one to one, while the reward is smooth and nearly linear in the losses, so that tens of plans suffice
    where networks on actions need hundreds. The kernel is a squared exponential plus a linear one and noise;
    its hyper-parameters maximise the likelihood.

    The mean function (section 2.7 there) may be an additive model: the sum of the layers' losses weighted by
    `counts`. The process then learns the residual.
    """

    def __init__(self, counts: np.ndarray | None = None) -> None:
        self._counts = counts
        self._roots: list[np.ndarray] = []
        self._rewards: list[float] = []
        self._theta: np.ndarray | None = None
        self._chosen_at = 0
        self._process: GaussianProcessRegressor | None = None  # fitted to all plans added so far

    def __len__(self) -> int:
        return len(self._rewards)

    def add(self, roots: np.ndarray, reward: float) -> None:
        """Add a plan's square roots of losses (layers,) and its reward."""
        self._process = None
        self._roots.append(np.asarray(roots, dtype=float))
        self._rewards.append(reward)
        if len(self._rewards) > _CAPACITY:  # the worst plan says least about the best ones
            worst = int(np.argmin(self._rewards))
            del self._roots[worst], self._rewards[worst]

    def predict(self, roots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the rewards' predicted means and standard deviations, each (N,), for roots (N, layers)."""
        if not self._rewards:
            return np.zeros(len(roots)), np.ones(len(roots))
        known, rewards = np.stack(self._roots), np.array(self._rewards)
        centre, scale = known.mean(0), known.std(0)
        # The floor bounds the scaled input of a layer that never changed before and now does.
        scale = np.maximum(scale, 1e-2 * scale.max() + 1e-12)
        expected, guess = self._guesses(known, rewards, roots)
        left = rewards - expected
        spread = max(float(left.std()), 1e-9)  # equal rewards have no spread
        with _quiet():
            if self._process is None:
                self._process = self._fitted((known - centre) / scale, (left - left.mean()) / spread)
            mean, deviation = self._process.predict((roots - centre) / scale, return_std=True)
        return guess + mean * spread + left.mean(), deviation * spread

    def state(self) -> dict[str, Tensor]:
        """Return the model's state as tensors."""
        theta = np.zeros(0) if self._theta is None else self._theta
        roots = np.stack(self._roots) if self._roots else np.zeros((0, 0))
        return {
            "roots": torch.from_numpy(roots.copy()),
            "rewards": torch.tensor(self._rewards, dtype=torch.float64),
            "theta": torch.from_numpy(theta.copy()),
            "chosen_at": torch.tensor(self._chosen_at),
        }

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore a state that `state` returned."""
        self._process = None
        self._roots = list(state["roots"].numpy().copy())
        self._rewards = state["rewards"].tolist()
        theta = state["theta"].numpy().copy()
        self._theta = theta if len(theta) else None
        self._chosen_at = int(state["chosen_at"])

    def _guesses(
        self, known: np.ndarray, rewards: np.ndarray, roots: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the additive model's rewards of the known plans and of others, each up to a constant.

        The reward per unit of loss is fitted to the known plans by least squares, clamped at 0.
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
        # alpha is jitter alone: the kernel has noise of its own.
        process = GaussianProcessRegressor(kernel, alpha=1e-8, optimizer="fmin_l_bfgs_b" if due else None)
        process.fit(known, targets)
        if due:
            self._theta, self._chosen_at = process.kernel_.theta.copy(), len(self)
        return process


@cache
def _libraries() -> ThreadpoolController:
    """Find the process's libraries with thread pools, cached since it takes milliseconds."""
    return ThreadpoolController()


@contextmanager
def _quiet() -> Iterator[None]:
    """Compute on one thread, so that the last bits do not depend on their number, and without warnings.

    scikit-learn warns of hyper-parameters at their bounds, which are expected here.
    """
    from sklearn.exceptions import ConvergenceWarning

    with _libraries().limit(limits=1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.filterwarnings("ignore", message="Predicted variances smaller than 0")
        yield


def _kernel(layers: int) -> Kernel:
    """Return the initial kernel; distances, and so its length, grow with the root of the layers' number."""
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct, WhiteKernel

    length = 2 * layers**0.5
    smooth = ConstantKernel(1.0, (1e-2, 1e2)) * RBF(length, (0.2 * length, 5 * length))
    linear = ConstantKernel(0.3 / layers, (1e-4 / layers, 1e2 / layers)) * DotProduct(0.0, "fixed")
    return smooth + linear + WhiteKernel(0.03, (1e-3, 1.0))


log = logging.getLogger(__name__)

# Attempts to find a plan that was not proposed before.
_ATTEMPTS = 8
# Number of the best candidates that are changed again, and rounds of such changes.
_PARENTS = 8
_REFINEMENTS = 2
# Standard deviation of the warm-up's noise around greedy's, or the policy's, plan.
_WARMUP_NOISE = 0.15
# Weight of the standard deviation in the upper confidence bound.
_OPTIMISM = 0.5


@register_selector
class BayesSelector(Selector):
    """A Gaussian process on the layers' losses that chooses among local changes of the best plan.

    After a warm-up around greedy's plan, each step draws candidates as changes of the best plan so far,
    changes the most promising ones again, and proposes the one with the highest upper confidence bound of its
    reward (Srinivas et al., ICML 2010).

    A pretrained policy, by default the one that comes with rankrl where plans are ranks and roundings within
    a budget (`resolved_policy`), predicts the weight of each layer's loss: the process then learns only the
    residual. The first plan is the policy's own, the second greedy's, and the warm-up is around the first.

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
        # Losses under the proposed plans, as bytes: they identify plans without the cost of an allocation.
        self._known: set[bytes] = set()

    @classmethod
    def check_ranges(cls, options: Mapping[str, Any]) -> None:
        """Refuse options out of their ranges."""
        super().check_ranges(options)
        if options["policy"] not in (None, AUTO):
            cls._policy(options["policy"], options["action"])

    @classmethod
    def check_setting(cls, options: Mapping[str, Any], setting: SearchSetting) -> None:
        """Refuse a kind of action that does not suit the search."""
        policy = resolved_policy(options["policy"], options["action"], setting)
        check_action(options["action"] if policy is None else "importance", setting=setting)

    def propose(self) -> list[Proposal]:
        """Choose plans, new ones as long as they can be found."""
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
        """Add the plans and their rewards to the process."""
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
        """Restore a state that `state` returned."""
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
        """Add noise to plans' actions, in a random share of the layers drawn for each plan."""
        touched = self._generator.random(actions.shape) < self._generator.random((len(actions), 1))
        noise = scale * self._generator.standard_normal(actions.shape)
        return (actions + touched * noise).clip(-1, 1)

    def _bounds(self, candidates: np.ndarray) -> np.ndarray:
        """Return the upper confidence bound of each plan's reward; -inf for plans proposed before."""
        roots = self._map.loss_roots(candidates)
        mean, deviation = self._model.predict(roots)
        known = [row.tobytes() in self._known for row in roots]
        return np.where(known, -np.inf, mean + _OPTIMISM * deviation)
