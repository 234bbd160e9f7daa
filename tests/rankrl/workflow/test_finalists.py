"""The last round of a search takes the plan that is best when it is carried out."""

from __future__ import annotations

import pytest
import torch

from decomposition import CompressionPlan
from rankrl.data import load_dataset
from rankrl.models import create_model
from rankrl.plan_search.evaluator import EvaluatorOptions
from rankrl.plan_search.rewards import create_reward
from rankrl.plan_search.run import best_rows, run_search
from rankrl.selectors import create_selector
from rankrl.training import predict_logits
from rankrl.workflow.finalists import best_finalist, score_refitted


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

    plan = best_finalist(small_problem, result, score, reward, 3)
    assert small_problem.ranks(plan) == favourite
    assert scored == [row.ranks_key for row in (*rows, result.rows[0])]
    assert plan.chosen_by == "random"


def test_the_plan_that_the_search_began_with_is_a_finalist(small_problem, result, reward) -> None:
    first = result.rows[0].ranks_key
    plan = best_finalist(
        small_problem, result, lambda plan: float(small_problem.ranks(plan) == first), reward, 2
    )
    assert small_problem.ranks(plan) == first != small_problem.ranks(result.plan)


def test_the_first_of_equals_is_taken(small_problem, result, reward) -> None:
    assert best_finalist(small_problem, result, lambda plan: 0.5, reward, 3) == result.plan


def test_finalists_are_judged_by_the_reward_not_by_accuracy_alone(small_problem, result) -> None:
    rows = [*best_rows(result.rows, 3), result.rows[0]]
    smallest = min(rows, key=lambda row: row.params_kept)
    largest = max(rows, key=lambda row: row.params_kept)
    size_alone = create_reward("weighted", budgeted=True, compression=1.0)

    def score(plan) -> float:
        return float(small_problem.ranks(plan) == largest.ranks_key)

    assert smallest.params_kept < largest.params_kept
    plan = best_finalist(small_problem, result, score, size_alone, 3)
    assert small_problem.ranks(plan) == smallest.ranks_key


def test_a_search_of_one_plan_has_nothing_to_refit(small_problem, synthetic_evaluator, reward) -> None:
    greedy = create_selector("greedy", small_problem, seed=0, episodes=12)
    only = run_search(small_problem, synthetic_evaluator, greedy, episodes=12)

    def score(plan) -> float:
        raise AssertionError("refitted")

    assert best_finalist(small_problem, only, score, reward, 3) == only.plan


@pytest.mark.parametrize("term", ["agreement", "soft_agreement"])
def test_the_dense_network_agrees_with_itself(term) -> None:
    data = load_dataset("digits", seed=0)
    torch.manual_seed(0)
    dense = create_model("conv4", input_shape=data.input_shape, num_classes=data.classes).eval()
    score = score_refitted(lambda plan: dense, dense, data, EvaluatorOptions(term=term))
    assert score(CompressionPlan((), "", (1, 8, 8))) == pytest.approx(1.0, abs=1e-6)


def test_all_held_out_images_are_scored() -> None:
    data = load_dataset("digits", seed=0)
    torch.manual_seed(0)
    dense = create_model("conv4", input_shape=data.input_shape, num_classes=data.classes).eval()
    logits = predict_logits(dense, data.heldout, mean=data.mean, std=data.std)
    expected = float((logits.argmax(1) == data.heldout.y).double().mean())
    assert (
        score_refitted(lambda plan: dense, dense, data, EvaluatorOptions())(
            CompressionPlan((), "", (1, 8, 8))
        )
        == expected
    )
