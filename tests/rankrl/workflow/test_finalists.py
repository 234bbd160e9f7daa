"""The last round of a search takes the plan that is best when it is carried out."""

from __future__ import annotations

import pytest

from rankrl.plan_search.run import best_rows, run_search
from rankrl.selectors import create_selector
from rankrl.workflow.finalists import best_finalist


@pytest.fixture
def result(small_problem, synthetic_evaluator):
    selector = create_selector("random", small_problem, seed=0, episodes=12)
    return run_search(small_problem, synthetic_evaluator, selector, episodes=12)


def test_one_finalist_is_the_plan_with_the_best_reward(small_problem, result) -> None:
    assert best_finalist(small_problem, result, lambda plan: 0.5, 1) == result.plan


def test_the_best_refitted_plan_among_the_finalists_wins(small_problem, result) -> None:
    rows = best_rows(result.rows, 3)
    assert len(rows) == 3
    favourite = rows[2].ranks_key
    scored = []

    def score(plan) -> float:
        scored.append(small_problem.ranks(plan))
        return float(small_problem.ranks(plan) == favourite)

    plan = best_finalist(small_problem, result, score, 3)
    assert small_problem.ranks(plan) == favourite
    assert scored == [row.ranks_key for row in rows]
    assert plan.chosen_by == "random"


def test_the_first_of_equals_is_taken(small_problem, result) -> None:
    assert best_finalist(small_problem, result, lambda plan: 0.5, 3) == result.plan
