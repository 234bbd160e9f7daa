"""Spending a budget: it always holds, and the choice is the best one where that can be checked."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decomposition.allocation import Budget, allocate, allocate_many
from decomposition.curves import RankCurve
from decomposition.errors import DecompositionError
from decomposition.layers import LayerSpec
from decomposition.plan import LayerPlan


def curve(costs: list[int], errors: list[float]) -> RankCurve:
    """A curve of made-up costs, in parameters and (twice as many) MACs, and errors."""
    spec = LayerSpec("layer", 0, "linear", 1, 1, (), (), 1, False)
    entries = tuple(LayerPlan("layer", "tucker", (j + 1,)) for j in range(len(costs) - 1))
    params = np.array(costs, dtype=np.int64)
    return RankCurve(spec, (*entries, LayerPlan("layer")), params, 2 * params, np.array(errors))


@st.composite
def curve_lists(draw: st.DrawFn, layers: int = 4, candidates: int = 4) -> list[RankCurve]:
    curves = []
    for _ in range(draw(st.integers(1, layers))):
        count = draw(st.integers(0, candidates))
        costs = sorted(draw(st.sets(st.integers(1, 1000), min_size=count + 1, max_size=count + 1)))
        errors = draw(st.lists(st.floats(0.01, 0.99), min_size=count, max_size=count))
        curves.append(curve(costs, [*sorted(errors, reverse=True), 0.0]))
    return curves


def budget_of(curves: list[RankCurve], available: float, fixed: int = 0) -> Budget:
    total = sum(int(c.params[-1]) for c in curves) + fixed
    return Budget(min(1.0, (available + fixed) / total), "params", total, fixed)


def spent(curves: list[RankCurve], choices: np.ndarray, measure: str = "params") -> int:
    return sum(int(c.cost(measure)[j]) for c, j in zip(curves, choices, strict=True))


def loss(curves: list[RankCurve], choices: np.ndarray | tuple[int, ...]) -> float:
    return float(sum(c.errors[j] ** 2 for c, j in zip(curves, choices, strict=True)))


def best_loss(curves: list[RankCurve], available: float) -> float:
    """The least loss within the budget, by trying everything."""
    everything = itertools.product(*(range(len(c)) for c in curves))
    return min(loss(curves, js) for js in everything if spent(curves, np.array(js)) <= available)


def hull_steps(c: RankCurve) -> list[float]:
    """How much the loss falls from corner to corner of the lower convex hull of (cost, squared error)."""
    corner, falls, squares = 0, [], c.errors**2
    while corner < len(c) - 1:
        rest = np.arange(corner + 1, len(c))
        slopes = (squares[corner] - squares[rest]) / (c.params[rest] - c.params[corner])
        following = int(rest[len(rest) - 1 - int(np.argmax(slopes[::-1]))])
        falls.append(float(squares[corner] - squares[following]))
        corner = following
    return falls


@given(
    curves=curve_lists(),
    share=st.floats(0, 1),
    fixed=st.integers(0, 500),
    log_weights=st.none() | st.lists(st.floats(-20, 20), min_size=4, max_size=4),
    measure=st.sampled_from(["params", "macs"]),
)
def test_the_budget_always_holds(
    curves: list[RankCurve], share: float, fixed: int, log_weights: list[float] | None, measure: str
) -> None:
    least = sum(int(c.cost(measure).min()) for c in curves) + fixed
    total = sum(int(c.cost(measure)[-1]) for c in curves) + fixed
    budget = Budget(least / total + share * (1 - least / total), measure, total, fixed)
    weights = None if log_weights is None else np.array(log_weights[: len(curves)])
    try:
        choices = allocate(curves, budget, weights)
    except DecompositionError:
        assert least > budget.available  # the least itself, missed by a rounding of the fraction
        return
    assert spent(curves, choices, measure) + fixed <= budget.fraction * total + 1e-9
    assert all(0 <= j < len(c) for c, j in zip(curves, choices, strict=True))


@given(curves=curve_lists(), share=st.floats(0, 1))
def test_the_loss_is_the_least_up_to_one_step_of_the_convex_hull(
    curves: list[RankCurve], share: float
) -> None:
    least, most = spent(curves, np.zeros(len(curves), int)), sum(int(c.params[-1]) for c in curves)
    budget = budget_of(curves, least + share * (most - least) + 1e-6)
    gap = max((fall for c in curves for fall in hull_steps(c)), default=0.0)
    found = loss(curves, allocate(curves, budget))
    assert best_loss(curves, budget.available) - 1e-12 <= found
    assert found <= best_loss(curves, budget.available) + gap + 1e-12


@given(curves=curve_lists(), log_price=st.floats(-12, 0))
def test_on_the_convex_hull_the_loss_is_the_least(curves: list[RankCurve], log_price: float) -> None:
    on_hull = np.array([int(np.argmin(c.errors**2 + np.exp(log_price) * c.params)) for c in curves])
    budget = budget_of(curves, spent(curves, on_hull) + 1e-6)
    found = loss(curves, allocate(curves, budget))
    assert found == pytest.approx(best_loss(curves, budget.available), rel=1e-9, abs=1e-12)


@given(curves=curve_lists(), share=st.floats(0, 1))
def test_nothing_useful_is_left_that_could_still_be_paid(curves: list[RankCurve], share: float) -> None:
    least, most = spent(curves, np.zeros(len(curves), int)), sum(int(c.params[-1]) for c in curves)
    budget = budget_of(curves, least + share * (most - least) + 1e-6)
    choices = allocate(curves, budget)
    left = budget.available - spent(curves, choices)
    for c, j in zip(curves, choices, strict=True):
        better = c.errors < c.errors[j]
        assert not np.any(better & (c.params - c.params[j] <= left))


@given(curves=curve_lists(), shift=st.floats(-5, 5))
def test_a_common_shift_of_the_importance_changes_nothing(curves: list[RankCurve], shift: float) -> None:
    budget = budget_of(curves, sum(int(c.params[-1]) for c in curves) * 0.7 + 1e-6)
    if spent(curves, np.zeros(len(curves), int)) > budget.available:
        return
    plain, shifted = (allocate(curves, budget, np.full(len(curves), s)) for s in (0.0, shift))
    assert loss(curves, shifted) == pytest.approx(loss(curves, plain), rel=1e-9)


@given(
    curves=curve_lists(),
    share=st.floats(0, 1),
    weights=st.lists(st.floats(-20, 20), min_size=12, max_size=12),
)
def test_many_allocations_at_once_are_those_one_by_one_but_for_the_rest(
    curves: list[RankCurve], share: float, weights: list[float]
) -> None:
    least, most = spent(curves, np.zeros(len(curves), int)), sum(int(c.params[-1]) for c in curves)
    budget = budget_of(curves, least + share * (most - least) + 1e-6)
    log_weights = np.array(weights).reshape(3, 4)[:, : len(curves)]
    for found, weighting in zip(allocate_many(curves, budget, log_weights), log_weights, strict=True):
        filled = allocate(curves, budget, weighting)
        assert spent(curves, found) <= spent(curves, filled) <= budget.available
        assert loss(curves, filled) <= loss(curves, found)


def test_importance_decides_who_gets_the_budget() -> None:
    curves = [curve([10, 100], [0.5, 0.0]) for _ in range(3)]
    budget = budget_of(curves, 120)
    for favourite in range(3):
        choices = allocate(curves, budget, np.eye(3)[favourite])
        assert choices.tolist() == np.eye(3, dtype=int)[favourite].tolist()


def test_the_whole_budget_keeps_everything_dense() -> None:
    curves = [curve([10, 50, 100], [0.9, 0.3, 0.0]), curve([5, 10], [0.1, 0.0])]
    assert allocate(curves, budget_of(curves, 110)).tolist() == [2, 1]


def test_an_unreachable_budget_names_the_least_that_can_be_reached() -> None:
    curves = [curve([10, 100], [0.5, 0.0]), curve([333, 999], [0.5, 0.0])]
    with pytest.raises(DecompositionError, match=r"budget\.params=0\.1 cannot be reached") as caught:
        allocate(curves, Budget(0.1, "params", 1200, 101))
    least = float(re.findall(r"the least is (\S+)", str(caught.value))[0])
    assert allocate(curves, Budget(least, "params", 1200, 101)).tolist() == [0, 0]


@pytest.mark.parametrize("fraction", [0, -0.5, 1.5, float("nan")])
def test_fractions_that_are_none_are_refused(fraction: float) -> None:
    with pytest.raises(DecompositionError, match=r"budget\.macs=.*\(0, 1\]"):
        Budget(fraction, "macs", 100, 0)
