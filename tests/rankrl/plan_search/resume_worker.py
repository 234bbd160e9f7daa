"""A search over a synthetic problem in a process of its own, to be killed at random moments.

Usage: resume_worker.py FOLDER SELECTOR EPISODES; prints a line for every episode, then the best plan.
"""

import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
from torch import nn

from decomposition.choose.candidates import Candidate, CandidateSet
from decomposition.choose.listing import candidate_ranks
from decomposition.formats import get_format
from decomposition.network.layers import inspect_layers
from decomposition.operations import Factorise, dense_cost
from rankrl.plan_search.run import run_search
from rankrl.plan_search.scores.evaluation import Evaluation
from rankrl.plan_search.selectors import create_selector
from rankrl.plan_search.space.problem import Choices, SearchProblem

SHAPE = (3, 8, 8)


def synthetic_problem(layers: int = 6) -> SearchProblem:
    """Candidates with made-up errors: nothing is fitted."""
    widths = [3, *([16] * layers)]
    network = nn.Sequential(*(nn.Conv2d(i, o, 3, padding=1) for i, o in pairwise(widths)))
    tucker = get_format("tucker")
    sites = []
    for spec in inspect_layers(network, SHAPE):
        operations = [Factorise("tucker", each) for each in candidate_ranks(tucker, spec, tucker.modes(spec))]
        errors = np.exp(-np.arange(1, len(operations) + 1) / (2 + spec.index)).tolist()
        candidates = [
            Candidate((each,), each.cost(spec, dense_cost(spec)), error, "tucker")
            for each, error in zip(operations, errors, strict=True)
        ]
        sites.append(CandidateSet(spec, (*candidates, Candidate((), dense_cost(spec), 0.0))))
    return SearchProblem.from_model(network, sites, SHAPE, params=0.5)


class SlowEvaluator:
    """Scores by a fixed function of the choices, and takes a moment, so that a kill can fall within."""

    fingerprint = "slow"

    def __init__(self, problem: SearchProblem) -> None:
        self.problem = problem

    def evaluate(self, plans: list[Choices]) -> list[Evaluation]:
        evaluations = []
        for choices in plans:
            time.sleep(0.005)
            sizes = 2.0 + np.array(choices)
            score = float(np.tanh(np.sqrt(sizes * (1 + np.arange(len(sizes)) % 3)).mean() / 8))
            cost = self.problem.cost(choices)
            kept = cost.params / self.problem.params, cost.macs / self.problem.macs
            evaluations.append(Evaluation(score, score, cost.params, cost.macs, *kept, 0.0))
        return evaluations

    def restore(self, known: dict) -> None:
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
