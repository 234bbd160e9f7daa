"""The environment keeps Gymnasium's contract, and every plan keeps the budget."""

import dataclasses
import warnings
from dataclasses import replace
from functools import partial
from typing import get_args

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import check_env
from hypothesis import given
from hypothesis import strategies as st
from stable_baselines3 import DDPG
from stable_baselines3.common.env_checker import check_env as check_env_for_sb3
from stable_baselines3.common.vec_env import DummyVecEnv

from decomposition import Cost
from decomposition.formats import list_formats
from rankrl.errors import ConfigError
from rankrl.options.selectors import IMPORTANCE_SCALE, Feature
from rankrl.plan_search.envs import ENVIRONMENT_ID, RankSelectionEnv
from rankrl.plan_search.envs.actions import ImportanceMap, create_action_map
from rankrl.plan_search.envs.observations import descriptor_names, layer_descriptors
from rankrl.plan_search.envs.rank_selection import repeat, rollout
from rankrl.plan_search.space.problem import Choices, SearchProblem

MAPS = {"importance": {}, "rank": {"action": "rank"}, "ratio": {"action": "ratio"}}
DESCRIBING: tuple[Feature, ...] = ("macs", "curve", "descriptors")  # as many for every network


def reward(choices: Choices) -> float:
    return 0.25 + 0.01 * sum(choice % 7 for choice in choices)


def play(env: gymnasium.Env, actions: np.ndarray, **options):
    observation, _ = env.reset(**options)
    trail = [observation]
    for action in actions:
        observation, value, terminated, truncated, info = env.step(action)
        trail.append(observation)
    return np.stack(trail), value, terminated, truncated, info


