"""The last round of a search: the best few plans are carried out, refit and all, and scored again.

A search scores plans fitted layer by layer to the dense network's inputs, which is cheap; what a plan becomes
in the end is refitted to the inputs of the compressed network. Among plans that are nearly equally good the
two do not always agree.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import nn

from decomposition import CompressionPlan
from rankrl.data import ImageData, Images, augmented_copy
from rankrl.plan_search.evaluator import EvaluatorOptions
from rankrl.plan_search.problem import SearchProblem
from rankrl.plan_search.run import SearchResult, best_rows
from rankrl.training.accuracy import accuracy

log = logging.getLogger(__name__)

Rewrite = Callable[[CompressionPlan], nn.Module]
"""From a plan to the compressed network."""


def score_refitted(
    rewrite: Rewrite, images: Images, data: ImageData, options: EvaluatorOptions
) -> Callable[[CompressionPlan], float]:
    """Return what scores a plan by the network it becomes: its accuracy on the search's own images.

    Args:
        rewrite: From a plan to the compressed network.
        images: Held-out images.
        data: The dataset, for its normalisation and augmentation.
        options: Whether the search scores an augmented copy, and its seed.
    """
    if options.augmented:
        images = augmented_copy(images, data.augmentation, options.seed)

    def score(plan: CompressionPlan) -> float:
        return accuracy(rewrite(plan), images, mean=data.mean, std=data.std)

    return score


def best_finalist(
    problem: SearchProblem,
    result: SearchResult,
    score: Callable[[CompressionPlan], float],
    count: int,
) -> CompressionPlan:
    """Return the best, by `score`, of the `count` plans with the highest rewards; the first of equals."""
    rows = best_rows(result.rows, count)
    plans = [problem.plan_from_ranks(row.ranks_key, result.plan.chosen_by) for row in rows]
    scores = [score(plan) for plan in plans]
    for row, value in zip(rows, scores, strict=True):
        log.info("finalist of episode %d: reward %.4f, refitted %.4f", row.episode, row.reward, value)
    return plans[scores.index(max(scores))]
