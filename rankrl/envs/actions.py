"""From continuous actions in [-1, 1] to integer ranks. Action 0 everywhere is greedy's plan."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from decomposition.allocation import allocate, allocate_many
from decomposition.curves import RankCurve
from decomposition.formats import Ranks, get_format
from decomposition.plan import LayerPlan
from rankrl.errors import ConfigError
from rankrl.plan_search.problem import SearchProblem

ActionKind = Literal["importance", "rank"]

IMPORTANCE_SCALE = 2.0
"""Log-importance of action 1: a layer then counts e^2 = 7.4 times what it does at action 0."""


class ActionMap(ABC):
    """Turns one action a layer, taken in forward order, into the plan's entries.

    Attributes:
        components: Numbers in one action.
    """

    components: int = 1

    def __init__(self, problem: SearchProblem) -> None:
        self.problem = problem
        self.curves = problem.curves

    @abstractmethod
    def begin(self) -> None:
        """Forget the actions taken."""

    @abstractmethod
    def take(self, layer: int, action: np.ndarray) -> None:
        """Take the action, shape (components,) in [-1, 1], of compressible layer number `layer`."""

    @abstractmethod
    def entries(self) -> list[LayerPlan]:
        """Return the plan's entries once every layer has its action."""

    @abstractmethod
    def budget_left(self) -> float:
        """Return the share of the budget, 0 to 1, that the layers without an action have left."""

    @abstractmethod
    def losses(self, actions: np.ndarray) -> np.ndarray | None:
        """Return what each layer loses at the network's output under whole episodes.

        Args:
            actions: Shape (episodes, layers, components) in [-1, 1].

        Returns:
            Roots of the candidates' losses, shape (episodes, layers); None where plans are made of other
            entries than candidates, whose losses are not known.
        """


class ImportanceMap(ActionMap):
    """The action is the layer's log-importance in the Lagrangian allocation.

    rank_l = argmin_r exp(s (a_l - mean a)) error_l(r)^2 + lambda cost_l(r), with lambda such that the plan
    spends the whole budget: plans are compared at equal size, and what one layer gives up goes where it helps
    most.

    Args:
        problem: The search problem; it needs a budget.
        scale: The factor s.

    Raises:
        ConfigError: There is no budget, or the scale is not positive.
    """

    def __init__(self, problem: SearchProblem, *, scale: float = IMPORTANCE_SCALE) -> None:
        super().__init__(problem)
        if problem.budget is None:
            raise ConfigError(
                "selector.action=importance spends a budget and there is none; set budget.params or "
                "budget.macs, or use selector.action=rank"
            )
        check_importance_scale(scale)
        self.budget = problem.budget
        self.scale = scale
        self.begin()

    def begin(self) -> None:
        """Forget the actions taken."""
        self._actions = np.zeros(len(self.curves))
        self._taken = 0

    def take(self, layer: int, action: np.ndarray) -> None:
        """Take a layer's log-importance."""
        self._actions[layer] = action[0]
        self._taken = layer + 1

    def allocate(self, actions: np.ndarray) -> np.ndarray:
        """Return the candidate of every layer under actions of shape (layers,)."""
        return allocate(self.curves, self.budget, self.scale * (actions - actions.mean()))

    def entries(self) -> list[LayerPlan]:
        """Allocate the budget under the actions taken."""
        return [curve.entries[j] for curve, j in zip(self.curves, self.allocate(self._actions), strict=True)]

    def losses(self, actions: np.ndarray) -> np.ndarray:
        """Return the losses under the allocations, but for what `allocate` still spends at its end."""
        weights = self.scale * (actions[:, :, 0] - actions[:, :, 0].mean(1, keepdims=True))
        return _losses_of(self.curves, allocate_many(self.curves, self.budget, weights))

    def budget_left(self) -> float:
        """Return the dense cost of the layers to come as a share: nothing is spent before the last action."""
        dense = [int(curve.cost(self.problem.measure)[-1]) for curve in self.curves]
        return sum(dense[self._taken :]) / sum(dense)


class RankMap(ActionMap):
    """The action spans the layer's candidates: -1 the smallest, 0 greedy's, 1 the dense layer; rounded.

    With a budget the choice is clipped, in forward order, to what the layers still to come can reach.

    Args:
        problem: The search problem.
    """

    def __init__(self, problem: SearchProblem) -> None:
        super().__init__(problem)
        self._costs = [curve.cost(problem.measure).astype(float) for curve in self.curves]
        least = [cost.min() for cost in self._costs]
        self._least_after = [sum(least[j + 1 :]) for j in range(len(least))]
        self._available = math.inf if problem.budget is None else problem.budget.available
        self.begin()

    def begin(self) -> None:
        """Forget the actions taken."""
        self._left = self._available
        self._entries: list[LayerPlan] = []

    def take(self, layer: int, action: np.ndarray) -> None:
        """Choose a layer's candidate."""
        allowed = self._left - self._least_after[layer]
        entry, cost = self.choose(layer, action, allowed)
        self._left -= cost
        self._entries.append(entry)

    def choose(self, layer: int, action: np.ndarray, allowed: float) -> tuple[LayerPlan, float]:
        """Return the entry an action stands for, at a cost of at most `allowed`, and its cost."""
        curve, cost = self.curves[layer], self._costs[layer]
        last, preset, value = len(curve) - 1, int(self.problem.preset[layer]), float(action[0])
        choice = round(preset + value * (last - preset if value > 0 else preset))
        if cost[choice] > allowed:
            within = np.flatnonzero(cost <= allowed)
            # Of the candidates that fit, the nearest below; a budget in MACs need not grow with the rank.
            below = within[within < choice]
            choice = int(below[-1]) if len(below) else int(cost.argmin())
        return curve.entries[choice], float(cost[choice])

    def entries(self) -> list[LayerPlan]:
        """Return the chosen entries."""
        return list(self._entries)

    def losses(self, actions: np.ndarray) -> np.ndarray | None:
        """Return the losses of the candidates that the actions choose."""
        index = [{entry.ranks: j for j, entry in enumerate(curve.entries)} for curve in self.curves]
        choices = np.zeros(actions.shape[:2], dtype=int)
        for episode, chosen in zip(actions, choices, strict=True):
            left = self._available
            for layer, action in enumerate(episode):
                entry, cost = self.choose(layer, action, left - self._least_after[layer])
                left -= cost
                chosen[layer] = index[layer][entry.ranks]
        return _losses_of(self.curves, choices)

    def budget_left(self) -> float:
        """Return the unspent share of the budget (of the dense cost, when there is no budget)."""
        if math.isfinite(self._available):
            return max(0.0, self._left / self._available)
        dense = sum(float(cost[-1]) for cost in self._costs)
        spent = sum(
            entry.params(curve.spec) for entry, curve in zip(self._entries, self.curves, strict=False)
        )
        return max(0.0, 1 - spent / dense)


