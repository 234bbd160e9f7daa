"""A search over a synthetic problem in a process of its own, to be killed at random moments.

Usage: resume_worker.py FOLDER SELECTOR EPISODES; prints a line for every episode, then the best plan.
"""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
from decomposition.curves import RankCurve, candidate_ranks
from torch import nn

from decomposition.formats import get_format
from decomposition.layers import inspect_layers
from decomposition.plan import LayerPlan
from rankrl.plan_search.evaluator import Evaluation
from rankrl.plan_search.problem import SearchProblem
from rankrl.plan_search.run import run_search
from rankrl.selectors import create_selector

SHAPE = (3, 8, 8)


def synthetic_problem(layers: int = 6) -> SearchProblem:
    """Curves with made-up errors: nothing is fitted."""
    widths = [3, *([16] * layers)]
    network = nn.Sequential(*(nn.Conv2d(i, o, 3, padding=1) for i, o in pairwise(widths)))
    tucker = get_format("tucker")
    curves = []
    for spec in inspect_layers(network, SHAPE):
        modes = tucker.modes(spec)
        ranks = candidate_ranks(tucker, spec, modes)
        entries = (*(LayerPlan(spec.name, "tucker", each) for each in ranks), LayerPlan(spec.name))
        errors = [*np.exp(-np.arange(1, len(ranks) + 1) / (2 + spec.index)), 0.0]
        params = np.array([entry.params(spec) for entry in entries])
        macs = np.array([entry.macs(spec) for entry in entries])
        curves.append(RankCurve(spec, entries, params, macs, np.array(errors)))
    return SearchProblem.from_model(network, curves, SHAPE, params=0.5)


class SlowEvaluator:
    """Scores by a fixed function of the ranks, and takes a moment, so that a kill can fall within."""

    fingerprint = "slow"

    def __init__(self, problem: SearchProblem) -> None:
        self.problem = problem

    def evaluate(self, plans: list) -> list[Evaluation]:
        evaluations = []
        for plan in plans:
            time.sleep(0.005)
            key = self.problem.ranks(plan)
            sizes = np.array([sum(ranks) or 32 for ranks in key], dtype=float)
            score = float(np.tanh(np.sqrt(sizes * (1 + np.arange(len(sizes)) % 3)).mean() / 8))
            params, macs = self.problem.cost(plan)
            kept = params / self.problem.params, macs / self.problem.macs
            evaluations.append(Evaluation(score, score, params, macs, *kept, 1, 0.0))
        return evaluations

    def state(self) -> dict:
        return {}

    def restore(self, state: dict, known: dict) -> None:
        pass


def main(folder: str, selector: str, episodes: str) -> None:
    problem = synthetic_problem()
    result = run_search(
        problem,
        SlowEvaluator(problem),
        create_selector(selector, problem, seed=3, episodes=int(episodes)),
        episodes=int(episodes),
        folder=Path(folder),
        resume=True,
        on_episode=lambda row: print(row.episode, flush=True),
    )
    print(result.plan.to_json(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
