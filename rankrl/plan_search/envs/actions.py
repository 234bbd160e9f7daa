"""Map continuous actions in [-1, 1] to candidates."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, get_args

import numpy as np

from decomposition.choose.allocation import allocate, allocate_many
from decomposition.choose.candidates import CandidateSet
from rankrl.errors import ConfigError
from rankrl.options.selectors import IMPORTANCE_SCALE, ActionKind
from rankrl.plan_search.space.problem import Choices, SearchProblem, SearchSetting


class ActionMap(ABC):
    """Maps one action per layer, in forward order, to the candidate of every layer."""

    action: ClassVar[ActionKind]
    knows_greedy: ClassVar[bool] = True
    """Whether action 0 for every layer is greedy's plan."""

    def __init__(self, problem: SearchProblem) -> None:
        self.problem = problem
        self.sites = problem.sites

    @abstractmethod
    def choices_of(self, actions: np.ndarray) -> Choices:
        """Return the candidate of every layer under an episode's actions, (layers,)."""

    @abstractmethod
    def budget_left(self, taken: np.ndarray) -> float:
        """Return the share of the budget, 0 to 1, that is left for the layers after the actions taken."""

    @abstractmethod
    def loss_roots(self, actions: np.ndarray) -> np.ndarray:
        """Return the square roots of the layers' losses under whole episodes, (episodes, layers)."""


class ImportanceMap(ActionMap):
    """The action is the layer's log-importance in the Lagrangian allocation.

    rank_l = argmin_r exp(s (a_l - mean a)) error_l(r)^2 + lambda cost_l(r), with lambda such that the plan
    spends the whole budget: plans are compared at equal size, and cost saved in one layer is spent where it
    helps most.
    """

    action = "importance"

    def __init__(self, problem: SearchProblem, scale: float = IMPORTANCE_SCALE) -> None:
        super().__init__(problem)
        check_action("importance", setting=problem.setting)
        assert problem.budget is not None
        self.budget, self._scale = problem.budget, scale
        self._dense = [float(site.cost(problem.measure)[-1]) for site in self.sites]

    def choices_of(self, actions: np.ndarray) -> Choices:
        actions = actions.astype(float)
        weights = self._scale * (actions - actions.mean())
        return tuple(allocate(self.sites, self.budget, weights).tolist())

    def budget_left(self, taken: np.ndarray) -> float:
        """Return the later layers' share of the dense cost, since nothing is spent before the last action."""
        return sum(self._dense[len(taken) :]) / sum(self._dense)

    def loss_roots(self, actions: np.ndarray) -> np.ndarray:
        """Return the roots before `allocate` spends the rest of the budget and exchanges cost."""
        weights = self._scale * (actions - actions.mean(1, keepdims=True))
        return _loss_roots(self.sites, allocate_many(self.sites, self.budget, weights))


