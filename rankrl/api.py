"""`rankrl.search`: choose ranks for any network, with any score."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from decomposition.moments import calibration_batches
from rankrl.errors import ConfigError
from rankrl.plan_search.parallel import ParallelScoreEvaluator
from rankrl.plan_search.problem import SearchProblem
from rankrl.plan_search.rewards import create_reward
from rankrl.plan_search.run import SearchResult, run_search
from rankrl.plan_search.score_evaluator import Score, ScoreEvaluator, check_score
from rankrl.plan_search.workers import Cluster, check_workers
from rankrl.selectors import create_selector
from rankrl.workflow.choose import CALIBRATION_BATCH, CandidateOptions, fit_candidates


def search(
    model: nn.Module,
    *,
    score: Score,
    calibration: Tensor | Iterable[Tensor],
    decomposition: str = "tensor_ring",
    params: float | None = None,
    macs: float | None = None,
    selector: str = "ddpg",
    selector_options: Mapping[str, Any] | None = None,
    episodes: int = 100,
    candidates: int = 16,
    weigh_outputs: bool = True,
    seed: int = 0,
    folder: str | Path | None = None,
    cache: str | Path | None = None,
    workers: int | None = None,
    cluster: Cluster = "local",
) -> SearchResult:
    """Choose the rank of every layer so that a score is best within a budget.

    Args:
        model: The dense network: any module whose forward takes one tensor; what it returns is the
            score's affair. It is left untouched.
        score: Function from a network to a number, higher is better. It must not read test data.
        calibration: Model inputs, a few hundred to a few thousand, as one tensor or in batches.
        decomposition: Name of the tensor format.
        params: Fraction of the parameters to keep at most, in (0, 1].
        macs: Fraction of the multiply-accumulates to keep at most; give one of the two.
        selector: Name of the selector.
        selector_options: Its options.
        episodes: Plans to score.
        candidates: Candidate ranks a layer at most.
        weigh_outputs: Count channels and layers by what the network's output makes of them; it must be
            differentiable for that.
        seed: Seed of everything random.
        folder: Where the search keeps its state, so that a killed one goes on when called again; None keeps
            nothing. A score that was edited since (its code, or what it closes over) begins anew.
        cache: Where fits are kept for later searches; None keeps nothing.
        workers: Processes that score the plans of one step at the same time; None scores in this one. The
            plans found do not depend on it; `selector_options={"plans_per_step": N}` says how many a step
            has. `model` and `score` must be importable by name, and the call stand under
            `if __name__ == "__main__":`.
        cluster: Where the processes are: `local`, or `ray` for a Ray cluster.

    Returns:
        The best plan, for `decomposition.apply_plan`, and the record of the search.

    Raises:
        ConfigError: If no budget or two are given, no layer can be decomposed, an option is unknown or out of
            range, or the score is no number.
        DecompositionError: If the budget cannot be reached or the calibration inputs are unusable.
        NonFiniteError: If a score is NaN or infinite.
        WorkerError: If a worker process died.
    """
    check_workers(workers, cluster)
    if candidates < 1:
        raise ConfigError(f"candidates must be at least 1, got {candidates}")
    if params is None and macs is None:
        raise ConfigError("give a budget: params=0.4 keeps at most 40 % of the parameters, macs=... likewise")
    if not isinstance(model, nn.Module) or not callable(score):
        raise ConfigError(
            f"search takes a torch.nn.Module and a score, a function from it to a number; got a "
            f"{type(model).__name__} and a {type(score).__name__}"
        )
    batches = [part for batch in calibration_batches(calibration) for part in batch.split(CALIBRATION_BATCH)]
    if not batches:
        raise ConfigError("the calibration set is empty; pass a few hundred model inputs")
    input_shape = tuple(batches[0].shape[1:])
    fits = None if cache is None else Path(cache)
    options = CandidateOptions(decomposition, weigh_outputs=weigh_outputs)
    library = fit_candidates(model, batches, options, cache=fits, seed=seed)
    describe = partial(SearchProblem.from_model, model, input_shape=input_shape, params=params, macs=macs)
    # What cannot work is refused before the fits take their time.
    unfitted = [library.unfitted_curve(name, limit=candidates) for name in library.specs]
    describe(curves=unfitted)
    check_score(score, model)
    problem = describe(curves=[library.fitted_curve(curve) for curve in unfitted], library=library)
    example = torch.cat([b[:2] for b in batches[:4]])
    scoring = (
        nullcontext(ScoreEvaluator(model, library, problem, score, example))
        if workers is None
        else ParallelScoreEvaluator(model, library, problem, score, example, workers=workers, cluster=cluster)
    )
    chooser = create_selector(selector, problem, seed=seed, episodes=episodes, **(selector_options or {}))
    with scoring as evaluator:
        return run_search(
            problem,
            evaluator,
            chooser,
            episodes=episodes,
            reward=create_reward("accuracy", budgeted=True),
            folder=None if folder is None else Path(folder),
            resume=True,
            anew_for_other_scores=True,
        )
