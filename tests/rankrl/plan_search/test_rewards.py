"""Rewards are found by name and mean what their formulas say."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankrl.errors import ConfigError, NonFiniteError
from rankrl.plan_search.scores.evaluation import Evaluation
from rankrl.plan_search.scores.rewards import (
    Reward,
    create_reward,
    list_rewards,
    register_reward,
    reward_source,
)

fractions = st.floats(0, 1)


def evaluation(score: float = 0.8, kept: float = 0.5) -> Evaluation:
    return Evaluation(score, score, round(1e5 * kept), round(1e6 * kept), kept, kept / 2, 0.1)


@pytest.mark.parametrize("name", list_rewards())
@given(low=fractions, high=fractions, kept=st.floats(0.01, 1))
def test_more_accuracy_never_lowers_a_reward(name, low, high, kept) -> None:
    reward = create_reward(name, budgeted=True)
    low, high = min(low, high), max(low, high)
    assert reward(evaluation(low, kept)) <= reward(evaluation(high, kept)) + 1e-12


@pytest.mark.parametrize("name", [n for n in list_rewards() if not reward_source(n).needs_budget])
@pytest.mark.parametrize("measure", ["params", "macs"])
def test_rewards_for_no_budget_prefer_the_smaller_of_equally_good_plans(name, measure) -> None:
    reward = create_reward(name, budgeted=False, measure=measure)
    assert reward(evaluation(kept=0.2)) > reward(evaluation(kept=0.9))


def test_values() -> None:
    assert create_reward("accuracy", budgeted=True)(evaluation()) == 0.8
    weighted = create_reward("weighted", budgeted=False, compression=0.25)
    assert weighted(evaluation()) == pytest.approx(0.75 * 0.8 + 0.25 * 0.5)
    weighted = create_reward("weighted", budgeted=False, compression=0.25, measure="macs")
    assert weighted(evaluation()) == pytest.approx(0.75 * 0.8 + 0.25 * 0.75)
    assert create_reward("amc", budgeted=False)(evaluation()) == pytest.approx(-0.2 * math.log(50_000))


def test_a_reward_that_ignores_size_needs_a_budget() -> None:
    with pytest.raises(ConfigError, match="budget"):
        create_reward("accuracy", budgeted=False)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("acuracy", {}, "Did you mean 'accuracy'"),
        ("weighted", {"compression": 2}, "compression"),
        ("weighted", {"measure": "bytes"}, "one of params, macs"),
        ("amc", {"power": 2}, "power"),
    ],
)
def test_unknown_names_and_options_are_refused(name, options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        create_reward(name, budgeted=True, **options)


def test_a_reward_that_is_not_finite_is_named() -> None:
    reward = Reward("mine", {}, lambda _: float("inf"))
    with pytest.raises(NonFiniteError, match="mine"):
        reward(evaluation())


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ConfigError, match="amc"):
        register_reward("amc", "again")(lambda: lambda _: 0.0)
