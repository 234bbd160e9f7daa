"""Imagined episodes are rewarded by the model of the scored ones, and the agent learns from both."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rankrl.errors import ConfigError
from rankrl.plan_search.agents import ALGORITHMS, AgentOptions, PolicyAgent
from rankrl.plan_search.agents.imagination import Imagination, filled
from rankrl.plan_search.envs.actions import create_action_map
from rankrl.plan_search.selectors import create_selector

OPTIONS = {"warmup_episodes": 3, "updates_per_episode": 2, "batch_size": 8, "imagined_episodes": 6}


def reward(actions: np.ndarray) -> float:
    return 0.5 + 0.1 * float(actions[0, 0] - actions[-1, 0])


def taught(agent: PolicyAgent, episodes: int, seed: int = 0) -> PolicyAgent:
    noise = 0.4 * np.random.default_rng(seed).standard_normal((episodes, *agent.shape))
    for actions in agent.act(noise):
        agent.learn(actions, reward(actions))
    return agent


def imagined(agent: PolicyAgent, count: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(1)
    layers, components = agent.shape
    noise = generator.standard_normal((count, layers, components))
    share = generator.random((count, layers + 1, components))
    assert agent._imagination is not None
    return agent._imagination.imagine(noise, share, agent.act)


def test_their_rewards_are_what_the_model_expects(small_problem) -> None:
    agent = taught(PolicyAgent(small_problem, "ddpg", AgentOptions(**OPTIONS), seed=0, episodes=40), 30)
    imagination = agent._imagination
    assert imagination is not None
    assert imagination.ready
    actions, rewards = imagined(agent, 8)
    assert np.abs(actions).max() <= 1
    expected, _ = imagination.model.predict(agent.env.map.loss_roots(actions))
    np.testing.assert_allclose(rewards, expected)
    assert len(np.unique(actions.reshape(8, -1), axis=0)) == 8


def test_a_filled_buffer_returns_whole_episodes(small_problem) -> None:
    agent = PolicyAgent(small_problem, "ddpg", AgentOptions(**OPTIONS), seed=0, episodes=5)
    layers, size = agent.shape[0], agent.env.encoder.size
    generator = np.random.default_rng(0)
    observations = generator.random((3, layers + 1, size)).astype(np.float32)
    actions = generator.uniform(-1, 1, (3, *agent.shape)).astype(np.float32)
    rewards = np.zeros((3, layers))
    rewards[:, -1] = [1, 2, 3]
    buffer = filled(agent._buffer, observations, actions, rewards)
    drawn = buffer._get_samples(np.arange(3 * layers))
    assert drawn.rewards.numpy().reshape(3, layers).tolist() == [[each] * layers for each in (1, 2, 3)]
    assert drawn.dones.all()
    np.testing.assert_array_equal(drawn.observations.numpy().reshape(3, layers, size), observations[:, :-1])
    np.testing.assert_array_equal(drawn.actions.numpy().reshape(actions.shape), actions)


@pytest.mark.parametrize(
    "name", ["ddpg", *(pytest.param(name, marks=pytest.mark.slow) for name in ALGORITHMS if name != "ddpg")]
)
def test_the_played_episodes_alone_are_kept(small_problem, name) -> None:
    agent = taught(PolicyAgent(small_problem, name, AgentOptions(**OPTIONS), seed=0, episodes=20), 15)
    assert agent._buffer.size() == 15 * agent.shape[0]
    without = PolicyAgent(
        small_problem, name, AgentOptions(**{**OPTIONS, "imagined_episodes": 0}), seed=0, episodes=20
    )
    assert without._imagination is None
    one, other = (list(each.model.actor.parameters()) for each in (agent, taught(without, 15)))
    assert not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", ["ddpg", "sac", pytest.param("td3", marks=pytest.mark.slow)])
def test_a_search_goes_on_exactly(small_problem, name) -> None:
    def run(selector, steps: int) -> list:
        plans = []
        for _ in range(steps):
            proposals = selector.propose()
            plans += proposals
            selector.observe(proposals, [float(np.tanh(sum(each.choices) / 20)) for each in proposals])
        return plans

    whole, first, second = (
        create_selector(name, small_problem, seed=0, episodes=16, shaping=0.1, **OPTIONS) for _ in range(3)
    )
    plans = run(first, 11)
    second.restore(first.state())
    assert plans + run(second, 2) == run(whole, 13)


@pytest.mark.slow
def test_it_comes_closer_to_the_plan_that_is_wanted(small_problem) -> None:
    """The reward is the likeness to a plan far from greedy's, by what the layers lose."""
    wanted = create_action_map(small_problem).choices_of(np.array([[1.0], [-1.0], [1.0], [-1.0]]))
    options = {**OPTIONS, "warmup_episodes": 12, "warmup_noise": 0.3, "updates_per_episode": 20}
    options["imagined_episodes"] = 32
    selector = create_selector("ddpg", small_problem, seed=0, episodes=50, **options)
    rewards = []
    for _ in range(50):
        proposals = selector.propose()
        pairs = zip(small_problem.sites, proposals[0].choices, wanted, strict=True)
        rewards.append(-float(sum(abs(s.losses[j] ** 0.5 - s.losses[k] ** 0.5) for s, j, k in pairs)))
        selector.observe(proposals, rewards[-1:])
    assert np.mean(rewards[-10:]) > np.mean(rewards[:12])
    assert max(rewards[12:]) > max(rewards[:12])


@pytest.mark.parametrize("option", ["imagined_episodes", "shaping"])
def test_negative_numbers_are_refused(option) -> None:
    with pytest.raises(ConfigError, match=f"selector.{option} must be at least 0"):
        AgentOptions(**{option: -1})
    with pytest.raises(ConfigError, match="imagined_noise must be positive"):
        AgentOptions(imagined_noise=0.0)


def test_nothing_is_imagined_before_enough_is_known(small_problem) -> None:
    agent = PolicyAgent(small_problem, "ddpg", AgentOptions(**OPTIONS), seed=0, episodes=20)
    assert isinstance(agent._imagination, Imagination)
    assert not taught(agent, 9)._imagination.ready