class RankMap(ActionMap):
    """The action spans the layer's candidates, rounded: -1 the smallest, 0 greedy's, 1 the dense layer.

    With a budget the choice is clipped, in forward order, so that the later layers can still keep the budget.
    """

    action: ClassVar[ActionKind] = "rank"

    def __init__(self, problem: SearchProblem) -> None:
        super().__init__(problem)
        check_action(self.action, setting=problem.setting)
        self._costs = [site.cost(problem.measure).astype(float) for site in self.sites]
        least = [cost.min() for cost in self._costs]
        self._least_after = [sum(least[j + 1 :]) for j in range(len(least))]
        self._available = math.inf if problem.budget is None else problem.budget.available

    def choices_of(self, actions: np.ndarray) -> Choices:
        """Choose one layer after the other, as many as there are actions."""
        chosen: list[int] = []
        left = self._available
        for layer, action in enumerate(actions.tolist()):
            chosen.append(self._choose(layer, action, left - self._least_after[layer]))
            left -= self._costs[layer][chosen[-1]]
        return tuple(chosen)

    def budget_left(self, taken: np.ndarray) -> float:
        """Return the unspent share of the budget (of the dense cost, when there is no budget)."""
        budget = self._available
        if not math.isfinite(budget):
            budget = sum(float(cost[-1]) for cost in self._costs)
        chosen = self.choices_of(taken)
        spent = sum(float(cost[j]) for cost, j in zip(self._costs, chosen, strict=False))
        return max(0.0, 1 - spent / budget)

    def loss_roots(self, actions: np.ndarray) -> np.ndarray:
        return _loss_roots(self.sites, np.array([self.choices_of(episode) for episode in actions]))

    def _choose(self, layer: int, action: float, allowed: float) -> int:
        """Return the candidate of an action, or the nearest below that costs at most `allowed`."""
        cost, site = self._costs[layer], self.sites[layer]
        choice = min(self._wanted(layer, action), site.dense - site.must_change)
        if cost[choice] <= allowed:
            return choice
        # MACs need not grow with the rank, so all smaller candidates are checked.
        below = np.flatnonzero(cost[:choice] <= allowed)
        return int(below[-1]) if len(below) else int(cost.argmin())

    def _wanted(self, layer: int, action: float) -> int:
        preset, last = int(self.problem.preset[layer]), len(self._costs[layer]) - 1
        return round(preset + action * (last - preset if action > 0 else preset))


class RatioMap(RankMap):
    """The action is the share of the layer's cost that is kept, linear: -1 the smallest candidate, 1 dense.

    The nearest candidate is taken, and clipped to the budget as in `RankMap`.
    """

    action = "ratio"
    knows_greedy = False

    def _wanted(self, layer: int, action: float) -> int:
        cost = self._costs[layer]
        kept = cost.min() + (action + 1) / 2 * (cost[-1] - cost.min())
        return int(np.abs(cost - kept).argmin())


def create_action_map(
    problem: SearchProblem, action: ActionKind | None = None, *, scale: float = IMPORTANCE_SCALE
) -> ActionMap:
    """Make the map from actions to candidates; None for the kind that suits the problem."""
    kind = check_action(action, setting=problem.setting)
    if kind == ImportanceMap.action:
        return ImportanceMap(problem, scale)
    return RankMap(problem) if kind == RankMap.action else RatioMap(problem)


def check_action(action: ActionKind | None, *, setting: SearchSetting) -> ActionKind:
    """Return the kind of actions, by default the one that suits the search; refuse one that does not."""
    if action is None:
        action = "rank" if not setting.measures else "importance"
    if action not in get_args(ActionKind):
        raise ConfigError(f"selector.action must be one of {', '.join(get_args(ActionKind))}, got {action!r}")
    if action == "importance":
        if not setting.measures:
            raise ConfigError(
                "selector.action=importance spends a budget and there is none; set budget.params or "
                "budget.macs, or use selector.action=rank"
            )
        return action
    if len(setting.measures) > 1:
        raise ConfigError(
            f"selector.action={action} keeps one budget, and "
            f"{' and '.join(f'budget.{measure}' for measure in setting.measures)} are set; use "
            "selector.action=importance"
        )
    if setting.measures and setting.narrows:
        raise ConfigError(
            f"selector.action={action} counts every layer by itself, and with decomposition.channels or "
            "decomposition.blocks what a layer costs depends on the next one; use selector.action=importance"
        )
    if setting.borders:
        raise ConfigError(
            f"selector.action={action} counts every layer by itself, and what a change between integers and "
            "floating point takes of budget.latency depends on the next one; use selector.action=importance, "
            "or decomposition.precisions=[float32]"
        )
    return action


def _loss_roots(sites: Sequence[CandidateSet], choices: np.ndarray) -> np.ndarray:
    """Return the square roots of the candidates' losses, (episodes, layers)."""
    return np.stack([np.sqrt(site.losses)[choices[:, j]] for j, site in enumerate(sites)], axis=1)
