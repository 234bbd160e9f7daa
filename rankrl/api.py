"""`rankrl.search`: choose ranks for any network, with any score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from decomposition import apply_plan, load_compressed
from decomposition.calibration.calibration_set import CalibrationInputs
from decomposition.calibration.input_check import checked_batches
from decomposition.network.inputs import split
from decomposition.network.wrappers import unwrapped
from rankrl.argument_types import checked_arguments
from rankrl.data.calibration import CALIBRATION_BATCH
from rankrl.errors import ConfigError
from rankrl.files import storage_errors
from rankrl.networks.candidates import CandidateOptions
from rankrl.options.budget import BudgetOptions
from rankrl.options.search import Cluster, SearchOptions
from rankrl.options.timing import LatencyOptions
from rankrl.plan_search.goal import SearchGoal
from rankrl.plan_search.module_session import session_on_inputs
from rankrl.plan_search.run import SearchResult
from rankrl.plan_search.scores.score_evaluator import Score
from rankrl.plan_search.selectors import check_selector
from rankrl.progress import Progress
from rankrl.runs.run_lock import alone_in_folder

__all__ = ["apply_plan", "load_compressed", "search"]


@checked_arguments(without=("model", "score", "calibration"))
@storage_errors()
@alone_in_folder
def search(
    model: nn.Module,
    *,
    score: Score,
    calibration: CalibrationInputs,
    decomposition: str | Sequence[str] = "tensor_ring",
    precisions: Sequence[str] = ("float32",),
    channels: Sequence[float] = (),
    blocks: bool = False,
    skip: Sequence[str] = (),
    only: Sequence[str] = (),
    params: float | None = None,
    macs: float | None = None,
    bytes: float | None = None,
    latency: float | None = None,
    timing: LatencyOptions | None = None,
    selector: str = "bayes_ddpg",
    selector_options: Mapping[str, Any] | None = None,
    reward: str = "accuracy",
    reward_options: Mapping[str, Any] | None = None,
    episodes: int = 100,
    seconds: float | None = None,
    patience: int | None = None,
    finalists: int = 1,
    candidates: int = 16,
    weigh_outputs: bool = True,
    seed: int = 0,
    folder: str | Path | None = None,
    cache: str | Path | None = None,
    workers: int | None = None,
    cluster: Cluster = "local",
    worker_cpus: int = 1,
    worker_gpus: float = 0.0,
    progress: Progress = None,
) -> SearchResult:
    """Choose what becomes of every layer so that a score is best within a budget.

    Args:
        model: The dense network: any module. It may take several tensors and return anything that the score
            understands. It is left untouched.
        score: Function from a network to a number, higher is better. It must not read test data. With an
            attribute `identity`, a string, that alone tells whether it is still the one that `folder` knows.
        calibration: Model inputs, a few hundred to a few thousand: one batch (a tensor, a tuple of tensors
            that the forward takes in order, or a dict of those it takes by name), or batches of such, alone
            or in pairs with labels, as a data loader yields them.
        decomposition: Name of the tensor format, or names of several that every layer chooses from.
        precisions: What every layer may compute with or be stored in: `float32`, `int8`, `int8_weights`,
            `int4_weights`. `int8` becomes `int7` where weights have to have 7 bits (`LatencyOptions`).
        channels: Fractions of the channels between two layers that may be kept, for example (0.75, 0.5); the
            others are removed. Empty keeps all.
        blocks: Whether whole residual blocks may be removed.
        skip: Layers that stay as they are: names of layers or of modules that hold some, or patterns of names
            (`layer1`, `*.downsample.*`).
        only: Layers that alone may change, named likewise; empty for all.
        params: Fraction of the parameters to keep at most, in (0, 1].
        macs: Fraction of the multiply-accumulates to keep at most.
        bytes: Fraction of the parameters' bytes to keep at most.
        latency: Fraction of the dense network's time in onnxruntime to keep at most. Give one of the four,
            or two to be kept at once; none only with a reward that weighs size.
        timing: How time is measured.
        selector: Name of the selector.
        selector_options: Its options.
        reward: Name of the reward, made from the score and what a plan costs.
        reward_options: Its options.
        episodes: Plans to score.
        seconds: Time limit, or None.
        patience: Stop after so many episodes without a better plan, or None.
        finalists: How many of the best plans are applied, refit and all, and scored again, beside the first
            plan; the best of them is chosen. 1 takes the plan with the best reward.
        candidates: Candidate ranks a layer and format at most.
        weigh_outputs: Count channels and layers by what the network's output makes of them; it must be
            differentiable for that.
        seed: Seed of everything random.
        folder: Where the search keeps its state, so that a killed one goes on when called again; None keeps
            nothing. A score that was edited since (its code, or what it closes over) begins anew. No two
            calls may work in it at once.
        cache: Where fits and times are kept for later searches; None keeps times in `folder`, for this one.
        workers: Processes that fit layers and score the plans of a step side by side; None takes one. The
            plans found do not depend on it; `selector_options={"plans_per_step": N}` says how many a step
            has. `model` and `score` must be importable by name, and the call stand under
            `if __name__ == "__main__":`.
        cluster: Where they are: `local`, or `ray` for a Ray cluster (extra `ray`; the one that RAY_ADDRESS
            names, else one made on this machine).
        worker_cpus: Processor cores of each worker: the threads that it computes with.
        worker_gpus: GPUs of each worker on a Ray cluster, which the score may move the network to; 0.5 lets
            two share one.
        progress: Where progress goes: None draws bars on a terminal, False shows nothing; a function is
            called with the stage (`fit layers`, `search`), the number of its steps that are done and of all.

    Returns:
        The best plan, for `decomposition.apply_plan`, and the record of the search.

    Raises:
        ConfigError: If no budget or more than two are given, no layer can be decomposed, an option is unknown
            or out of range, or the score is no number.
        DecompositionError: If the budget cannot be reached or the calibration inputs are unusable.
        NonFiniteError: If a score is NaN or infinite.
        WorkerError: If a worker process died.
    """
    if not isinstance(model, nn.Module) or not callable(score):
        raise ConfigError(
            f"search takes a torch.nn.Module and a score, a function from it to a number; got a "
            f"{type(model).__name__} and a {type(score).__name__}"
        )
    model = unwrapped(model)
    limits = SearchOptions(
        finalists=finalists,
        episodes=episodes,
        seconds=seconds,
        patience=patience,
        workers=workers,
        cluster=cluster,
        worker_cpus=worker_cpus,
        worker_gpus=worker_gpus,
    )
    goal = SearchGoal(
        BudgetOptions(params, macs, bytes, latency),
        limits,
        (LatencyOptions() if timing is None else timing).kept_in(cache, folder),
        reward,
        reward_options or {},
    )
    if goal.needs_budget:
        raise ConfigError("give a budget: params=0.4 keeps at most 40 % of the parameters, macs=... likewise")
    checked = checked_batches(calibration, model)
    batches = [part for batch in checked for part in split(batch, CALIBRATION_BATCH)]
    formats = (decomposition,) if isinstance(decomposition, str) else tuple(decomposition)
    chosen = CandidateOptions(
        formats,
        precisions=tuple(precisions),
        reduce_range=goal.timing.reduce_range,
        candidates=candidates,
        weigh_outputs=weigh_outputs,
        channels=tuple(channels),
        blocks=blocks,
        skip=tuple(skip),
        only=tuple(only),
    )
    check_selector(selector, selector_options or {}, goal.setting(chosen))
    session = session_on_inputs(
        model,
        batches,
        score,
        chosen,
        goal,
        cache=None if cache is None else Path(cache),
        seed=seed,
        progress=progress,
    )
    with session:
        return session.search(
            selector,
            selector_options or {},
            seed=seed,
            folder=None if folder is None else Path(folder),
            anew_for_other_scores=True,
        )
