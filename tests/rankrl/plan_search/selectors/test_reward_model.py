"""The model of rewards: Gaussian-process regression on what layers lose, checked against scikit-learn's."""

import numpy as np
import pytest
from scipy.stats import spearmanr
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct, WhiteKernel

from rankrl.plan_search.selectors.bayes import RewardModel

LAYERS = 8


def some_losses(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).random((count, LAYERS))


def reward_of(losses: np.ndarray) -> np.ndarray:
    weights = np.linspace(0, 1, LAYERS)
    return 0.9 - 0.1 * (losses * weights).sum(1) - 0.05 * losses[:, 0] * losses[:, 1]


def taught(count: int) -> tuple[RewardModel, np.ndarray]:
    model, losses = RewardModel(), some_losses(count, seed=0)
    for row, reward in zip(losses, reward_of(losses).tolist(), strict=True):
        model.add(row, reward)
    return model, losses


def test_it_predicts_what_scikit_learns_does() -> None:
    count = 7  # too few for a search of the kernel
    model, losses = taught(count)
    wanted = some_losses(20, seed=1)
    mean, deviation = model.predict(wanted)
    rewards = reward_of(losses)
    known, unknown = ((x - losses.mean(0)) / losses.std(0) for x in (losses, wanted))
    kernel = (
        ConstantKernel(1.0) * RBF(2 * LAYERS**0.5)
        + ConstantKernel(0.3 / LAYERS) * DotProduct(0.0, "fixed")
        + WhiteKernel(0.03)
    )
    oracle = GaussianProcessRegressor(kernel, alpha=1e-8, optimizer=None)
    oracle.fit(known, (rewards - rewards.mean()) / rewards.std())
    expected, expected_deviation = oracle.predict(unknown, return_std=True)
    np.testing.assert_allclose(mean, expected * rewards.std() + rewards.mean(), rtol=1e-9)
    np.testing.assert_allclose(deviation, expected_deviation * rewards.std(), rtol=1e-9)


def test_some_tens_of_plans_are_enough_to_rank_others() -> None:
    model, _ = taught(40)
    assert len(model) == 40
    wanted = some_losses(100, seed=1)
    assert spearmanr(model.predict(wanted)[0], reward_of(wanted))[0] > 0.95


def test_what_is_known_is_less_uncertain() -> None:
    model, losses = taught(40)
    far = 3 * some_losses(10, seed=2)
    assert model.predict(losses)[1].max() < model.predict(far)[1].min()


def test_layers_that_never_changed_do_no_harm() -> None:
    model = RewardModel()
    losses = some_losses(30, seed=0)
    losses[:, 3] = 0.5
    for row, reward in zip(losses, reward_of(losses).tolist(), strict=True):
        model.add(row, reward)
    mean, deviation = model.predict(some_losses(10, seed=1))
    assert np.isfinite(mean).all()
    assert np.isfinite(deviation).all()


def test_without_plans_everything_is_alike() -> None:
    mean, deviation = RewardModel().predict(some_losses(3, seed=0))
    assert mean.tolist() == [0, 0, 0]
    assert deviation.tolist() == [1, 1, 1]


def test_equal_rewards_are_no_division_by_zero() -> None:
    model = RewardModel()
    for row in some_losses(12, seed=0):
        model.add(row, 0.5)
    mean, deviation = model.predict(some_losses(3, seed=1))
    assert mean == pytest.approx([0.5, 0.5, 0.5])
    assert np.isfinite(deviation).all()


def test_it_depends_on_the_plans_and_not_on_when_it_was_asked() -> None:
    wanted, (asked, losses), (model, _) = some_losses(5, seed=1), taught(25), taught(25)
    for row, reward in zip(losses, (reward_of(losses) + 0.01).tolist(), strict=True):
        asked.predict(wanted)  # searches the kernel at times
        for each in (asked, model):
            each.add(row, reward)
    for expected, found in zip(asked.predict(wanted), model.predict(wanted), strict=True):
        np.testing.assert_array_equal(expected, found)


def test_only_the_worst_plans_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankrl.plan_search.selectors.bayes._CAPACITY", 10)
    model, losses = taught(15)
    assert sorted(model._rewards) == sorted(reward_of(losses).tolist())[5:]