class BondMap(RankMap):
    """One action component a bond: -1 is rank 1, 0 greedy's rank, 1 the largest; geometric between.

    Layers with fewer bonds than the longest ignore the rest; ranks that make a layer no smaller leave it
    dense. With a budget, bonds are lowered, the one furthest above rank 1 first, until the layer fits.

    Args:
        problem: The search problem.
    """

    def __init__(self, problem: SearchProblem) -> None:
        super().__init__(problem)
        if problem.measure == "latency":
            raise ConfigError(
                "selector.per_bond=true chooses ranks freely, but budget.latency knows only the measured "
                "candidates; use per_bond=false"
            )
        self._largest: list[Ranks] = [_largest_ranks(curve) for curve in self.curves]
        self.components = max(1, *(len(ranks) for ranks in self._largest))

    def losses(self, actions: np.ndarray) -> None:
        """Return None: the bonds' own ranks need be no candidates."""

    def choose(self, layer: int, action: np.ndarray, allowed: float) -> tuple[LayerPlan, float]:
        """Return the entry an action stands for, at a cost of at most `allowed`, and its cost."""
        curve, largest = self.curves[layer], self._largest[layer]
        if len(curve) == 1:
            return curve.entries[0], float(self._costs[layer][0])
        preset = curve.entries[int(self.problem.preset[layer])].ranks or largest
        wanted = [
            round(_between(float(value), middle, most))
            for value, middle, most in zip(action, preset, largest, strict=False)
        ]
        entry, cost = self._entry(layer, wanted)
        while cost > allowed and max(wanted) > 1:
            wanted[int(np.argmax(wanted))] -= 1
            entry, cost = self._entry(layer, wanted)
        if cost > allowed:
            cheapest = int(self._costs[layer].argmin())
            return curve.entries[cheapest], float(self._costs[layer][cheapest])
        return entry, cost

    def _entry(self, layer: int, ranks: list[int]) -> tuple[LayerPlan, float]:
        curve = self.curves[layer]
        pattern = curve.entries[0]
        entry = LayerPlan(pattern.name, pattern.format, tuple(ranks), pattern.factors)
        if entry.params(curve.spec) >= curve.spec.params:
            entry = curve.entries[-1]
        measured = entry.params if self.problem.measure == "params" else entry.macs
        return entry, float(measured(curve.spec))


def create_action_map(
    problem: SearchProblem,
    action: ActionKind | None = None,
    *,
    per_bond: bool = False,
    scale: float = IMPORTANCE_SCALE,
) -> ActionMap:
    """Return the way from actions to ranks.

    Args:
        problem: The search problem.
        action: `importance` or `rank`; None for `importance` with a budget and `rank` without.
        per_bond: One action component a bond, for `rank`.
        scale: Log-importance of action 1, for `importance`.

    Raises:
        ConfigError: An option is unknown, or they contradict one another or the problem.
    """
    if action is None:
        action = "rank" if per_bond or problem.budget is None else "importance"
    if action not in get_args(ActionKind):
        raise ConfigError(f"selector.action must be one of {', '.join(get_args(ActionKind))}, got {action!r}")
    if action == "importance":
        if per_bond:
            raise ConfigError(
                "selector.per_bond=true gives every bond its rank, selector.action=importance every layer "
                "its share of the budget; use selector.action=rank with per_bond"
            )
        return ImportanceMap(problem, scale=scale)
    return BondMap(problem) if per_bond else RankMap(problem)


def check_importance_scale(scale: float) -> None:
    """Refuse a log-importance of action 1 that is not positive.

    Raises:
        ConfigError: It is not.
    """
    if not scale > 0:
        raise ConfigError(f"selector.importance_scale must be positive, got {scale}")


def _losses_of(curves: Sequence[RankCurve], choices: np.ndarray) -> np.ndarray:
    """Return the roots of the losses of candidates (episodes, layers)."""
    return np.stack([np.sqrt(curve.losses)[choices[:, j]] for j, curve in enumerate(curves)], axis=1)


def _largest_ranks(curve: RankCurve) -> Ranks:
    entry = curve.entries[0]
    return () if entry.format is None else get_format(entry.format).max_ranks(entry.modes(curve.spec))


def _between(value: float, middle: int, largest: int) -> float:
    """Interpolate geometrically: 1 at -1, `middle` at 0, `largest` at 1."""
    if value < 0:
        return middle ** (1 + value)
    return middle * (largest / middle) ** value
