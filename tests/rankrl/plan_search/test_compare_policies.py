"""A comparison goes without the default policy where that knows the task; a named one is refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from rankrl.errors import ConfigError
from rankrl.options.search import BudgetOptions, SearchOptions
from rankrl.plan_search import compare
from rankrl.plan_search.agents.policy_file import PRETRAINED_REFITTED, read_policy
from rankrl.plan_search.compare import compared_searches, search_all
from rankrl.plan_search.pretraining import task_of
from rankrl.plan_search.scores.rewards import create_reward
from rankrl.plan_search.selectors import SelectorEntry, selector_options
from rankrl.plan_search.session import SearchGoal, SearchSession


@pytest.fixture
def session(small_problem, synthetic_evaluator) -> SearchSession:
    made = SearchSession.__new__(SearchSession)
    made.problem, made.evaluator, made.latency, made.progress = small_problem, synthetic_evaluator, None, None
    made.reward, made.scoring = create_reward("accuracy", budgeted=True), SimpleNamespace(metric_name="own")
    made.goal = SearchGoal(BudgetOptions(params=0.5), SearchOptions(episodes=3, finalists=1))
    return made


@pytest.fixture
def trained_here(small_problem, monkeypatch) -> None:
    """Let the policy that comes with rankrl be trained on the small problem."""
    policy = read_policy(PRETRAINED_REFITTED)
    task = task_of(small_problem, model="small", dataset="noise")
    known = replace(policy, card=replace(policy.card, tasks=(task,)))
    monkeypatch.setattr(compare, "read_policy", lambda name: known)


def entries(*texts: str) -> list[SelectorEntry]:
    options = {"bayes:step=0.2": {"step": 0.2}, "named": {"policy": PRETRAINED_REFITTED}}
    options["bayes:policy=null"] = {"policy": None}
    return [
        SelectorEntry(text, "bayes", {**selector_options("bayes"), **options.get(text, {})}) for text in texts
    ]


def phases(results) -> dict[str, str]:
    return {each.entry.text: result.rows[0].phase for each, result in results.items()}


def test_a_search_that_knows_the_answer_goes_without_the_default_policy(
    session, trained_here, tmp_path
) -> None:
    warnings: list[str] = []
    entered = compared_searches(entries("bayes", "bayes:step=0.2", "bayes:policy=null"), [0])
    found = phases(search_all(session, entered, tmp_path, warnings.append))
    assert found == {"bayes:policy=null": "preset", "bayes:step=0.2,policy=null": "preset"}
    assert len(warnings) == 2
    assert all("trained on this very task" in each for each in warnings)
    assert (tmp_path / "bayes-policy-null-0" / "plan.json").exists()


def test_a_named_policy_that_knows_the_answer_is_refused(session, trained_here, tmp_path) -> None:
    with pytest.raises(ConfigError, match="trained on this very task"):
        search_all(session, compared_searches(entries("named"), [0]), tmp_path)


def test_elsewhere_a_search_begins_with_the_default_policy(session, tmp_path) -> None:
    found = search_all(session, compared_searches(entries("bayes", "bayes:policy=null"), [0]), tmp_path)
    assert phases(found) == {"bayes": "pretrained", "bayes:policy=null": "preset"}
