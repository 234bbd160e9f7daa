"""The last round of a search takes the plan that is best when it is applied."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from rankrl.data import load_dataset
from rankrl.models import create_model
from rankrl.options.search import BudgetOptions, SearchOptions
from rankrl.options.timing import LatencyOptions
from rankrl.plan_search import compare
from rankrl.plan_search.bounded_loss import SearchCall, best_finalist, finalists
from rankrl.plan_search.compare import ComparedSearch, winner
from rankrl.plan_search.latency_budget import LatencyBudget
from rankrl.plan_search.run import run_search, with_row
from rankrl.plan_search.scores.evaluation import best_rows
from rankrl.plan_search.scores.evaluators import EvaluatorOptions
from rankrl.plan_search.scores.rewards import create_reward
from rankrl.plan_search.scores.scoring import ImageScoring
from rankrl.plan_search.selectors import SelectorEntry, create_selector
from rankrl.plan_search.session import SearchGoal, SearchSession
from rankrl.timing.latency import RelativeTime
from rankrl.training import predict_logits


@pytest.fixture
def reward():
    return create_reward("accuracy", budgeted=True)


@pytest.fixture
def result(small_problem, synthetic_evaluator):
    selector = create_selector("random", small_problem, seed=0, episodes=12)
    return run_search(small_problem, synthetic_evaluator, selector, episodes=12)


def test_the_best_refitted_plan_among_the_finalists_wins(small_problem, result, reward) -> None:
    rows = finalists(result, 3)
    plans = [small_problem.plan(row.key, "random") for row in rows]
    scored = []

    def score(plan) -> float:
        scored.append(plan)
        return float(plan == plans[2])

    assert best_finalist(small_problem, rows, score, reward, "random") == rows[2]
    assert scored == plans


def test_the_plan_that_the_search_began_with_can_win(small_problem, result, reward) -> None:
    rows = finalists(result, 2)
    first = small_problem.plan(rows[-1].key, "random")
    found = best_finalist(small_problem, rows, lambda plan: float(plan == first), reward, "random")
    assert found == result.rows[0] != result.best


def test_the_first_of_equals_is_taken(small_problem, result, reward) -> None:
    rows = finalists(result, 3)
    assert best_finalist(small_problem, rows, lambda plan: 0.5, reward, "random") == result.best


def test_finalists_are_judged_by_the_reward_not_by_accuracy_alone(small_problem, result) -> None:
    rows = finalists(result, 3)
    smallest = min(rows, key=lambda row: row.params_kept)
    largest = max(rows, key=lambda row: row.params_kept)
    size_alone = create_reward("weighted", budgeted=True, compression=1.0)
    favourite = small_problem.plan(largest.key, "random")
    assert smallest.params_kept < largest.params_kept
    found = best_finalist(small_problem, rows, lambda plan: float(plan == favourite), size_alone, "random")
    assert found == smallest


def test_a_search_of_one_plan_has_nothing_to_refit(small_problem, synthetic_evaluator, reward) -> None:
    greedy = create_selector("greedy", small_problem, seed=0, episodes=12)
    only = run_search(small_problem, synthetic_evaluator, greedy, episodes=12)

    def score(plan) -> float:
        raise AssertionError("refitted")

    assert best_finalist(small_problem, only.rows, score, reward, "greedy") == only.best


class Finalists(SearchSession):
    """A session whose plans are scored by what a test says."""

    def __init__(self, problem, evaluator, reward, score, finalists: int) -> None:
        self.problem, self.evaluator, self.reward, self.latency = problem, evaluator, reward, None
        limits = SearchOptions(episodes=12, finalists=finalists)
        self.goal = SearchGoal(BudgetOptions(params=0.5), limits)
        self.score = score
        self.progress = None
        self.scoring = SimpleNamespace(metric_name="own")

    def network_score(self, plan):
        return self.score(plan)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_session_ends_with_the_finalist_that_is_best_when_applied(
    small_problem, synthetic_evaluator, reward, count
) -> None:
    """Among the finalists is the plan that the search began with; without a last round it is the best row."""
    scored = []

    def score(plan) -> float:
        scored.append(plan)
        return float(len(scored) == count + 1)  # the last one

    session = Finalists(small_problem, synthetic_evaluator, reward, score, count)
    found = session.search(SearchCall("random"))
    if count == 1:
        assert not scored
        assert found.row == found.best
    else:
        rows = finalists(found, count)
        assert scored == [small_problem.plan(row.key, "random") for row in rows]
        assert found.row == found.rows[0] != found.best
    assert found.plan == small_problem.plan(found.row.key, "random")
    assert found.best.reward == max(row.reward for row in found.rows)


@pytest.mark.parametrize(
    ("selector", "action"), [("random", None), ("local", "importance"), ("ddpg", "importance")]
)
def test_a_search_names_what_it_searches_for(
    small_problem, synthetic_evaluator, reward, caplog, selector, action
) -> None:
    session = Finalists(small_problem, synthetic_evaluator, reward, float, 1)
    caplog.set_level("INFO")
    found = session.search(SearchCall(selector)).objective
    assert found == {"reward": "accuracy", "metric": "own"} | ({"action": action} if action else {})
    line = "reward accuracy, metric own, budget params 0.5"
    assert f"selector {selector}, {f'action {action}, ' if action else ''}{line}" in caplog.text


def test_a_reward_that_ignores_size_has_a_budget_of_its_own() -> None:
    assert SearchGoal().budget_numbers == {"params": 0.4}
    assert SearchGoal(reward="amc").budget_numbers == {}
    assert SearchGoal(BudgetOptions(drop=0.01)).budget_numbers == {"drop": 0.01, "minimise": "latency"}


class Clock(LatencyBudget):
    """Times plans by a table instead of a clock."""

    options = LatencyOptions()

    def __init__(self, fraction, times) -> None:
        self.fraction, self.times, self.timed, self._timed, self.ratio = fraction, times, [], {}, 1.0

    def measured(self, plan) -> RelativeTime:
        self.timed.append(plan.layers)
        return RelativeTime(self.times[len(self.timed) - 1])


@pytest.fixture
def timed(small_problem, synthetic_evaluator, reward):
    """Make a session in which the two best plans take too long, and the last finalist is best applied."""

    def session(count: int, fraction: float = 0.5):
        applied = []

        def score(plan) -> float:
            applied.append(plan)
            return len(applied)

        made = Finalists(small_problem, synthetic_evaluator, reward, score, count)
        made.latency = Clock(fraction, [0.6, 0.6] + [0.4] * 18)
        return made, applied

    return session


def best_plans(problem, result) -> list:
    return [problem.plan(row.key, "random") for row in best_rows(result.rows, len(result.rows))]


def test_finalists_are_those_that_keep_the_time(timed, small_problem) -> None:
    session, applied = timed(3)
    found = session.search(SearchCall("random"))
    plans = best_plans(small_problem, found)
    assert session.latency.timed == [plan.layers for plan in plans[:5]]
    assert applied == plans[2:5]
    assert found.plan == plans[4] == small_problem.plan(found.row.key, "random")
    assert small_problem.plan(found.best.key, "random") == plans[0]


def test_without_finalists_the_best_plan_that_keeps_the_time_is_taken(timed, small_problem) -> None:
    session, applied = timed(1)
    found = session.search(SearchCall("random"))
    plans = best_plans(small_problem, found)
    assert session.latency.timed == [plan.layers for plan in plans[:3]]
    assert found.plan == plans[2] == small_problem.plan(found.row.key, "random")
    assert not applied


def test_of_plans_that_all_take_too_long_the_fastest_is_taken_and_the_result_says_so(timed) -> None:
    session, _ = timed(3, fraction=0.3)
    found = session.search(SearchCall("random"))
    plans, times = session.latency.timed, session.latency.times
    assert found.plan.layers == plans[min(range(len(plans)), key=times.__getitem__)]
    assert re.match(
        r"budget\.latency=0\.3 is missed: of the \d+ best plans none is that fast.*0\.400", found.missed
    )


def test_a_plan_that_keeps_the_time_misses_nothing(timed) -> None:
    session, _ = timed(1)
    assert session.search(SearchCall("random")).missed is None


def test_comparisons_rank_report_and_save_the_same_plan(small_problem, result) -> None:
    """A result whose plan is not the one with the best reward counts by its plan."""
    rows = best_rows(result.rows, 3)
    slow = ComparedSearch(SelectorEntry("random", "random"), 0), with_row(small_problem, result, rows[2])
    fast = ComparedSearch(SelectorEntry("random", "random"), 1), with_row(small_problem, result, rows[1])
    results = dict([slow, fast])
    assert winner(results) is fast[1]

    class Final:
        def accuracies(self, problem, plan):
            return float(plan == slow[1].plan), None

    first, second = compare.tested(small_problem, results, Final())
    assert (first.test_accuracy, second.test_accuracy) == (1.0, 0.0)
    assert (first.best_reward, second.best_reward) == (rows[2].reward, rows[1].reward)
    assert (first.params_kept, first.macs_kept) == (rows[2].params_kept, rows[2].macs_kept)
    assert first.heldout_accuracy == rows[2].accuracy


@pytest.mark.parametrize("metric", ["agreement", "soft_agreement"])
def test_the_dense_network_agrees_with_itself(metric) -> None:
    data = load_dataset("digits", seed=0)
    torch.manual_seed(0)
    dense = create_model("conv4", input_shape=data.input_shape, num_classes=data.classes).eval()
    score = ImageScoring(
        dense, data, EvaluatorOptions(metric=metric, augmented=False), images=10
    ).of_networks()
    assert score(dense) == pytest.approx(1.0, abs=1e-6)


def test_all_held_out_images_are_scored() -> None:
    data = load_dataset("digits", seed=0)
    torch.manual_seed(0)
    dense = create_model("conv4", input_shape=data.input_shape, num_classes=data.classes).eval()
    logits = predict_logits(dense, data.heldout, mean=data.mean, std=data.std)
    expected = float((logits.argmax(1) == data.heldout.y).double().mean())
    assert (
        ImageScoring(dense, data, EvaluatorOptions(augmented=False), images=10).of_networks()(dense)
        == expected
    )
