"""Whatever is registered proposes plans that keep the budget, and the same ones for the same seed."""

import importlib
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decomposition.choose.heuristics import get_heuristic, list_heuristics
from rankrl.errors import ConfigError
from rankrl.plan_search.selectors import (
    Proposal,
    Selector,
    create_selector,
    list_selectors,
    register_selector,
    selector_class,
)
from rankrl.plan_search.selectors.random_plans import random_choices
from rankrl.plan_search.selectors.selector import _SELECTORS
from rankrl.plan_search.selectors.tpe import STUDY_FILE, STUDY_NAME
from rankrl.plan_search.space.problem import SearchProblem
from rankrl.testing import SelectorContract, plans_of, proposals_of, rewards_of

EPISODES = 8
FAST_POLICY = {"warmup_episodes": 3, "updates_per_episode": 2, "batch_size": 8}
FAST_BAYES = {"warmup_episodes": 3, "candidates": 4}
REINFORCEMENT = ["ddpg", "sac", "td3"]
BAYES = ["bayes"]
FAST = {**dict.fromkeys(REINFORCEMENT, FAST_POLICY), **dict.fromkeys(BAYES, FAST_BAYES)}


def make(name: str, problem: SearchProblem, seed: int = 0, **options) -> Selector:
    if problem.divergences is None:
        problem = replace(problem, divergences=lambda batches: [site.errors**2 for site in problem.sites])
    options = {**FAST.get(name, {}), **options}
    return create_selector(name, problem, seed=seed, episodes=EPISODES, **options)


class TestSelectors(SelectorContract):
    names = list_selectors()
    options = FAST
    episodes = EPISODES


def test_the_names_of_the_contract_are_there() -> None:
    searches = {*REINFORCEMENT, *BAYES, "tpe", "cmaes", "local", "random"}
    assert {*searches, "uniform", "energy", "vbmf", "greedy"} <= set(list_selectors())


@pytest.mark.parametrize("name", list_heuristics())
def test_heuristics_propose_their_plan_once(small_problem, name) -> None:
    selector = make(name, small_problem)
    choices = get_heuristic(name).choose(small_problem.library, small_problem.sites, small_problem.budget)
    (proposal,) = selector.propose()
    assert proposal.choices == tuple(choices)
    selector.observe([proposal], [0.5])
    assert selector.propose() == []


@pytest.mark.parametrize("name", [*REINFORCEMENT, *BAYES, "local", "tpe", "cmaes"])
def test_searches_begin_with_greedys_plan(small_problem, name) -> None:
    (proposal,) = make(name, small_problem).propose()
    assert proposal.choices == tuple(small_problem.preset)
    assert proposal.phase == "preset"


@pytest.mark.parametrize(
    "name", [n for n in list_selectors() if "plans_per_step" in selector_class(n).default_options()]
)
def test_several_plans_can_be_proposed_at_once(small_problem, name) -> None:
    selector = make(name, small_problem, plans_per_step=3)
    plans_of(selector, 2)
    assert len(selector.propose()) == 3
    with pytest.raises(ConfigError, match="plans_per_step"):
        make(name, small_problem, plans_per_step=0)


@given(seed=st.integers(0, 10_000))
def test_random_plans_spend_the_budget(small_problem, seed) -> None:
    choices = random_choices(small_problem, np.random.default_rng(seed))
    costs = [site.params for site in small_problem.sites]
    left = small_problem.budget.available - sum(c[j] for c, j in zip(costs, choices, strict=True))
    assert left >= 0
    for cost, choice in zip(costs, choices, strict=True):
        larger = cost[cost > cost[choice]] - cost[choice]
        assert not (larger <= left).any()


def test_without_a_budget_only_rank_actions_and_random_plans_work(small_problem, small_network) -> None:
    free = SearchProblem.from_model(small_network, small_problem.sites, (1, 8, 8))
    for name in ("random", "ddpg", "bayes"):
        assert len(set(plans_of(make(name, free), EPISODES))) > 1
    for name in ("local", "tpe", "cmaes", "divergence", "greedy", "uniform"):
        with pytest.raises(ConfigError, match="budget"):
            make(name, free).propose()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dpg", {}, "Did you mean 'ddpg'"),
        ("ddpg", {"learning_rat": 1}, "Did you mean 'learning_rate'"),
        ("ddpg", {"learning_rate": 0.0}, "learning_rate"),
        ("bayes", {"candidates": 0}, "candidates"),
        ("bayes", {"step": 0.0}, "step"),
        ("ddpg", {"noise": -0.1}, "noise"),
        ("ddpg", {"features": ("errors",)}, "features"),
        ("local", {"step": 0.0}, "step"),
        ("divergence", {"measured": "some"}, "measured"),
        ("random", {"seeds": 3}, "no option 'seeds'"),
    ],
)
def test_unknown_names_and_options_are_refused(small_problem, name, options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        create_selector(name, small_problem, **options)


def test_episodes_must_be_positive(small_problem) -> None:
    with pytest.raises(ConfigError, match=r"search\.episodes"):
        create_selector("random", small_problem, episodes=0)


class Whole(Selector):
    """A selector with everything but a right constructor."""

    name = "whole"
    description = "a plugin's"

    def propose(self) -> list[Proposal]:
        return []


def with_constructor(constructor) -> type[Selector]:
    return type("Own", (Whole,), {"__init__": constructor})


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ConfigError, match="'random' already"):
        register_selector(type("Another", (Whole,), {"name": "random"}))


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (type("Own", (), {}), "Own lacks name, description"),
        (type("Own", (Selector,), {"name": "own", "description": "-"}), "Own lacks propose: .* subclass"),
        (type("Own", (), {"name": "own", "description": "-"}), "Own is none: a selector is a subclass"),
        (
            with_constructor(lambda self, problem: None),
            r"Own cannot be made: got an unexpected keyword argument 'seed'. It is called as Own\(problem, "
            r"seed=SEED, episodes=EPISODES, \*\*options\)",
        ),
        (
            with_constructor(lambda self, problem, seed, episodes, width: None),
            "missing a required argument: 'width'.* have defaults",
        ),
    ],
)
def test_a_class_that_a_search_cannot_make_is_refused(cls, message) -> None:
    with pytest.raises(ConfigError, match=message):
        register_selector(cls)


def test_a_constructor_calls_that_of_selectors(small_problem) -> None:
    with _SELECTORS.restored():
        register_selector(with_constructor(lambda self, problem, *, seed, episodes: None))
        with pytest.raises(ConfigError, match=r"Own\.__init__ must call super\(\)\.__init__\(problem"):
            create_selector("whole", small_problem)


def test_without_optuna_tpe_says_what_to_install(small_problem, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match="pip install optuna"):
        make("tpe", small_problem)


def test_without_its_package_cmaes_says_what_to_install(small_problem, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "cmaes", None)
    with pytest.raises(ConfigError, match="pip install cmaes"):
        make("cmaes", small_problem)


def test_the_tpe_study_on_disk_holds_the_trials(small_problem, tmp_path) -> None:
    optuna = importlib.import_module("optuna")
    selector = make("tpe", small_problem)
    selector.use_folder(tmp_path)
    proposals = proposals_of(selector, 4)
    resumed = make("tpe", small_problem)
    resumed.observe(proposals, rewards_of(proposals))
    resumed.use_folder(tmp_path)
    plans_of(resumed, 2)
    study = optuna.load_study(study_name=STUDY_NAME, storage=f"sqlite:///{tmp_path / STUDY_FILE}")
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 6
