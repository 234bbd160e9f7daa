"""Select plans by Bayesian optimisation: a Gaussian process on the layers' losses predicts rewards."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from threadpoolctl import ThreadpoolController

from rankrl.options.selectors import FINAL_SCALE, BayesOptions
from rankrl.plan_search.envs.actions import check_action, create_action_map
from rankrl.plan_search.selectors.selector import Proposal, Selector, register_selector
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

    The inputs are the losses, not the actions: the reward is nearly linear in them, so that tens of plans
    suffice. The kernel is a squared exponential plus a linear one and noise, of maximum likelihood.
    """

    def __init__(self) -> None:
        self._roots: list[np.ndarray] = []
        self._rewards: list[float] = []
        self._added = 0
        self._theta: np.ndarray | None = None
        # The plans to which the hyper-parameters are yet to be fitted, when they are needed.
        self._due: tuple[np.ndarray, np.ndarray] | None = None
        self._process: GaussianProcessRegressor | None = None  # fitted to all plans added so far

    def __len__(self) -> int:
        return len(self._rewards)

    def add(self, roots: np.ndarray, reward: float) -> None:
        """Add a plan's square roots of losses (layers,) and its reward."""
        self._process = None
        self._roots.append(np.asarray(roots, dtype=float))
        self._rewards.append(reward)
        self._added += 1
        if len(self._rewards) > _CAPACITY:  # the worst plan says least about the best ones
            worst = int(np.argmin(self._rewards))
            del self._roots[worst], self._rewards[worst]
        if self._added % _PERIOD == 0:
            self._due = np.stack(self._roots), np.array(self._rewards)

    def predict(self, roots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the rewards' predicted means and standard deviations, each (N,), for roots (N, layers)."""
        if not self._rewards:
            return np.zeros(len(roots)), np.ones(len(roots))
        known, rewards = np.stack(self._roots), np.array(self._rewards)
        with _quiet():
            if self._due is not None:
                self._theta = self._fitted(*self._due, search=True).kernel_.theta
                self._due = None
            if self._process is None:
                self._process = self._fitted(known, rewards)
            centre, scale = _scale(known)
            mean, deviation = self._process.predict((roots - centre) / scale, return_std=True)
        return mean * _spread(rewards) + rewards.mean(), deviation * _spread(rewards)

    def _fitted(
        self, known: np.ndarray, rewards: np.ndarray, *, search: bool = False
    ) -> GaussianProcessRegressor:
        """Fit a process to plans; `search` for the hyper-parameters, from the same start whenever it is."""
        from sklearn.gaussian_process import GaussianProcessRegressor

        centre, scale = _scale(known)
        kernel = _kernel(known.shape[1])
        if self._theta is not None and not search:
            kernel = kernel.clone_with_theta(self._theta)
        # alpha is jitter alone: the kernel has noise of its own.
        process = GaussianProcessRegressor(kernel, alpha=1e-8, optimizer="fmin_l_bfgs_b" if search else None)
        return process.fit((known - centre) / scale, (rewards - rewards.mean()) / _spread(rewards))


def _scale(known: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the inputs' means and deviations, each (layers,)."""
    deviation = known.std(0)
    # The floor bounds the scaled input of a layer that never changed before and now does.
    return known.mean(0), np.maximum(deviation, 1e-2 * deviation.max() + 1e-12)


def _spread(rewards: np.ndarray) -> float:
    return max(float(rewards.std()), 1e-9)  # equal rewards have no spread


@cache
def _libraries() -> ThreadpoolController:
    """Find the process's libraries with thread pools, cached since it takes milliseconds."""
    return ThreadpoolController()


@contextmanager
def _quiet() -> Iterator[None]:
    """Compute on one thread, for equal last bits, without scikit-learn's warnings of bounds."""
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


# Attempts to find a plan that was not proposed before.
_ATTEMPTS = 8
# Number of the best candidates that are changed again, and rounds of such changes.
_PARENTS = 8
_REFINEMENTS = 2
# Standard deviation of the warm-up's noise around greedy's plan.
_WARMUP_NOISE = 0.15
# Weight of the standard deviation in the upper confidence bound.
_OPTIMISM = 0.5


@register_selector
class BayesSelector(Selector):
    """A Gaussian process on the layers' losses that chooses among local changes of the best plan.

    After a warm-up around greedy's plan, each step draws candidates as changes of the best plan so far,
    changes the most promising ones again, and proposes the one with the highest upper confidence bound of its
    reward (Srinivas et al., ICML 2010).
    """

    name = "bayes"
    description = "a Gaussian process chooses among local changes of the best plan so far"
    own_options: ClassVar[type[BayesOptions]] = BayesOptions

    def __init__(self, problem: SearchProblem, *, seed: int, episodes: int, **options: Any) -> None:
        super().__init__(problem, seed=seed, episodes=episodes)
        own = self.own_options(**options)
        self.warmup_episodes, self.step = own.warmup_episodes, own.step
        self.candidates, self.plans_per_step = own.candidates, own.plans_per_step
        self._map = create_action_map(problem, own.action)
        self.action_kind = self._map.action
        self._model = RewardModel()
        self._best = np.zeros(len(problem.sites))  # greedy's plan
        self._best_reward = -np.inf
        self._seen: set[Choices] = set()
        # Losses under the proposed plans, as bytes: they identify plans without the cost of an allocation.
        self._known: set[bytes] = set()

    @classmethod
    def check_setting(cls, options: Mapping[str, Any], setting: SearchSetting) -> None:
        """Refuse a kind of action that does not suit the search."""
        check_action(options["action"], setting=setting)

    def propose(self) -> list[Proposal]:
        """Choose plans, new ones as long as they can be found."""
        generator, proposals = self.generator(), []
        seen, known = set(self._seen), set(self._known)
        for number in range(self.observed, self.observed + (self.plans_per_step if self.observed else 1)):
            for _ in range(_ATTEMPTS):
                actions, phase = self._choose(number, known, generator)
                choices = self._map.choices_of(actions)
                if choices not in seen:
                    break
            seen.add(choices)
            known.add(self._roots(actions).tobytes())
            proposals.append(Proposal(choices, phase, tuple(actions.tolist())))
        return proposals

    def observe(self, proposals: Sequence[Proposal], rewards: Sequence[float]) -> None:
        super().observe(proposals, rewards)
        for proposal, reward in zip(proposals, rewards, strict=True):
            actions = np.array(proposal.actions)
            roots = self._roots(actions)
            self._seen.add(proposal.choices)
            self._known.add(roots.tobytes())
            self._model.add(roots, reward)
            if reward > self._best_reward:
                self._best, self._best_reward = actions, reward

    def _roots(self, actions: np.ndarray) -> np.ndarray:
        """Return the roots of the layers' losses under one plan's actions, (sites,)."""
        return self._map.loss_roots(actions[None])[0]

    def _choose(
        self, number: int, known: set[bytes], generator: np.random.Generator
    ) -> tuple[np.ndarray, str]:
        """Return the actions of a plan, shape (sites,), and the phase."""
        layers = len(self._best)
        if number == 0:
            return np.zeros(layers), "preset"
        if number < self.warmup_episodes or not len(self._model):
            return (_WARMUP_NOISE * generator.standard_normal(layers)).clip(-1, 1), "warm-up"
        span = max(self.episodes - 1, self.warmup_episodes + 1) - self.warmup_episodes
        progress = min(1.0, (number - self.warmup_episodes) / span)
        scale = self.step * (min(FINAL_SCALE, self.step) / self.step) ** progress
        candidates = _changed(np.tile(self._best, (self.candidates, 1)), scale, generator)
        bounds = self._bounds(candidates, known)
        for _ in range(_REFINEMENTS):
            parents = candidates[np.argsort(-bounds, kind="stable")[:_PARENTS]]
            copies = parents[np.arange(len(candidates)) % len(parents)]
            candidates = np.concatenate([parents, _changed(copies, scale, generator)])
            bounds = self._bounds(candidates, known)
        return candidates[int(bounds.argmax())], "bayes"

    def _bounds(self, candidates: np.ndarray, known: set[bytes]) -> np.ndarray:
        """Return the upper confidence bound of each plan's reward; -inf for plans proposed before."""
        roots = self._map.loss_roots(candidates)
        mean, deviation = self._model.predict(roots)
        return np.where([row.tobytes() in known for row in roots], -np.inf, mean + _OPTIMISM * deviation)


def _changed(actions: np.ndarray, scale: float, generator: np.random.Generator) -> np.ndarray:
    """Add noise to plans' actions, in a random share of the layers drawn for each plan."""
    touched = generator.random(actions.shape) < generator.random((len(actions), 1))
    noise = scale * generator.standard_normal(actions.shape)
    return (actions + touched * noise).clip(-1, 1)