@pytest.mark.parametrize("options", [*MAPS.values(), {"features": DESCRIBING}])
def test_both_checkers_pass_for_every_format_and_kind_of_action(format_problem, options) -> None:
    env = gymnasium.make(ENVIRONMENT_ID, problem=format_problem, reward=reward, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        check_env(env.unwrapped, skip_render_check=True)
        check_env_for_sb3(env.unwrapped)


@pytest.mark.parametrize("options", [MAPS["importance"], MAPS["rank"]])
def test_action_zero_everywhere_is_greedys_plan(format_problem, options) -> None:
    env = RankSelectionEnv(format_problem, reward, **options)
    *_, info = play(env, np.zeros((env.layers, *env.action_space.shape), dtype=np.float32))
    assert info["choices"] == tuple(format_problem.preset)


@pytest.mark.parametrize("measure", ["params", "macs"])
@pytest.mark.parametrize("options", MAPS.values(), ids=MAPS)
@given(seed=st.integers(0, 1000), extreme=st.booleans())
def test_every_plan_keeps_the_budget(
    small_network, small_library, small_problem, options, measure, seed, extreme
):
    problem = SearchProblem.from_model(
        small_network, small_problem.sites, (1, 8, 8), **{measure: 0.5}, library=small_library
    )
    env = RankSelectionEnv(problem, reward, **options)
    actions = np.random.default_rng(seed).uniform(-1, 1, (env.layers, *env.action_space.shape))
    actions = np.sign(actions) if extreme else actions
    observations, _, terminated, truncated, info = play(env, actions.astype(np.float32))
    assert problem.keeps_budget(info["choices"])
    assert terminated
    assert not truncated
    assert all(observation in env.observation_space for observation in observations)


@pytest.mark.parametrize("feature", get_args(Feature))
def test_every_feature_stays_in_the_observation_space(small_problem, feature) -> None:
    env = RankSelectionEnv(small_problem, lambda choices: 7.5, features=(feature,))
    plain = RankSelectionEnv(small_problem, lambda choices: 7.5)
    assert env.observation_space.shape[0] > plain.observation_space.shape[0]
    for _ in range(2):
        observations, *_ = play(env, np.full((env.layers, 1), 0.7, dtype=np.float32))
        assert all(observation in env.observation_space for observation in observations)


def test_reward_comes_once_and_at_the_end(small_problem) -> None:
    plans = []
    env = RankSelectionEnv(small_problem, lambda choices: plans.append(choices) or 0.5)
    env.reset()
    rewards = [env.step(np.zeros(1, dtype=np.float32))[1] for _ in range(env.layers)]
    assert rewards == [0.0] * (env.layers - 1) + [0.5]
    assert len(plans) == 1


def test_without_a_reward_the_plan_is_left_to_the_caller(small_problem) -> None:
    env = RankSelectionEnv(small_problem, features=("last_reward",))
    _, value, terminated, _, info = play(env, np.zeros((env.layers, 1)), options={"last_reward": 0.5})
    assert (value, terminated) == (0.0, True)
    assert small_problem.keeps_budget(info["choices"])


def test_the_next_observation_shows_the_previous_action(small_problem) -> None:
    env = RankSelectionEnv(small_problem)
    env.reset()
    observation, *_ = env.step(np.array([0.5], dtype=np.float32))
    assert observation[-1] == pytest.approx(0.75)


def test_equal_actions_bring_equal_episodes(small_problem) -> None:
    actions = np.random.default_rng(3).uniform(-1, 1, (len(small_problem.sites), 1)).astype(np.float32)
    first = play(RankSelectionEnv(small_problem, reward), actions, seed=1)
    second = play(RankSelectionEnv(small_problem, reward), actions, seed=2)
    assert np.array_equal(first[0], second[0])
    assert first[1:] == second[1:]


def test_several_environments_play_the_episodes_of_one(small_problem) -> None:
    several = gymnasium.make_vec(ENVIRONMENT_ID, num_envs=3, problem=small_problem, reward=reward)
    env = RankSelectionEnv(small_problem, reward)
    actions = np.random.default_rng(3).uniform(-1, 1, (env.layers, 3, 1)).astype(np.float32)
    trails, values, *_ = play(several, actions)
    for number in range(3):
        trail, value, *_ = play(env, actions[:, number])
        np.testing.assert_array_equal(trails[:, number], trail)
        assert values[number] == value


def test_a_rollout_is_what_reset_and_step_return(small_problem) -> None:
    env = RankSelectionEnv(small_problem, reward, features=("last_reward",))
    actions = np.random.default_rng(3).uniform(-2, 2, env.layers)
    episode = rollout(env, repeat(actions), last_reward=0.75)
    trail, value, *_, info = play(env, actions[:, None], options={"last_reward": 0.75})
    np.testing.assert_array_equal(episode.observations, trail)
    assert (episode.reward, episode.choices) == (value, info["choices"])
    assert episode.actions[:, 0] == pytest.approx(actions.clip(-1, 1))


def test_stepping_beyond_the_end_says_to_reset(small_problem) -> None:
    env = RankSelectionEnv(small_problem, reward)
    with pytest.raises(gymnasium.error.ResetNeeded, match="reset"):
        env.step(np.zeros(1))


@pytest.mark.parametrize("action", [np.zeros(3), np.array([np.nan]), np.zeros((1, 1))])
def test_an_action_of_another_shape_or_no_number_is_refused(small_problem, action) -> None:
    env = RankSelectionEnv(small_problem, reward)
    env.reset()
    with pytest.raises(ValueError, match="finite"):
        env.step(action)


def test_options_that_contradict_are_refused(small_problem, small_network) -> None:
    with pytest.raises(ConfigError, match="importance, rank"):
        RankSelectionEnv(small_problem, action="ranks")
    with pytest.raises(ConfigError, match="curve"):
        RankSelectionEnv(small_problem, features=("errors",))
    free = SearchProblem.from_model(small_network, small_problem.sites, (1, 8, 8))
    with pytest.raises(ConfigError, match="budget"):
        RankSelectionEnv(free, action="importance")


@pytest.mark.parametrize("given", [{}, {"problem": "digits"}, {"problem": []}])
@pytest.mark.parametrize("make", [gymnasium.make, gymnasium.make_vec])
def test_making_one_without_a_problem_says_what_is_needed(make, given) -> None:
    with pytest.raises(ConfigError, match=r"needs problem=.*rankrl\.make_task\(.*\)\.env\(\)"):
        make(ENVIRONMENT_ID, **given)


@pytest.fixture
def three_tasks(small_network, small_library, small_problem) -> dict[str, list]:
    """Two networks, of which one has two budgets, each with a reward of its own."""
    problems = [
        small_problem,
        SearchProblem.from_model(
            small_network, small_problem.sites, (1, 8, 8), macs=0.4, library=small_library
        ),
        SearchProblem.from_model(small_network, small_problem.sites[1:], (1, 8, 8), params=0.8),
    ]
    return {"problem": problems, "reward": [lambda _, number=number: float(number) for number in range(3)]}


@pytest.mark.parametrize("options", MAPS.values(), ids=MAPS)
def test_several_tasks_pass_both_checkers(three_tasks, options) -> None:
    env = gymnasium.make(
        ENVIRONMENT_ID, **three_tasks, features=("descriptors", "budget_left", "last_reward"), **options
    )
    check_env(env.unwrapped, skip_render_check=True)
    check_env_for_sb3(env.unwrapped)


def test_each_episode_is_of_one_task_that_is_drawn_or_named(three_tasks) -> None:
    env, again = (RankSelectionEnv(**three_tasks) for _ in range(2))
    seeds = [5, *[None] * 30]
    drawn, repeated = ([each.reset(seed=seed)[1]["task"] for seed in seeds] for each in (env, again))
    assert drawn == repeated
    assert set(drawn) == {0, 1, 2}
    for number, problem in enumerate(three_tasks["problem"]):
        alone = RankSelectionEnv(problem, three_tasks["reward"][number], features=("budget",))
        actions = np.full((alone.layers, 1), 0.3, dtype=np.float32)
        trail, value, *_, info = play(env, actions, options={"task": number})
        expected, _, *_, known = play(alone, actions)
        np.testing.assert_array_equal(trail, expected)
        assert (info["task"], info["choices"], value) == (number, known["choices"], number)


def test_observations_of_several_tasks_hold_what_may_be_kept(three_tasks) -> None:
    env = RankSelectionEnv(**three_tasks)
    shown = [env.reset(options={"task": number})[0][8:12].tolist() for number in range(3)]
    assert shown == pytest.approx(np.array([[0.5, 1, 1, 1], [1, 0.4, 1, 1], [0.8, 1, 1, 1]]))


@pytest.mark.parametrize("task", [3, -1, "first"])
def test_a_task_that_is_not_there_is_refused(three_tasks, task) -> None:
    with pytest.raises(ConfigError, match="none of the 3 problems"):
        RankSelectionEnv(**three_tasks).reset(options={"task": task})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": ("plan",)}, "leave out identity and plan"),
        ({"features": ("identity",)}, "leave out identity and plan"),
        ({"reward": reward}, "3 problems and 1 reward"),
    ],
)
def test_several_tasks_that_do_not_go_together_are_refused(three_tasks, change, message) -> None:
    with pytest.raises(ConfigError, match=message):
        RankSelectionEnv(**{**three_tasks, **change})


