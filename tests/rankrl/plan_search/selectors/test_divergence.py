"""Divergences are those of networks in which one layer alone is compressed, and the plan's sum is least."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from rankrl.errors import ConfigError
from rankrl.plan_search.scores.evaluators import probes, weighed
from rankrl.plan_search.selectors import create_selector
from rankrl.testing import small_problem as made


def test_each_is_that_of_the_answers_of_one_compressed_layer(small_problem, small_evaluator) -> None:
    """The oracle is torch's own distribution."""
    found = small_evaluator.divergences(2)
    dense = [site.dense for site in small_problem.sites]
    before = torch.distributions.Categorical(logits=small_evaluator.forward(tuple(dense), 0, 2))
    for index, site in enumerate(small_problem.sites):
        assert found[index].shape == (len(site),)
        assert found[index][site.dense] == 0
        for choice in (0, len(site) // 2):
            plan = [*dense]
            plan[index] = choice
            after = torch.distributions.Categorical(logits=small_evaluator.forward(tuple(plan), 0, 2))
            wanted = float(torch.distributions.kl_divergence(before, after).mean())
            assert found[index][choice] == pytest.approx(wanted, rel=1e-3, abs=1e-6)


def test_the_plan_has_the_least_sum_that_the_allocation_finds(small_problem) -> None:
    """Near the least of all plans: the Lagrangian leaves less than one step of one layer."""
    generator = np.random.default_rng(0)
    thinned = tuple(site.subset([0, len(site) // 2, site.dense]) for site in small_problem.sites)
    measured = [np.array([*sorted(generator.random(2), reverse=True), 0.0]) for _ in thinned]
    problem = replace(small_problem, sites=thinned, divergences=lambda batches: measured)
    (proposal,) = create_selector("divergence", problem).propose()
    sums = {
        plan: sum(float(values[choice]) for values, choice in zip(measured, plan, strict=True))
        for plan in product(*(range(3) for _ in thinned))
        if problem.keeps_budget(plan)
    }
    assert proposal.choices in sums
    assert sum(value < sums[proposal.choices] for value in sums.values()) <= 0.1 * len(sums)


def test_one_divergence_is_measured_alone(small_problem, small_evaluator) -> None:
    only = probes(small_problem)
    found, every = small_evaluator.divergences(2, only), small_evaluator.divergences(2)
    for site, probe, values, wanted in zip(small_problem.sites, only, found, every, strict=True):
        assert site.losses[probe] > 0
        assert values[probe] == wanted[probe] > 0
        assert np.flatnonzero(values).tolist() == [probe]


def test_the_probe_is_the_cheapest_candidate_with_a_loss(small_problem) -> None:
    for problem in (made(params=0.5), made(("cp", "tucker"), macs=0.6)):
        for site, probe in zip(problem.sites, probes(problem), strict=True):
            lossy = [each for each in range(len(site)) if site.losses[each] > 0]
            assert probe in lossy
            assert site.cost(problem.measure)[probe] == min(site.cost(problem.measure)[lossy])
    without = [site.subset([site.dense]) for site in small_problem.sites]
    assert probes(replace(small_problem, sites=tuple(without), budget=None)) == [0] * len(without)


def test_one_divergence_a_layer_weighs_its_losses(small_problem) -> None:
    """The factor is the ratio of measured and predicted to the power of 3/4, and 1 for the median site."""
    only, sites = probes(small_problem), small_problem.sites
    ratios = np.array([1.0, 30.0, 0.02, 5.0, 2.0])[: len(sites)]
    losses = [site.losses[probe] for site, probe in zip(sites, only, strict=True)]
    for unit in (1.0, 1e-7):
        found = weighed(sites, only, unit * ratios * losses)
        factors = [one.importance / site.importance for one, site in zip(found, sites, strict=True)]
        assert factors == pytest.approx((ratios / np.median(ratios)) ** 0.75)
        for one, site in zip(found, sites, strict=True):
            assert one.errors == pytest.approx(site.errors)


def test_a_layer_that_seems_to_lose_nothing_is_not_free(small_problem) -> None:
    only, sites = probes(small_problem), small_problem.sites
    losses = np.array([site.losses[probe] for site, probe in zip(sites, only, strict=True)])
    nothing = np.where(np.arange(len(sites)) == 1, 0, losses)
    factors = [
        one.importance / site.importance
        for one, site in zip(weighed(sites, only, nothing), sites, strict=True)
    ]
    assert factors[1] == pytest.approx(1e-3**0.75)
    assert np.delete(factors, 1) == pytest.approx(1)
    assert weighed(sites, only, 0 * losses) == list(sites)
    alone = [site.dense for site in sites]
    assert weighed(sites, alone, losses) == list(sites)


def test_it_says_what_it_needs(small_problem) -> None:
    selector = create_selector("divergence", replace(small_problem, divergences=None))
    with pytest.raises(ConfigError, match=r"leave search.workers null"):
        selector.propose()


def test_it_proposes_its_plan_once(small_problem) -> None:
    selector = create_selector("divergence", small_problem)
    proposals = selector.propose()
    selector.observe(proposals, [0.5])
    assert selector.propose() == []
