"""CMA-ES as the library has it: generations from greedy's plan."""

import numpy as np
import pytest

from rankrl.errors import ConfigError
from rankrl.plan_search.envs.actions import ImportanceMap
from rankrl.plan_search.selectors import check_selector, create_selector

cmaes = pytest.importorskip("cmaes")


def reward(choices) -> float:
    return float(np.tanh(sum(choices) / 20))


def test_its_plans_are_those_of_the_library(small_problem) -> None:
    layers = len(small_problem.sites)
    optimizer = cmaes.CMA(
        mean=np.zeros(layers), sigma=0.2, bounds=np.tile([-1.0, 1.0], (layers, 1)), population_size=4
    )
    importance = ImportanceMap(small_problem)
    selector = create_selector("cmaes", small_problem, seed=3, episodes=20, step=0.2, population=4)
    (first,) = selector.propose()
    assert first.choices == tuple(small_problem.preset)
    selector.observe([first], [0.5])
    for observed in (1, 5, 9):
        optimizer.reseed_rng(int(np.random.default_rng((3, observed)).integers(2**32)))
        generation = [optimizer.ask() for _ in range(4)]
        wanted = [importance.choices_of(each) for each in generation]
        proposals = selector.propose()
        assert [proposal.choices for proposal in proposals] == wanted
        rewards = [reward(each) for each in wanted]
        optimizer.tell([(each, -value) for each, value in zip(generation, rewards, strict=True)])
        selector.observe(proposals, rewards)


def test_it_comes_closer_to_what_is_wanted(small_problem) -> None:
    importance = ImportanceMap(small_problem)
    losses = [site.losses for site in small_problem.sites]
    wanted = importance.loss_roots(np.array([[1.0, -1.0, 1.0, -1.0]]))[0]
    selector = create_selector("cmaes", small_problem, seed=0, episodes=60)
    rewards: list[float] = []
    while len(rewards) < 60:
        proposals = selector.propose()
        roots = [np.sqrt([a[j] for a, j in zip(losses, each.choices, strict=True)]) for each in proposals]
        scored = [-float(np.abs(each - wanted).sum()) for each in roots]
        selector.observe(proposals, scored)
        rewards += scored
    assert max(rewards) > rewards[0]
    assert np.mean(rewards[-16:]) > np.mean(rewards[1:17])


@pytest.mark.parametrize("options", [{"step": 0.0}, {"population": 2}])
def test_options_out_of_range_are_refused(options) -> None:
    with pytest.raises(ConfigError, match=f"selector.{next(iter(options))} must be"):
        check_selector("cmaes", options)