def test_the_spec_is_json_unless_it_holds_a_problem(small_problem) -> None:
    env = gymnasium.make(ENVIRONMENT_ID, problem=small_problem, reward=reward)
    several = gymnasium.make_vec(ENVIRONMENT_ID, num_envs=2, problem=small_problem, reward=reward)
    for each in (env, env.unwrapped, several):
        with pytest.raises(ConfigError, match="a network and its fits, which JSON cannot"):
            each.spec.to_json()
    spec = EnvSpec.from_json(gymnasium.spec(ENVIRONMENT_ID).to_json())
    assert gymnasium.make(spec, problem=small_problem).unwrapped.layers == len(small_problem.sites)


def test_without_a_budget_rank_actions_reach_the_dense_network(small_problem, small_network) -> None:
    free = SearchProblem.from_model(small_network, small_problem.sites, (1, 8, 8))
    env = RankSelectionEnv(free, reward)
    *_, info = play(env, np.ones((env.layers, 1)))
    assert info["choices"] == tuple(site.dense for site in free.sites)
    assert free.cost(info["choices"]) == Cost(free.params, free.macs, 4 * free.params)
    *_, info = play(env, -np.ones((env.layers, 1)))
    assert free.cost(info["choices"]).params < free.params / 2


def test_more_importance_never_costs_the_layer_parameters(small_problem) -> None:
    env = RankSelectionEnv(small_problem)
    for layer, site in enumerate(small_problem.sites):
        sizes = []
        for value in (-1.0, 0.0, 1.0):
            actions = np.zeros((env.layers, 1))
            actions[layer] = value
            *_, info = play(env, actions)
            sizes.append(site.params[info["choices"][layer]])
        assert sizes[0] <= sizes[2]


