"""The agents are stable-baselines3's: they learn, from whole episodes, and leave their surroundings alone."""

import numpy as np
import pytest
import stable_baselines3
import torch

from rankrl.options.selectors import AgentOptions
from rankrl.plan_search.envs.actions import create_action_map
from rankrl.plan_search.run import run_search
from rankrl.plan_search.selectors import Proposal, create_selector
from rankrl.plan_search.selectors.reinforcement import ReinforcementSelector, noise_at, seeded
from rankrl.plan_search.space.problem import SearchProblem

AGENTS = ("ddpg", "td3", "sac")


def make(
    name: str, problem: SearchProblem, episodes: int = 20, seed: int = 0, **options
) -> ReinforcementSelector:
    """An agent whose second plan is its policy's."""
    selector = create_selector(name, problem, seed=seed, episodes=episodes, warmup_episodes=0, **options)
    assert isinstance(selector, ReinforcementSelector)
    return selector


def play(selector: ReinforcementSelector, rewards: list[float]) -> list[Proposal]:
    """Search as long as there are rewards."""
    played: list[Proposal] = []
    while len(played) < len(rewards):
        proposals = selector.propose()
        selector.observe(proposals, rewards[len(played) : len(played) + len(proposals)])
        played += proposals
    return played


@pytest.mark.parametrize("name", AGENTS)
def test_the_algorithms_are_stable_baselines3s(small_problem, name) -> None:
    assert type(make(name, small_problem).model) is getattr(stable_baselines3, name.upper())


@pytest.mark.parametrize("name", AGENTS)
def test_every_transitions_target_is_its_episodes_reward_less_the_first(small_problem, name) -> None:
    """Wherever in an episode a transition is drawn, nothing is discounted and nothing is bootstrapped."""
    selector = make(name, small_problem, batch_size=10**6)  # no gradient steps
    rewards = [0.5, 0.25, 0.875, 0.5]
    play(selector, rewards)
    np.random.seed(0)
    drawn = selector.model.replay_buffer.sample(400)
    assert set(drawn.rewards.flatten().tolist()) == {reward - rewards[0] for reward in rewards}
    assert drawn.dones.all()


@pytest.mark.parametrize("name", AGENTS)
def test_the_rate_is_that_of_actor_and_critics(small_problem, name) -> None:
    selector = make(name, small_problem, learning_rate=0.02, batch_size=8)
    before = [parameter.clone() for parameter in selector.model.actor.parameters()]
    play(selector, [0.5, 0.3, 0.7, 0.6])
    for part in (selector.model.actor, selector.model.critic):
        assert {group["lr"] for group in part.optimizer.param_groups} == {0.02}
    pairs = zip(before, selector.model.actor.parameters(), strict=True)
    assert any(not torch.equal(old, new) for old, new in pairs)


@pytest.mark.parametrize(
    "name", ["ddpg", *(pytest.param(name, marks=pytest.mark.slow) for name in AGENTS if name != "ddpg")]
)
def test_it_learns_which_layers_matter(small_problem, name) -> None:
    """The reward wants the first layer important and the last unimportant; greedy's plan gets 0."""
    options = {
        "features": ("identity", "plan"),
        "warmup_episodes": 20,
        "warmup_noise": 0.5,
        "learning_rate": 1e-3,
        "updates_per_episode": 10,
    }
    selector = create_selector(name, small_problem, seed=0, episodes=40, **options)
    rewards = []
    for _ in range(40):
        proposals = selector.propose()
        actions = proposals[0].actions
        rewards.append(float(actions[0] - actions[-1]))
        selector.observe(proposals, rewards[-1:])
    assert rewards[0] == 0
    assert np.mean(rewards[-10:]) > np.mean(rewards[:20]) + 0.5
    assert max(rewards[-10:]) > 0.9


@pytest.mark.parametrize("name", AGENTS)
def test_a_step_plays_several_episodes_each_with_its_own_draws(small_problem, name) -> None:
    selector = make(name, small_problem, plans_per_step=3, noise=0.1)
    (preset,) = play(selector, [0.5])
    assert set(preset.actions) == {0.0}
    played = selector.propose()
    assert len({proposal.actions for proposal in played}) == 3
    assert selector.propose() == played


@pytest.mark.parametrize("name", ["ddpg", "td3"])
def test_the_policy_acts_alone_without_noise(small_problem, name) -> None:
    selector = make(name, small_problem, noise=0.0)
    play(selector, [0.5])
    (proposal,) = selector.propose()
    observation, _ = selector.env.reset()
    for action in proposal.actions:
        wanted, _ = selector.model.predict(observation)
        assert wanted == action
        observation, *_ = selector.env.step(wanted)


@pytest.mark.parametrize("name", AGENTS)
def test_the_seed_decides_and_another_differs(small_problem, name) -> None:
    rewards = [0.5, 0.25, 0.875, 0.5, 0.5]
    first, again, other = (
        play(make(name, small_problem, seed=seed, batch_size=8), rewards) for seed in (1, 1, 2)
    )
    assert first == again
    assert first[-1].actions != other[-1].actions


@pytest.mark.parametrize("plans_per_step", [1, 3])
def test_the_account_holds_the_reward_that_the_agent_saw(
    small_problem, synthetic_evaluator, tmp_path, plans_per_step
) -> None:
    options = {"action": "rank", "features": ("last_reward",), "plans_per_step": plans_per_step}

    def run():
        selector = create_selector("ddpg", small_problem, seed=1, episodes=13, **options)
        how = {"episodes": 13, "folder": tmp_path, "resume": True}
        return run_search(small_problem, synthetic_evaluator, selector, **how)

    found = run()
    ends = [row for row in found.rows if row.ends_step and row.episode < found.best.episode]
    assert all(0 < row.reward < 1 for row in found.rows)
    expected = round(ends[-1].reward, 3) if ends else 0.0
    for row in found.account:
        assert row["observation"]["last_reward"] == pytest.approx(expected)
    assert run().account == found.account


