"""Losses that are corrected by measured plans: the factors of kinds and the power of the sum come back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decomposition import allocate
from rankrl.plan_search.corrected_losses import kind_of, loss_model
from rankrl.plan_search.measured_plans import MeasuredPlan
from rankrl.plan_search.space.problem import SearchProblem
from tests.rankrl.plan_search.test_bounded_loss import made_up

TRUE = {"cp": 0.3, "cp int8": 0.6, "int8": 2.0}


def measured(
    problem: SearchProblem, power: float, *, plans: int, seed: int, scale: float
) -> list[MeasuredPlan]:
    """Random plans, which lose `scale` * (the sum of their layers' losses times factors)^power."""
    random = np.random.default_rng(seed)
    found = []
    for number in range(plans):
        kinds = random.choice(list(TRUE), size=random.integers(1, 4))
        key = tuple(
            int(random.choice([j for j, each in enumerate(site.candidates) if kind_of(each) in kinds]))
            for site in problem.sites
        )
        losses = [site.losses[j] for site, j in zip(problem.sites, key, strict=True)]
        candidates = [site.candidates[j] for site, j in zip(problem.sites, key, strict=True)]
        true = sum(TRUE[kind_of(each)] * loss for each, loss in zip(candidates, losses, strict=True))
        loss = scale * true**power
        found.append(MeasuredPlan(str(number), key, float(loss), 1.0, "bytes", float(sum(losses)), 1.0))
    return found


@given(st.integers(0, 1000), st.sampled_from([1.0, 0.5]))
@settings(max_examples=20, deadline=None)
def test_other_plans_lose_what_is_expected(seed: int, power: float) -> None:
    problem = made_up(seed, layers=12)
    model = loss_model(problem, measured(problem, power, plans=30, seed=seed, scale=0.05))
    assert model is not None
    others = measured(problem, power, plans=20, seed=seed + 1, scale=0.05)
    errors = [np.log(model.loss(problem.sites, other.key) / other.loss) for other in others]
    assert np.median(np.abs(errors)) < 0.1


def test_plans_made_by_corrected_losses_lose_less() -> None:
    gains = []
    for seed in range(20):
        problem = made_up(seed, layers=12)
        model = loss_model(problem, measured(problem, 1.0, plans=20, seed=seed, scale=0.05))
        assert model is not None
        assert problem.budget is not None
        budget = replace(problem.budget, fraction=0.15)
        sites = model.corrected(problem).sites

        def true(key: np.ndarray, problem: SearchProblem = problem) -> float:
            pairs = zip(problem.sites, key, strict=True)
            return sum(TRUE.get(kind_of(each.candidates[j]), 0.0) * each.losses[j] for each, j in pairs)

        gains.append(true(allocate(problem.sites, budget)) / true(allocate(sites, budget)))
    assert np.median(gains) > 1
    assert np.mean(gains) > 1.01


def test_plans_that_tell_nothing_make_no_model() -> None:
    problem = made_up(1)
    plans = measured(problem, 1.0, plans=3, seed=1, scale=0.05)
    assert loss_model(problem, []) is None
    assert loss_model(problem, [replace(each, loss=0.0) for each in plans]) is None
    assert loss_model(problem, [replace(each, loss=0.9) for each in plans]) is None


def test_kinds_without_plans_take_the_factor_of_the_others() -> None:
    problem = made_up(2)
    integers = next(j for j, each in enumerate(problem.sites[0].candidates) if kind_of(each) == "int8")
    key = (integers,) * len(problem.sites)
    expected = float(sum(site.losses[integers] for site in problem.sites))
    model = loss_model(problem, [MeasuredPlan("int8", key, 3 * expected, 1.0, "bytes", expected, 1.0)])
    assert model is not None
    assert model.loss(problem.sites, key) == pytest.approx(3 * expected, rel=1e-6)
    corrected = model.corrected(problem)
    ranks = [each.generator == "cp" for each in problem.sites[0].candidates]
    ratio = corrected.sites[0].losses[ranks] / problem.sites[0].losses[ranks]
    assert ratio == pytest.approx(corrected.sites[0].losses[integers] / problem.sites[0].losses[integers])
