"""What a policy that serves every network sees: as much of any layer, and no identity."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from stable_baselines3 import DDPG
from stable_baselines3.common.env_checker import check_env as check_env_for_sb3
from stable_baselines3.common.vec_env import DummyVecEnv

from decomposition.formats import list_formats
from rankrl.options.selectors import Feature
from rankrl.plan_search.envs import ENVIRONMENT_ID, RankSelectionEnv
from rankrl.plan_search.envs.observations import descriptor_names, layer_descriptors
from rankrl.plan_search.space.problem import Choices, SearchProblem

SHAPE = (1, 8, 8)
DESCRIBING: tuple[Feature, ...] = ("macs", "curve", "descriptors")  # as many for every network


def column(problem: SearchProblem, name: str) -> np.ndarray:
    return layer_descriptors(problem)[:, descriptor_names().index(name)]


@pytest.mark.parametrize("measure", ["params", "macs", "bytes", None])
def test_they_are_as_many_and_in_range_whatever_is_searched(small_network, library_of, measure) -> None:
    budget = {} if measure is None else {measure: 0.6}
    for formats in (*((name,) for name in list_formats()), ("cp", "tucker")):
        library = library_of(*formats)
        sites = library.all_candidates(limit=4)
        problem = SearchProblem.from_model(small_network, sites, SHAPE, **budget, library=library)
        found = layer_descriptors(problem)
        assert found.shape == (len(sites), len(descriptor_names()))
        assert np.isfinite(found).all()
        assert found.min() >= 0
        assert found.max() <= 1


def test_the_size_of_an_observation_does_not_depend_on_the_network(small_problem, small_network) -> None:
    fewer = SearchProblem.from_model(small_network, small_problem.sites[1:], SHAPE, params=0.6)
    sizes = {RankSelectionEnv(each, features=DESCRIBING).encoder.size for each in (small_problem, fewer)}
    assert len(sizes) == 1


def test_one_agent_learns_in_the_environments_of_several_networks(small_problem, small_network) -> None:
    """Episodes have other lengths, so that one environment begins anew while the other is in the middle."""
    fewer = SearchProblem.from_model(small_network, small_problem.sites[1:], SHAPE, params=0.6)
    plans: dict[int, list[Choices]] = {0: [], 1: []}

    def make(number: int, problem: SearchProblem) -> RankSelectionEnv:
        return RankSelectionEnv(
            problem, lambda choices: plans[number].append(choices) or 0.5, features=DESCRIBING
        )

    envs = [partial(make, *pair) for pair in enumerate((small_problem, fewer))]
    agent = DDPG("MlpPolicy", DummyVecEnv(envs), learning_starts=8, n_steps=4, gamma=1.0, seed=0)
    agent.learn(24)
    assert [len(each) for each in plans.values()] == [3, 4]
    assert all(len(choices) == len(small_problem.sites) for choices in plans[0])
    buffer = agent.replay_buffer
    assert buffer.rewards[: buffer.pos].sum() == 0.5 * (3 + 4)


def test_both_checkers_pass_for_every_format(format_problem) -> None:
    env = gymnasium.make(
        ENVIRONMENT_ID, problem=format_problem, reward=lambda choices: 0.5, features=DESCRIBING
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        check_env(env.unwrapped, skip_render_check=True)
        check_env_for_sb3(env.unwrapped)


def test_names_tell_nothing_but_the_place_in_a_block(small_problem) -> None:
    """Layers of one module are told apart by their order alone, and so are networks."""
    renamed = tuple(
        replace(site, spec=replace(site.spec, name=f"x{index}"))
        for index, site in enumerate(small_problem.sites)
    )
    other = replace(small_problem, sites=renamed)
    np.testing.assert_array_equal(layer_descriptors(other), layer_descriptors(small_problem))
    names = ("block.0.conv1", "block.0.conv2", "block.1.conv1", "last")
    blocks = tuple(
        replace(site, spec=replace(site.spec, name=name))
        for site, name in zip(small_problem.sites, names, strict=True)
    )
    assert column(replace(small_problem, sites=blocks), "place_in_block").tolist() == [0, 1, 0.5, 0.5]


def test_neighbours_are_those_before_and_behind(small_problem) -> None:
    kept = column(small_problem, "preset_kept")
    np.testing.assert_array_equal(column(small_problem, "previous_preset_kept")[1:], kept[:-1])
    np.testing.assert_array_equal(column(small_problem, "next_preset_kept")[:-1], kept[1:])
    assert column(small_problem, "previous_preset_kept")[0] == 0.5


def test_the_task_is_told_by_budget_and_format(format_problem) -> None:
    assert set(column(format_problem, "budget_params")) == {0.55}
    assert set(column(format_problem, "budget_macs")) == {1.0}
    (name,) = {
        operation.format for site in format_problem.sites for operation in site.candidates[0].operations
    }
    told = column(format_problem, f"format_{name}")
    for site, choice, each in zip(format_problem.sites, format_problem.preset, told, strict=True):
        assert each == float(choice != site.dense)


def test_greedys_plan_is_described(small_problem) -> None:
    pairs = list(zip(small_problem.sites, small_problem.preset, strict=True))
    np.testing.assert_allclose(
        column(small_problem, "preset_error"), [site.errors[choice] for site, choice in pairs]
    )
    np.testing.assert_allclose(
        column(small_problem, "preset_kept"),
        [site.params[choice] / site.params[-1] for site, choice in pairs],
    )
    losses = np.array([site.losses[choice] for site, choice in pairs])
    before = column(small_problem, "loss_before")
    # A layer that loses nothing adds nothing, but for the last bit of the sum.
    np.testing.assert_allclose(np.diff([*before, 1.0]), losses / losses.sum(), atol=1e-15)
