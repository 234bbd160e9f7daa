"""Whatever is registered proposes plans that keep the budget, and the same ones for the same seed."""

from __future__ import annotations

import importlib
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decomposition.heuristics import get_heuristic, list_heuristics
from rankrl.errors import ConfigError
from rankrl.plan_search.problem import SearchProblem
from rankrl.selectors import (
    Selector,
    create_selector,
    list_selectors,
    register_selector,
    selector_description,
    selector_options,
)
from rankrl.selectors.random_plans import random_choices
from rankrl.selectors.tpe import STUDY_FILE, STUDY_NAME

EPISODES = 12
FAST_AGENT = {"warmup_episodes": 3, "updates_per_episode": 2, "candidates": 6, "batch_size": 8, "critics": 2}
REINFORCEMENT = ["ddpg", "sac", "td3"]


def make(name: str, problem: SearchProblem, seed: int = 0, **options) -> Selector:
    fast = FAST_AGENT if name in REINFORCEMENT else {}
    return create_selector(name, problem, seed=seed, episodes=EPISODES, **{**fast, **options})


def run(selector: Selector, steps: int = EPISODES) -> list:
    plans = []
    for _ in range(steps):
        proposals = selector.propose()
        plans += [proposal.plan for proposal in proposals]
        sizes = [sum(sum(ranks) for ranks in selector.problem.ranks(p.plan)) for p in proposals]
        selector.observe(proposals, [float(np.tanh(size / 100)) for size in sizes])
    return plans


def test_the_names_of_the_contract_are_there() -> None:
    assert {"ddpg", "random", "uniform", "energy", "vbmf", "greedy", "tpe"} <= set(list_selectors())


@pytest.mark.parametrize("name", list_selectors())
@pytest.mark.parametrize("measure", ["params", "macs"])
def test_every_proposed_plan_keeps_the_budget(small_problem, small_network, small_library, name, measure):
    problem = SearchProblem.from_model(
        small_network, small_problem.curves, (1, 8, 8), **{measure: 0.6}, library=small_library
    )
    plans = run(make(name, problem))
    assert plans
    assert all(problem.keeps_budget(plan) for plan in plans)
    assert all(plan.chosen_by == name for plan in plans)


@pytest.mark.parametrize("name", list_selectors())
def test_the_seed_decides_everything(small_problem, name) -> None:
    first = run(make(name, small_problem, seed=1))
    assert run(make(name, small_problem, seed=1)) == first
    if len(first) > 1:
        assert run(make(name, small_problem, seed=2)) != first


@pytest.mark.parametrize("name", list_selectors())
def test_listings_describe_every_selector(name) -> None:
    assert selector_description(name)
    assert "problem" not in selector_options(name)


@pytest.mark.parametrize("name", list_heuristics())
def test_heuristics_propose_their_plan_once(small_problem, name) -> None:
    selector = make(name, small_problem)
    choices = get_heuristic(name).choose(small_problem.library, small_problem.curves, small_problem.budget)
    (proposal,) = selector.propose()
    assert proposal.plan == small_problem.plan(choices, name)
    selector.observe([proposal], [0.5])
    assert selector.propose() == []


@pytest.mark.parametrize("name", [*REINFORCEMENT, "local", "tpe"])
def test_searches_begin_with_greedys_plan(small_problem, name) -> None:
    (proposal,) = make(name, small_problem).propose()
    greedy = small_problem.plan(small_problem.preset, name)
    assert small_problem.ranks(proposal.plan) == small_problem.ranks(greedy)
    assert proposal.phase == "preset"


@pytest.mark.parametrize("name", [n for n in list_selectors() if "plans_per_step" in selector_options(n)])
def test_several_plans_can_be_proposed_at_once(small_problem, name) -> None:
    selector = make(name, small_problem, plans_per_step=3)
    run(selector, steps=2)
    assert len(selector.propose()) == 3
    with pytest.raises(ConfigError, match="plans_per_step"):
        make(name, small_problem, plans_per_step=0)


@given(seed=st.integers(0, 10_000))
def test_random_plans_spend_the_budget(small_problem, seed) -> None:
    choices = random_choices(small_problem, np.random.default_rng(seed))
    costs = [curve.params for curve in small_problem.curves]
    left = small_problem.budget.available - sum(c[j] for c, j in zip(costs, choices, strict=True))
    assert left >= 0
    for cost, choice in zip(costs, choices, strict=True):
        larger = cost[cost > cost[choice]] - cost[choice]
        assert not (larger <= left).any()


def test_without_a_budget_only_rank_actions_and_random_plans_work(small_problem, small_network) -> None:
    free = SearchProblem.from_model(small_network, small_problem.curves, (1, 8, 8))
    for name in ("random", "ddpg"):
        assert len(set(map(free.ranks, run(make(name, free))))) > 1
    for name in ("local", "tpe", "greedy", "uniform"):
        with pytest.raises(ConfigError, match="budget"):
            make(name, free)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dpg", {}, "Did you mean 'ddpg'"),
        ("ddpg", {"actor_rat": 1}, "Did you mean 'actor_rate'"),
        ("ddpg", {"candidates": 0}, "candidates"),
        ("ddpg", {"elite_share": 2.0}, "elite_share"),
        ("ddpg", {"noise": 0.1, "final_noise": 0.2}, "final_noise"),
        ("ddpg", {"features": ("errors",)}, "features"),
        ("local", {"step": 0.0}, "step"),
        ("random", {"seeds": 3}, "no option 'seeds'"),
    ],
)
def test_unknown_names_and_options_are_refused(small_problem, name, options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        create_selector(name, small_problem, **options)


def test_episodes_must_be_positive(small_problem) -> None:
    with pytest.raises(ConfigError, match=r"search\.episodes"):
        create_selector("random", small_problem, episodes=0)


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ConfigError, match="random"):
        register_selector(type("Another", (Selector,), {"name": "random", "description": ""}))


def test_without_optuna_tpe_says_what_to_install(small_problem, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match="pip install optuna"):
        make("tpe", small_problem)


def test_the_tpe_study_on_disk_holds_the_trials(small_problem, tmp_path) -> None:
    optuna = importlib.import_module("optuna")
    selector = make("tpe", small_problem)
    selector.use_folder(tmp_path)
    run(selector, steps=4)
    resumed = make("tpe", small_problem)
    resumed.use_folder(tmp_path)
    resumed.restore(selector.state())
    run(resumed, steps=2)
    study = optuna.load_study(study_name=STUDY_NAME, storage=f"sqlite:///{tmp_path / STUDY_FILE}")
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 6
