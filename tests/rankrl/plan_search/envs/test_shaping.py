"""Shaping pays the same in every episode, so that no optimum moves, and says early what an action costs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankrl.plan_search.agents import AgentOptions, PolicyAgent
from rankrl.plan_search.envs.actions import create_action_map
from rankrl.plan_search.envs.shaping import payments, potentials


@pytest.mark.parametrize("action", ["importance", "rank"])
@given(seed=st.integers(0, 1000), extreme=st.booleans())
def test_payments_of_an_episode_telescope_to_the_same_sum(small_problem, action, seed, extreme) -> None:
    chosen = create_action_map(small_problem, action)
    actions = np.random.default_rng(seed).uniform(-1, 1, (3, len(small_problem.sites), 1))
    paid = payments(chosen, np.sign(actions) if extreme else actions)
    np.testing.assert_allclose(paid.sum(1), 1.0, rtol=1e-12)


def test_the_potential_is_what_the_plan_so_far_loses(small_problem) -> None:
    chosen = create_action_map(small_problem)
    actions = np.random.default_rng(0).uniform(-1, 1, (2, len(small_problem.sites), 1))
    found = potentials(chosen, actions)
    preset = (chosen.loss_roots(np.zeros_like(actions[:1])) ** 2).sum()
    for episode, states in zip(actions, found, strict=True):
        assert states[0] == -1
        assert states[-1] == 0
        for layer in range(len(episode)):
            so_far = episode.copy()
            so_far[layer:] = 0
            lost = (chosen.loss_roots(so_far[None]) ** 2).sum()
            assert states[layer] == pytest.approx(-lost / preset)


def test_action_zero_is_paid_nothing_before_the_end(small_problem) -> None:
    paid = payments(create_action_map(small_problem), np.zeros((1, len(small_problem.sites), 1)))
    assert not paid[0, :-1].any()


def test_agents_learn_the_reward_and_what_is_still_to_be_paid(small_problem) -> None:
    """A transition's target is its episode's reward less the first, and the payments from there on."""
    options = AgentOptions(batch_size=10**6, shaping=0.5)  # no gradient steps
    agent = PolicyAgent(small_problem, "ddpg", options, seed=0, episodes=5)
    actions = np.random.default_rng(0).uniform(-1, 1, (2, *agent.shape)).astype(np.float32)
    for episode, reward in zip(actions, (0.5, 0.75), strict=True):
        agent.learn(episode, reward)
    states = potentials(agent.env.map, actions)[:, :-1]
    wanted = np.array([[0.0], [0.25]]) - 0.5 * states
    drawn = agent._buffer._get_samples(np.arange(2 * agent.shape[0]))
    np.testing.assert_allclose(drawn.rewards.numpy().reshape(2, -1), wanted, rtol=1e-5)
