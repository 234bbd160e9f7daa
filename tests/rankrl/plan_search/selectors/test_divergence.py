"""Divergences are those of networks in which one layer alone is compressed, and the plan's sum is least."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from rankrl.errors import ConfigError
from rankrl.plan_search.selectors import create_selector


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


def test_it_says_what_it_needs(small_problem) -> None:
    selector = create_selector("divergence", replace(small_problem, divergences=None))
    with pytest.raises(ConfigError, match=r"leave search.workers null"):
        selector.propose()


def test_it_proposes_its_plan_once(small_problem) -> None:
    selector = create_selector("divergence", small_problem)
    proposals = selector.propose()
    selector.observe(proposals, [0.5])
    assert selector.propose() == []
    resumed = create_selector("divergence", small_problem)
    resumed.restore(selector.state())
    assert resumed.propose() == []
