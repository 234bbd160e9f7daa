"""The last round of a search takes the plan that is best when it is carried out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from decomposition import CompressionPlan
from rankrl.data import load_dataset
from rankrl.errors import ConfigError
from rankrl.models import create_model
from rankrl.plan_search.evaluator import EvaluatorOptions
from rankrl.plan_search.rewards import create_reward
from rankrl.plan_search.run import best_rows, choosing, run_search
from rankrl.selectors import create_selector
from rankrl.training import predict_logits
from rankrl.workflow import compare
from rankrl.workflow.choose import SearchOptions, SearchSetting, search_plan
from rankrl.workflow.compare import Contestant, winner
from rankrl.workflow.finalists import best_finalist, finalists, score_refitted
from rankrl.workflow.latency import LatencyBudget


@pytest.fixture
def reward():
    return create_reward("accuracy", budgeted=True)


@pytest.fixture
def result(small_problem, synthetic_evaluator):
    selector = create_selector("random", small_problem, seed=0, episodes=12)
    return run_search(small_problem, synthetic_evaluator, selector, episodes=12)


def test_the_best_refitted_plan_among_the_finalists_wins(small_problem, result, reward) -> None:
    rows = best_rows(result.rows, 3)
    assert result.rows[0] not in rows
    favourite = rows[2].ranks_key
    scored = []

    def score(plan) -> float:
        scored.append(small_problem.ranks(plan))
        return float(small_problem.ranks(plan) == favourite)

    row = best_finalist(small_problem, result, finalists(result, 3), score, reward)
    assert row.ranks_key == favourite
    assert scored == [row.ranks_key for row in (*rows, result.rows[0])]
    chosen = choosing(small_problem, result, row)
    assert (chosen.chosen, chosen.best) == (row, result.best)
    assert small_problem.ranks(chosen.plan) == favourite
    assert chosen.plan.chosen_by == "random"


def test_the_plan_that_the_search_began_with_is_a_finalist(small_problem, result, reward) -> None:
    first = result.rows[0].ranks_key
    row = best_finalist(
        small_problem,
        result,
        finalists(result, 2),
        lambda plan: float(small_problem.ranks(plan) == first),
        reward,
    )
    assert row.ranks_key == first != small_problem.ranks(result.plan)


def test_the_first_of_equals_is_taken(small_problem, result, reward) -> None:
    assert best_finalist(small_problem, result, finalists(result, 3), lambda plan: 0.5, reward) == result.best


def test_finalists_are_judged_by_the_reward_not_by_accuracy_alone(small_problem, result) -> None:
    rows = [*best_rows(result.rows, 3), result.rows[0]]
    smallest = min(rows, key=lambda row: row.params_kept)
    largest = max(rows, key=lambda row: row.params_kept)
    size_alone = create_reward("weighted", budgeted=True, compression=1.0)

    def score(plan) -> float:
        return float(small_problem.ranks(plan) == largest.ranks_key)

    assert smallest.params_kept < largest.params_kept
    row = best_finalist(small_problem, result, finalists(result, 3), score, size_alone)
    assert row.ranks_key == smallest.ranks_key


def test_a_search_of_one_plan_has_nothing_to_refit(small_problem, synthetic_evaluator, reward) -> None:
    greedy = create_selector("greedy", small_problem, seed=0, episodes=12)
    only = run_search(small_problem, synthetic_evaluator, greedy, episodes=12)

    def score(plan) -> float:
        raise AssertionError("refitted")

    assert best_finalist(small_problem, only, finalists(only, 3), score, reward) == only.best


class Clock(LatencyBudget):
    """Times plans by a table instead of a clock."""

    def __init__(self, problem, fraction, times) -> None:
        self.fraction, self._problem, self._times, self.timed = fraction, problem, times, []

    def measured(self, plan) -> float:
        self.timed.append(self._problem.ranks(plan))
        return self._times[self.timed[-1]]


def search_options(finalists_wanted: int) -> SearchOptions:
    return SearchOptions(
        selector="random",
        selector_options={},
        reward="accuracy",
        reward_options={},
        params=None,
        macs=None,
        latency=0.5,
        episodes=12,
        seconds=None,
        patience=None,
        images=10,
        evaluator=EvaluatorOptions(),
        finalists=finalists_wanted,
    )


@pytest.fixture
def timed(small_problem, synthetic_evaluator, result, reward):
    """A setting in which the two best plans take too long, and the last of those that do not refits best."""
    rows = best_rows(result.rows, 12)
    times = {row.ranks_key: 0.6 if place < 2 else 0.4 for place, row in enumerate(rows)}
    synthetic_evaluator.restore({}, {})
    clock, refitted = Clock(small_problem, 0.5, times), []

    def score(plan) -> float:
        refitted.append(small_problem.ranks(plan))
        return [row.ranks_key for row in rows].index(refitted[-1])

    setting = SearchSetting(small_problem, synthetic_evaluator, reward, clock, score)
    return setting, rows, clock, refitted


def test_finalists_are_those_that_keep_the_time(timed, tmp_path) -> None:
    setting, rows, clock, refitted = timed
    found = search_plan(setting, search_options(3), folder=tmp_path, seed=0)
    assert clock.timed == [row.ranks_key for row in rows[:5]]
    assert refitted == [row.ranks_key for row in rows[2:5]]
    assert found.chosen.ranks_key == rows[4].ranks_key == setting.problem.ranks(found.plan)
    assert found.best.ranks_key == rows[0].ranks_key


def test_without_finalists_the_best_plan_that_keeps_the_time_is_taken(timed, tmp_path) -> None:
    setting, rows, clock, _ = timed
    found = search_plan(replace(setting, refitted=None), search_options(1), folder=tmp_path, seed=0)
    assert clock.timed == [row.ranks_key for row in rows[:3]]
    assert found.chosen.ranks_key == rows[2].ranks_key == setting.problem.ranks(found.plan)


def test_plans_that_all_take_too_long_are_refused(timed, tmp_path) -> None:
    setting, _, clock, _ = timed
    clock.fraction = 0.3
    with pytest.raises(
        ConfigError, match=r"budget\.latency=0\.3: of the 20 best plans none is that fast.*0\.400"
    ):
        search_plan(setting, search_options(3), folder=tmp_path, seed=0)


def test_comparisons_rank_report_and_save_the_same_plan(small_problem, result) -> None:
    """A result whose plan is not the one with the best reward counts by its plan."""
    rows = best_rows(result.rows, 3)
    slow = Contestant("random", 0, {}), choosing(small_problem, result, rows[2])
    fast = Contestant("random", 1, {}), choosing(small_problem, result, rows[1])
    results = dict([slow, fast])
    assert winner(results) is fast[1]

    class Final:
        def accuracies(self, problem, plan):
            return float(problem.ranks(plan) == rows[2].ranks_key), None

    first, second = compare.tested(small_problem, results, Final())
    assert (first.test_accuracy, second.test_accuracy) == (1.0, 0.0)
    assert (first.best_reward, second.best_reward) == (rows[2].reward, rows[1].reward)
    assert (first.params_kept, first.macs_kept) == (rows[2].params_kept, rows[2].macs_kept)
    assert first.heldout_accuracy == rows[2].accuracy


@pytest.mark.parametrize("term", ["agreement", "soft_agreement"])
def test_the_dense_network_agrees_with_itself(term) -> None:
    data = load_dataset("digits", seed=0)
    torch.manual_seed(0)
    dense = create_model("conv4", input_shape=data.input_shape, num_classes=data.classes).eval()
    score = score_refitted(lambda plan: dense, dense, data, EvaluatorOptions(term=term, augmented=False))
    assert score(CompressionPlan((), "", (1, 8, 8))) == pytest.approx(1.0, abs=1e-6)


def test_all_held_out_images_are_scored() -> None:
    data = load_dataset("digits", seed=0)
    torch.manual_seed(0)
    dense = create_model("conv4", input_shape=data.input_shape, num_classes=data.classes).eval()
    logits = predict_logits(dense, data.heldout, mean=data.mean, std=data.std)
    expected = float((logits.argmax(1) == data.heldout.y).double().mean())
    assert (
        score_refitted(lambda plan: dense, dense, data, EvaluatorOptions(augmented=False))(
            CompressionPlan((), "", (1, 8, 8))
        )
        == expected
    )
