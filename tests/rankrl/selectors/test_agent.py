"""The agent learns, its parts compute what stable-baselines3's do, and it leaves its surroundings alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from rankrl.agents.algorithms import create_algorithm
from rankrl.agents.buffer import EpisodeBuffer
from rankrl.agents.critics import CriticEnsemble
from stable_baselines3.common.policies import ContinuousCritic
from stable_baselines3.common.torch_layers import FlattenExtractor
from torch import nn

from rankrl.agents import ALGORITHMS, AgentOptions, RankAgent
from rankrl.agents.randomness import RandomState, one_thread
from rankrl.envs import RankSelectionEnv
from rankrl.errors import ConfigError

OBSERVATIONS = spaces.Box(0.0, 1.0, (7,), dtype=np.float32)
ACTIONS = spaces.Box(-1.0, 1.0, (2,), dtype=np.float32)


def critic(cls: type[ContinuousCritic], n_critics: int = 3) -> ContinuousCritic:
    return cls(OBSERVATIONS, ACTIONS, [16, 8], FlattenExtractor(OBSERVATIONS), 7, n_critics=n_critics)


def test_the_ensemble_computes_what_separate_critics_do() -> None:
    ensemble, separate = critic(CriticEnsemble), critic(ContinuousCritic)
    with torch.no_grad():
        for member, network in enumerate(separate.q_networks):
            linears = [module for module in network if isinstance(module, nn.Linear)]
            for layer, linear in enumerate(linears):
                linear.weight.copy_(ensemble.weights[layer][member].T)
                linear.bias.copy_(ensemble.biases[layer][member, 0])
    observations, actions = torch.rand(5, 7), torch.rand(5, 2)
    expected = torch.cat(separate(observations, actions), dim=1)
    torch.testing.assert_close(torch.cat(ensemble(observations, actions), dim=1), expected)
    torch.testing.assert_close(ensemble.values(observations, actions).T, expected)
    torch.testing.assert_close(ensemble.q1_forward(observations, actions), expected[:, :1])


def filled_buffer(episodes: int = 6, layers: int = 4, size: int = 10) -> EpisodeBuffer:
    buffer = EpisodeBuffer(size * layers, OBSERVATIONS, ACTIONS, device="cpu")
    buffer.layers = layers
    generator = np.random.default_rng(0)
    for episode in range(episodes):
        observations = generator.random((layers + 1, 7), dtype=np.float32)
        observations[:-1, 0] = np.arange(layers) / 10
        buffer.add_episode(observations, generator.random((layers, 2), dtype=np.float32), float(episode))
    return buffer


@pytest.mark.parametrize("episodes", [6, 13])
def test_every_transition_has_its_episodes_reward_and_is_the_last(episodes) -> None:
    buffer = filled_buffer(episodes)
    held = min(episodes, 10) * 4
    assert buffer.size() == held
    assert buffer.dones[:held].all()
    rewards = buffer.rewards[:held].reshape(-1, 4)
    assert (rewards == rewards[:, :1]).all()
    assert set(rewards[:, 0]) == set(range(max(0, episodes - 10), episodes))


def test_drawn_rewards_are_standardised() -> None:
    buffer = filled_buffer()
    drawn = buffer.sample(4000).rewards
    assert abs(float(drawn.mean())) < 0.1
    assert float(drawn.std()) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0.25), (1.0, 1.0)])
def test_a_share_of_the_draw_is_of_last_layers(share, expected) -> None:
    buffer = filled_buffer()
    buffer.whole_share = share
    last = (buffer.sample(4000).observations[:, 0] - 0.3).abs() < 1e-6
    assert float(last.float().mean()) == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize("episodes", [6, 13])
def test_a_buffer_is_found_again_from_its_state(episodes) -> None:
    buffer, other = filled_buffer(episodes), filled_buffer(0)
    other.restore(buffer.state())
    for _ in range(2):
        np.random.seed(3)
        expected = buffer.sample(50)
        np.random.seed(3)
        found = other.sample(50)
        assert all(torch.equal(a, b) for a, b in zip(expected[:5], found[:5], strict=True))
        for each in (buffer, other):
            each.add_episode(np.zeros((5, 7)), np.zeros((4, 2)), 9.0)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_untrained_policy_is_near_the_preset(small_problem, name) -> None:
    env = RankSelectionEnv(small_problem)
    model = create_algorithm(name, env, AgentOptions(), buffer_size=64)
    observations = torch.rand(20, env.encoder.size)
    with torch.no_grad():
        actions = model.actor(observations, True) if name == "sac" else model.actor(observations)
    assert float(actions.abs().max()) < 0.1


@pytest.mark.parametrize("name", ALGORITHMS)
def test_actor_and_critic_have_their_own_rates(small_problem, name) -> None:
    options = AgentOptions(actor_rate=0.02, critic_rate=0.03, batch_size=8)
    agent = RankAgent(small_problem, name, options, seed=0, episodes=5)
    for _ in range(4):
        agent.learn([agent.play()], [0.5])
    assert {group["lr"] for group in agent.model.actor.optimizer.param_groups} == {0.02}
    assert {group["lr"] for group in agent.model.critic.optimizer.param_groups} == {0.03}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_learns_which_layers_matter(small_problem, name) -> None:
    """The reward wants the first layer important and the last unimportant; greedy's plan gets 0."""
    options = AgentOptions(
        warmup_episodes=15,
        actor_rate=1e-3,
        critic_rate=3e-3,
        candidates=32,
        final_noise=0.1,
        updates_per_episode=20,
    )
    agent = RankAgent(small_problem, name, options, seed=0, episodes=50)
    rewards = []
    for _ in range(50):
        episode = agent.play()
        rewards.append(float(episode.actions[0, 0] - episode.actions[-1, 0]))
        agent.learn([episode], rewards[-1:])
    assert np.mean(rewards[-10:]) > np.mean(rewards[:15]) + 0.5
    assert max(rewards[-10:]) > 0.9


