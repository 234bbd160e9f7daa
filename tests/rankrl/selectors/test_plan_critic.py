"""The critic of whole plans: Gaussian-process regression, checked against scikit-learn's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from rankrl.agents.plan_critic import PlanCritic, _Kernel
from scipy.stats import spearmanr
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct

from rankrl.envs.actions import create_action_map

LAYERS = 8


def some_losses(count: int, seed: int) -> torch.Tensor:
    return torch.rand(count, LAYERS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reward_of(losses: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(0, 1, LAYERS, dtype=torch.float64)
    return 0.9 - 0.1 * (losses * weights).sum(1) - 0.05 * losses[:, 0] * losses[:, 1]


def taught(count: int) -> tuple[PlanCritic, torch.Tensor]:
    critic, losses = PlanCritic(), some_losses(count, seed=0)
    for row, reward in zip(losses, reward_of(losses).tolist(), strict=True):
        critic.add(row, reward)
    return critic, losses


def test_it_predicts_what_scikit_learns_does() -> None:
    count = 7  # too few for a search of the kernel
    critic, losses = taught(count)
    wanted = some_losses(20, seed=1)
    mean, deviation = critic.values(wanted)
    rewards = reward_of(losses)
    middle, spread = rewards.mean(), rewards.std(correction=0)
    scale = losses.std(0, correction=0)
    known, unknown = ((x - losses.mean(0)) / scale for x in (losses, wanted))
    kernel = _Kernel()
    oracle = GaussianProcessRegressor(
        RBF(kernel.length * LAYERS**0.5) + ConstantKernel(kernel.linear / LAYERS) * DotProduct(0.0),
        alpha=kernel.noise,
        optimizer=None,
    ).fit(known.numpy(), ((rewards - middle) / spread).numpy())
    expected, expected_deviation = oracle.predict(unknown.numpy(), return_std=True)
    np.testing.assert_allclose(mean, expected * float(spread) + float(middle), rtol=1e-6)
    np.testing.assert_allclose(deviation, expected_deviation * float(spread), rtol=1e-4)


def test_some_tens_of_plans_are_enough_to_rank_others() -> None:
    critic, _ = taught(40)
    wanted = some_losses(100, seed=1)
    assert spearmanr(critic.values(wanted)[0], reward_of(wanted))[0] > 0.95


def test_what_is_known_is_less_uncertain() -> None:
    critic, losses = taught(40)
    far = 3 * some_losses(10, seed=2)
    assert critic.values(losses)[1].max() < critic.values(far)[1].min()


def test_layers_that_never_changed_do_no_harm() -> None:
    critic = PlanCritic()
    losses = some_losses(30, seed=0)
    losses[:, 3] = 0.5
    for row, reward in zip(losses, reward_of(losses).tolist(), strict=True):
        critic.add(row, reward)
    mean, deviation = critic.values(some_losses(10, seed=1))
    assert torch.isfinite(mean).all()
    assert torch.isfinite(deviation).all()


def test_without_plans_everything_is_alike() -> None:
    mean, deviation = PlanCritic().values(some_losses(3, seed=0))
    assert mean.tolist() == [0, 0, 0]
    assert deviation.tolist() == [1, 1, 1]


def test_equal_rewards_are_no_division_by_zero() -> None:
    critic = PlanCritic()
    for row in some_losses(12, seed=0):
        critic.add(row, 0.5)
    assert torch.isfinite(critic.values(some_losses(3, seed=1))[0]).all()


def test_it_is_found_again_from_its_state() -> None:
    critic, _ = taught(25)
    wanted = some_losses(5, seed=1)
    critic.values(wanted)  # searches the kernel
    again = PlanCritic()
    again.restore(critic.state())
    for reward in (0.1, 0.2):
        for one in (critic, again):
            one.add(wanted[0], reward)
        for before, after in zip(critic.values(wanted), again.values(wanted), strict=True):
            assert torch.equal(before, after)


@pytest.mark.parametrize("action", ["importance", "rank"])
def test_imagined_losses_are_those_of_the_plans(small_problem, action) -> None:
    actions = np.random.default_rng(0).uniform(-1, 1, (20, len(small_problem.curves), 1)).astype(np.float32)
    actions[0] = 0
    chosen = create_action_map(small_problem, action)
    found = chosen.losses(actions)
    assert found is not None
    for episode, losses in zip(actions, found, strict=True):
        chosen.begin()
        for layer, each in enumerate(episode):
            chosen.take(layer, each)
        wanted = [
            float(np.sqrt(curve.losses)[[e.ranks for e in curve.entries].index(entry.ranks)])
            for curve, entry in zip(small_problem.curves, chosen.entries(), strict=True)
        ]
        if action == "rank":
            np.testing.assert_allclose(losses, wanted)
        else:  # the plan spends what the relaxation leaves over, which lowers losses
            assert np.all(np.array(wanted) <= losses + 1e-12)


def test_free_bonds_have_no_known_losses(small_problem) -> None:
    chosen = create_action_map(small_problem, per_bond=True)
    assert chosen.losses(np.zeros((1, len(small_problem.curves), chosen.components))) is None


def test_only_the_worst_plans_are_forgotten(monkeypatch) -> None:
    monkeypatch.setattr("rankrl.agents.plan_critic._CAPACITY", 10)
    critic, losses = taught(15)
    kept = critic.state()["rewards"]
    assert sorted(kept.tolist()) == sorted(reward_of(losses).tolist())[5:]
