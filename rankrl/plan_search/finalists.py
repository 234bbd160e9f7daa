"""The last round of a search: the best few plans are applied, refit and all, and scored again.

A search scores plans whose layers are fitted to the dense network's inputs, which is cheap; the network that
a plan becomes in the end is refitted to the compressed network's inputs. Of plans that are nearly equally
good, the two scores do not always prefer the same one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from decomposition import CompressionPlan
from rankrl.plan_search.run import SearchResult, best_rows
from rankrl.plan_search.scores.history import EpisodeRow, known_evaluations
from rankrl.plan_search.scores.rewards import Reward
from rankrl.plan_search.space.problem import SearchProblem

log = logging.getLogger(__name__)


def finalists(result: SearchResult, count: int) -> list[EpisodeRow]:
    """Return the `count` plans with the best rewards, and the preset, greedy's plan.

    A search then never ends with a worse plan than greedy's. Where the selector has no preset, its first plan
    takes the place of it.
    """
    rows = best_rows(result.rows, count)
    preset = next((row for row in result.rows if row.phase == "preset"), result.rows[0])
    return rows if preset in rows else [*rows, preset]


def best_finalist(
    problem: SearchProblem,
    rows: Sequence[EpisodeRow],
    score: Callable[[CompressionPlan], float],
    reward: Reward,
    chosen_by: str,
) -> EpisodeRow:
    """Return the row whose plan, applied, has the best reward; the first of equals."""
    if len(rows) == 1:
        return rows[0]
    known = known_evaluations(problem, rows)
    values = []
    for row in rows:
        refitted = replace(known[row.key], score=score(problem.plan(row.key, chosen_by)))
        values.append(reward(refitted))
        log.info("finalist of episode %d: reward %.4f, refitted %.4f", row.episode, row.reward, values[-1])
    return rows[values.index(max(values))]