def test_it_plays_a_plan_twice_only_when_it_finds_no_other(small_problem) -> None:
    agent = RankAgent(
        small_problem, "ddpg", AgentOptions(action="rank", updates_per_episode=0), seed=0, episodes=25
    )
    seen = []
    for _ in range(25):
        episode = agent.play()
        agent.learn([episode], [0.5])
        seen.append(small_problem.ranks(episode.plan))
    assert len(set(seen)) >= 20


def test_noise_decays_from_the_first_to_the_last_episode(small_problem) -> None:
    options = AgentOptions(warmup_episodes=2, noise=0.4, final_noise=0.1, updates_per_episode=0)
    agent = RankAgent(small_problem, "ddpg", options, seed=0, episodes=12)
    scales = []
    for _ in range(12):
        scales.append(agent._noise_scale())
        agent.play()
    assert scales[2] == pytest.approx(0.4)
    assert scales[11] == pytest.approx(0.1)
    assert scales[2:] == sorted(scales[2:], reverse=True)


@pytest.mark.parametrize("per_bond", [False, True])
@pytest.mark.parametrize("feature", ["budget_left", "last_reward", "curve"])
def test_imagined_observations_are_the_environments(small_problem, feature, per_bond) -> None:
    options = AgentOptions(
        action="rank", per_bond=per_bond, features=(feature, "plan"), noise=0.0, final_noise=0.0
    )
    agent = RankAgent(small_problem, "ddpg", options, seed=0, episodes=5)
    agent.learn([agent.play()], [0.5])
    episode = agent.play()
    for layer in range(agent.env.layers):
        imagined = agent._observe(layer, episode.actions[None])
        np.testing.assert_array_equal(imagined[0], episode.observations[layer])


def test_random_states_are_apart() -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    undisturbed = torch.rand(1), np.random.random()
    torch.manual_seed(5)
    np.random.seed(5)
    state = RandomState.seeded(0)
    with state.in_use():
        first = torch.rand(1), np.random.normal()  # normal() keeps a second draw in the state
    assert (torch.rand(1), np.random.random()) == undisturbed
    copy = RandomState(state.torch_state.clone(), state.numpy_state.copy())
    with state.in_use():
        second = torch.rand(1), np.random.normal()
    with copy.in_use():
        again = torch.rand(1), np.random.normal()
    assert again == second != first


def test_one_thread_is_given_back() -> None:
    before = torch.get_num_threads()
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_an_unknown_algorithm_is_refused(small_problem) -> None:
    with pytest.raises(ConfigError, match="ddpg, sac, td3"):
        RankAgent(small_problem, "ppo", AgentOptions(), seed=0, episodes=3)
