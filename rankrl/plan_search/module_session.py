"""A search over a network of the user's own, on the user's inputs, by the user's score."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from decomposition import Inputs
from rankrl.networks.candidates import CandidateOptions
from rankrl.networks.module import ModuleNetwork
from rankrl.plan_search.goal import SearchGoal
from rankrl.plan_search.scores.score_evaluator import Score
from rankrl.plan_search.scores.scoring import FunctionScoring
from rankrl.plan_search.session import SearchSession, check_reachable
from rankrl.progress import Progress


def session_on_inputs(
    model: nn.Module,
    inputs: Sequence[Inputs],
    score: Score,
    candidates: CandidateOptions,
    goal: SearchGoal,
    *,
    cache: Path | None,
    seed: int,
    progress: Progress = None,
) -> SearchSession:
    """Return the session of a search over a network of the user's own.

    Args:
        model: The dense network.
        inputs: Batches of calibration inputs, at least one.
        score: From a network to a number, higher is better.
        candidates: What may become of its layers.
        goal: Budget, reward, limits.
        cache: Folder of fits that later searches reuse, or None.
        seed: Seed of everything random.
        progress: As for `SearchSession`.

    Raises:
        ConfigError: The network has nothing to search over.
        DecompositionError: No plan can reach a budget, or no layer can be decomposed.
    """
    network = ModuleNetwork.on_inputs(
        model, inputs, weigh_outputs=candidates.weigh_outputs, seed=seed, progress=progress
    )
    check_reachable(network, candidates, goal)
    return SearchSession(
        network,
        network.library(candidates, cache=cache, seed=seed),
        FunctionScoring(model, score, inputs),
        goal,
        candidates=candidates.candidates,
        progress=progress,
    )
