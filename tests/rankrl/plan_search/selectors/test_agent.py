"""The agents are stable-baselines3's: they learn, from whole episodes, and leave their surroundings alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from stable_baselines3 import DDPG, SAC, TD3

from rankrl.errors import ConfigError
from rankrl.plan_search.agents import ALGORITHMS, AgentOptions, PolicyAgent
from rankrl.plan_search.agents.policy_agent import one_thread, seeded
from rankrl.plan_search.envs.actions import create_action_map
from rankrl.plan_search.selectors import create_selector


def played(agent: PolicyAgent, episodes: int, scale: float = 0.3) -> np.ndarray:
    """Noisy passes of the policy, (episodes, layers)."""
    noise = scale * np.random.default_rng(0).standard_normal((episodes, agent.env.layers))
    return agent.act(noise)


def test_the_algorithms_are_stable_baselines3s(small_problem) -> None:
    assert ALGORITHMS == {"ddpg": DDPG, "td3": TD3, "sac": SAC}
    for name, cls in ALGORITHMS.items():
        assert type(PolicyAgent(small_problem, name, AgentOptions(), seed=0, episodes=5).model) is cls


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_transitions_target_is_its_episodes_reward_less_the_first(small_problem, name) -> None:
    """Wherever in an episode a transition is drawn, nothing is discounted and nothing is bootstrapped."""
    options = AgentOptions(batch_size=10**6)  # no gradient steps
    agent = PolicyAgent(small_problem, name, options, seed=0, episodes=20)
    rewards = [0.5, 0.25, 0.875, 0.5]
    for actions, reward in zip(played(agent, len(rewards)), rewards, strict=True):
        agent.learn(actions, reward)
    np.random.seed(0)
    drawn = agent._buffer.sample(400)
    assert set(drawn.rewards.flatten().tolist()) == {reward - rewards[0] for reward in rewards}
    assert drawn.dones.all()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_rate_is_that_of_actor_and_critics(small_problem, name) -> None:
    options = AgentOptions(learning_rate=0.02, batch_size=8)
    agent = PolicyAgent(small_problem, name, options, seed=0, episodes=5)
    before = [parameter.clone() for parameter in agent.model.actor.parameters()]
    for actions in played(agent, 4):
        agent.learn(actions, 0.5 + float(actions[0]))
    for part in (agent.model.actor, agent.model.critic):
        assert {group["lr"] for group in part.optimizer.param_groups} == {0.02}
    pairs = zip(before, agent.model.actor.parameters(), strict=True)
    assert any(not torch.equal(old, new) for old, new in pairs)


@pytest.mark.parametrize(
    "name", ["ddpg", *(pytest.param(name, marks=pytest.mark.slow) for name in ALGORITHMS if name != "ddpg")]
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


@pytest.mark.parametrize("name", ["ddpg", "td3"])
def test_without_noise_the_policy_plays_the_same_plan(small_problem, name) -> None:
    agent = PolicyAgent(small_problem, name, AgentOptions(), seed=0, episodes=5)
    # One after the other: a matrix product may round the rows of a batch in different orders.
    (first,), (second,) = (agent.act(np.zeros((1, agent.env.layers))) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    moved = agent.act(np.full((1, agent.env.layers), 0.01))[0]
    np.testing.assert_allclose(moved[0], first[0] + 0.01, rtol=1e-6)


def test_sac_draws_by_itself(small_problem) -> None:
    agent = PolicyAgent(small_problem, "sac", AgentOptions(), seed=0, episodes=5)
    first, second = agent.act(np.zeros((2, agent.env.layers)))
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_seed_decides_and_another_differs(small_problem, name) -> None:
    def actions(seed: int) -> np.ndarray:
        agent = PolicyAgent(small_problem, name, AgentOptions(batch_size=8), seed=seed, episodes=5)
        for each in played(agent, 4):
            agent.learn(each, float(each.mean()))
        return played(agent, 3)

    np.testing.assert_array_equal(actions(1), actions(1))
    assert not np.array_equal(actions(1), actions(2))


def test_noise_decays_from_the_first_to_the_last_episode() -> None:
    options = AgentOptions(warmup_episodes=2, noise=0.4)
    scales = [options.noise_at(episode, 12) for episode in range(12)]
    assert scales[:3] == pytest.approx([0.4] * 3)
    assert scales[11] == pytest.approx(0.05)
    assert scales[2:] == sorted(scales[2:], reverse=True)
    assert len(set(scales[2:])) == 10
    assert options.noise_at(40, 12) == pytest.approx(0.05)
    assert AgentOptions(noise=0.0).noise_at(3, 12) == 0.0
    assert options.noise_at(3, 1) == pytest.approx(0.05)  # fewer episodes than the warm-up


@pytest.mark.parametrize("feature", ["budget_left", "last_reward", "curve"])
def test_what_the_policy_sees_is_what_the_environment_shows(small_problem, feature) -> None:
    options = AgentOptions(action="rank", features=(feature, "plan"))
    agent = PolicyAgent(small_problem, "ddpg", options, seed=0, episodes=5)
    first, second = played(agent, 2)
    agent.learn(first, 0.5)
    observation, _ = agent.env.reset(options={"last_reward": 0.5})
    for layer, action in enumerate(second):
        seen = agent._observe(layer, second[None])[0]
        np.testing.assert_array_equal(seen, observation)
        observation, *_ = agent.env.step(np.array([action]))


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
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_an_unknown_algorithm_is_refused(small_problem) -> None:
    with pytest.raises(ConfigError, match="there is no algorithm 'ppo'; choose from ddpg, td3, sac"):
        PolicyAgent(small_problem, "ppo", AgentOptions(), seed=0, episodes=3)


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