def test_noise_decays_from_the_first_to_the_last_episode() -> None:
    options = AgentOptions(warmup_episodes=2, noise=0.4)
    scales = [noise_at(options, episode, 12) for episode in range(12)]
    assert scales[:3] == pytest.approx([0.4] * 3)
    assert scales[11] == pytest.approx(0.05)
    assert scales[2:] == sorted(scales[2:], reverse=True)
    assert len(set(scales[2:])) == 10
    assert noise_at(options, 40, 12) == pytest.approx(0.05)
    assert noise_at(AgentOptions(noise=0.0), 3, 12) == 0.0
    assert noise_at(options, 3, 1) == pytest.approx(0.05)  # fewer episodes than the warm-up
    constant = AgentOptions(warmup_episodes=2, noise=0.4, noise_decay=0.5)
    assert [noise_at(constant, episode, 12) for episode in (0, 2, 3, 5)] == [0.4, 0.4, 0.2, 0.05]


def test_shares_begin_in_the_warm_up_as_they_know_no_plan_of_greedys(small_problem) -> None:
    (first,) = create_selector("ddpg", small_problem, seed=0, episodes=9, action="ratio").propose()
    assert first.phase == "warm-up"


@pytest.mark.parametrize("feature", ["budget_left", "last_reward", "curve"])
def test_the_buffer_holds_what_the_environment_shows_whether_played_or_recorded(
    small_problem, feature
) -> None:
    options = {"action": "rank", "features": (feature, "plan"), "plans_per_step": 2, "batch_size": 10**6}
    rewards = [0.5, 0.25, 0.75]
    live, told = (make("ddpg", small_problem, **options) for _ in range(2))
    played = play(live, rewards)
    for step in (slice(0, 1), slice(1, 3)):
        recorded = [Proposal(each.choices, each.phase, each.actions) for each in played[step]]
        told.observe(recorded, rewards[step])
    for part in ("observations", "actions", "next_observations", "rewards", "dones"):
        buffers = [getattr(each.model.replay_buffer, part) for each in (live, told)]
        np.testing.assert_array_equal(*buffers)
    seen, env = live.model.replay_buffer.observations[:, 0], live.env
    for number, last_reward in (
        (1, 0.5),
        (2, 0.5),
    ):  # the step's first reward is not known to its second plan
        observation, _ = env.reset(options={"last_reward": last_reward})
        for layer, action in enumerate(played[number].actions):
            np.testing.assert_array_equal(seen[number * env.layers + layer], observation)
            observation, *_ = env.step(np.array([action]))


@pytest.mark.parametrize("name", AGENTS)
def test_updates_tell_losses_values_and_noise(small_problem, name) -> None:
    told = {}
    selectors = [
        create_selector(name, small_problem, episodes=6, warmup_episodes=3, batch_size=8) for _ in range(2)
    ]
    selectors[0].on_update = lambda episode, values: told.update({episode: dict(values)})
    rewards = [0.5, 0.25, 0.875, 0.5, 0.5, 0.75]
    assert play(selectors[0], rewards) == play(selectors[1], rewards)
    assert list(told) == [3, 4, 5, 6]
    assert all(list(each) == ["actor_loss", "critic_loss", "mean_q", "noise"] for each in told.values())
    assert np.isfinite([list(each.values()) for each in told.values()]).all()
    assert told[3]["noise"] == AgentOptions.warmup_noise
    if name != "sac":
        assert [told[number]["noise"] for number in (4, 6)] == pytest.approx([0.3, 0.05])


def test_seeded_draws_leave_the_global_generators_alone() -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    undisturbed = torch.rand(1), np.random.random()
    torch.manual_seed(5)
    np.random.seed(5)
    draws = []
    for seeds in ((0,), (0,), (0, 1)):
        with seeded(*seeds):
            draws.append((torch.rand(1), np.random.normal()))
    assert (torch.rand(1), np.random.random()) == undisturbed
    assert draws[0] == draws[1] != draws[2]


def test_one_thread_is_given_back() -> None:
    before = torch.get_num_threads()
    with seeded(0):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_bayes_plays_a_plan_twice_only_when_it_finds_no_other(small_problem) -> None:
    selector = create_selector("bayes", small_problem, seed=0, episodes=25, action="rank", candidates=16)
    seen = []
    for _ in range(25):
        proposals = selector.propose()
        selector.observe(proposals, [0.5])
        seen += [proposal.choices for proposal in proposals]
    assert len(set(seen)) >= 20


def test_bayes_comes_closer_to_the_plan_that_is_wanted(small_problem) -> None:
    """The reward is the likeness to a plan far from greedy's, by what the layers lose."""
    chosen = create_action_map(small_problem)
    wanted = chosen.choices_of(np.array([-1.0, -1.0, 1.0, 1.0]))

    def reward(choices) -> float:
        pairs = zip(small_problem.sites, choices, wanted, strict=True)
        return -float(sum(abs(np.sqrt(site.losses[j]) - np.sqrt(site.losses[k])) for site, j, k in pairs))

    selector = create_selector("bayes", small_problem, seed=0, episodes=30, warmup_episodes=8)
    rewards = []
    for _ in range(30):
        proposals = selector.propose()
        rewards += [reward(proposal.choices) for proposal in proposals]
        selector.observe(proposals, rewards[-len(proposals) :])
    assert max(rewards[8:]) > max(rewards[:8])
    assert np.mean(rewards[-10:]) > np.mean(rewards[:8])