def test_a_ratio_is_the_share_of_the_layers_cost_up_to_the_nearest_candidate(small_problem) -> None:
    ratios = create_action_map(dataclasses.replace(small_problem, budget=None), "ratio")
    chosen = np.array(
        [ratios.choices_of(np.full(len(small_problem.sites), a)) for a in (-1, -0.5, 0, 0.5, 1)]
    )
    assert not np.diff(chosen, axis=0).min() < 0
    for site, choices in zip(small_problem.sites, chosen.T, strict=True):
        cost = site.cost("params").astype(float)
        assert (cost[choices[0]], choices[-1]) == (cost.min(), site.dense)
        middle = (cost.min() + cost[-1]) / 2
        assert abs(cost[choices[2]] - middle) == abs(cost - middle).min()


def test_actions_that_count_layers_alone_do_not_know_borders(small_problem) -> None:
    budget = dataclasses.replace(small_problem.budget, borders=(1.0,) * (len(small_problem.sites) - 1))
    counted = dataclasses.replace(small_problem, budget=budget)
    with pytest.raises(ConfigError, match=r"between integers and floating point takes of budget\.latency"):
        create_action_map(counted, "rank")
    assert isinstance(create_action_map(counted), ImportanceMap)


def test_action_zero_is_greedys_plan_among_several_formats_too(small_network, library_of) -> None:
    library = library_of("cp", "tucker")
    several = SearchProblem.from_model(
        small_network, library.all_candidates(limit=6), (1, 8, 8), params=0.55, library=library
    )
    for action in ("importance", "rank"):
        env = RankSelectionEnv(several, reward, action=action)
        *_, info = play(env, np.zeros((env.layers, 1)))
        assert info["choices"] == tuple(several.preset)


@pytest.mark.parametrize("options", MAPS.values(), ids=MAPS)
@given(seed=st.integers(0, 1000))
def test_known_losses_are_those_of_the_plans(small_problem, options, seed) -> None:
    chosen = create_action_map(small_problem, options.get("action"))
    actions = np.random.default_rng(seed).uniform(-1, 1, (3, len(small_problem.sites)))
    actions[0] = 0
    for episode, roots in zip(actions, chosen.loss_roots(actions), strict=True):
        choices = chosen.choices_of(episode)
        wanted = np.sqrt([site.losses[j] for site, j in zip(small_problem.sites, choices, strict=True)])
        if options:
            np.testing.assert_array_equal(roots, wanted)
        else:  # the plan spends what the relaxation leaves over, which lowers the weighed loss
            weights = np.exp(IMPORTANCE_SCALE * (episode - episode.mean()))
            assert weights @ wanted**2 <= weights @ roots**2 * (1 + 1e-9)


SHAPE = (1, 8, 8)


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
