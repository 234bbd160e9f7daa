"""The last round of a search: the best few plans are carried out, refit and all, and scored again.

A search scores plans fitted layer by layer to the dense network's inputs, which is cheap; what a plan becomes
in the end is refitted to the inputs of the compressed network. Among plans that are nearly equally good the
two do not always agree.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import nn

from decomposition import CompressionPlan
from rankrl.data import ImageData, augmented_copy
from rankrl.plan_search.evaluator import EvaluatorOptions, accuracy_term
from rankrl.plan_search.history import EpisodeRow, known_evaluations
from rankrl.plan_search.problem import SearchProblem
from rankrl.plan_search.rewards import Reward
from rankrl.plan_search.run import SearchResult, best_rows
from rankrl.training import predict_logits

log = logging.getLogger(__name__)

Rewrite = Callable[[CompressionPlan], nn.Module]
"""From a plan to the compressed network."""


def score_refitted(
    rewrite: Rewrite, dense: nn.Module, data: ImageData, options: EvaluatorOptions
) -> Callable[[CompressionPlan], float]:
    """Return what scores a plan by the network it becomes: the search's accuracy term on all held-out images.

    A search scores some of them, for speed; the few finalists differ by so little that they need all.

    Args:
        rewrite: From a plan to the compressed network.
        dense: The dense network.
        data: The dataset, for its held-out images and their augmentation.
        options: The term, whether an augmented copy is scored, and its seed.
    """
    images = data.heldout
    if options.augmented:
        images = augmented_copy(images, data.augmentation, options.seed)
    wanted = predict_logits(dense, images, mean=data.mean, std=data.std)

    def score(plan: CompressionPlan) -> float:
        logits = predict_logits(rewrite(plan), images, mean=data.mean, std=data.std)
        return accuracy_term(options.term, logits, images.y.to(logits.device), wanted)

    return score


def finalists(result: SearchResult, count: int) -> list[EpisodeRow]:
    """Return the `count` plans with the best rewards and the plan that the search began with.

    The latter is greedy's where the selector learns: what a search ends with is then not behind what it began
    with.

    Args:
        result: The search.
        count: Number of finalists beside the first plan.
    """
    rows = best_rows(result.rows, count)
    return rows if result.rows[0] in rows else [*rows, result.rows[0]]


def best_finalist(
    problem: SearchProblem,
    result: SearchResult,
    rows: Sequence[EpisodeRow],
    score: Callable[[CompressionPlan], float],
    reward: Reward,
) -> EpisodeRow:
    """Return the finalist whose refitted network has the best reward; the first of equals.

    Args:
        problem: What was searched over.
        result: The search.
        rows: The finalists, at least one.
        score: Accuracy term of the network that a plan becomes.
        reward: The search's reward.
    """
    if len(rows) == 1:
        return rows[0]
    known = known_evaluations(problem, rows)
    plans = [problem.plan_from_ranks(row.ranks_key, result.plan.chosen_by) for row in rows]
    rewards = [
        reward(replace(known[row.ranks_key], score=score(plan)))
        for row, plan in zip(rows, plans, strict=True)
    ]
    for row, value in zip(rows, rewards, strict=True):
        log.info("finalist of episode %d: reward %.4f, refitted %.4f", row.episode, row.reward, value)
    return rows[rewards.index(max(rewards))]
