"""Choosing a plan: calibrate, fit every layer at its candidate ranks, search."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from decomposition import (
    CompressionPlan,
    FitLibrary,
    FitOptions,
    collect_moments,
    collect_sensitivities,
    compressible_layers,
)
from rankrl.data import ImageData, Images, batches
from rankrl.errors import ConfigError
from rankrl.plan_search.evaluator import Evaluator, EvaluatorOptions, PlanEvaluator
from rankrl.plan_search.history import EpisodeRow
from rankrl.plan_search.parallel import ParallelEvaluator
from rankrl.plan_search.problem import SearchProblem
from rankrl.plan_search.rewards import Reward, check_reward, create_reward, reward_source
from rankrl.plan_search.run import SearchResult, choosing, run_search
from rankrl.plan_search.workers import Cluster, check_workers
from rankrl.progress import progress_bar
from rankrl.selectors import check_selector, create_selector
from rankrl.workflow.finalists import Rewrite, best_finalist, finalists, score_refitted
from rankrl.workflow.latency import LatencyBudget, LatencyOptions

log = logging.getLogger(__name__)

DEFAULT_KEPT_PARAMS = 0.4
CALIBRATION_BATCH = 256


@dataclass(frozen=True)
class CandidateOptions:
    """Which candidate ranks there are and how they are fitted.

    Attributes:
        format: Name of the tensor format.
        tensorised: Whether channel counts are split into factors.
        candidates: Candidate ranks a layer at most.
        multiple: They are multiples of it.
        iterations: L-BFGS iterations of each fit.
        weigh_outputs: Whether channels and layers count by what the network's output makes of them.
    """

    format: str
    tensorised: bool = False
    candidates: int = 16
    multiple: int = 1
    iterations: int = 60
    weigh_outputs: bool = True


@dataclass(frozen=True)
class SearchOptions:
    """How a plan is searched.

    Attributes:
        selector: Name of the selector.
        selector_options: Its options.
        reward: Name of the reward.
        reward_options: Its options.
        params: Fraction of the parameters to keep at most, or None.
        macs: Fraction of the multiply-accumulates to keep at most, or None.
        latency: Fraction of the dense network's time in onnxruntime to keep at most, or None.
        timing: How that time is measured.
        finalists: How many of the best plans are carried out, refit and all, and scored again on all held-out
            images, beside the first plan; the best of them is chosen. 1 takes the plan with the best reward.
            With `latency` they are the best plans that keep the time when they are exported and timed.
        episodes: Plans to score.
        seconds: Time limit, or None.
        patience: Stop after so many episodes without a better plan, or None.
        images: Held-out images that plans are scored on at most.
        evaluator: What is scored, and how.
        workers: Processes that score plans; None scores in this one.
        cluster: Where they are: `local`, or `ray`.
    """

    selector: str
    selector_options: Mapping[str, Any]
    reward: str
    reward_options: Mapping[str, Any]
    params: float | None
    macs: float | None
    episodes: int
    seconds: float | None
    patience: int | None
    images: int
    evaluator: EvaluatorOptions
    workers: int | None = None
    cluster: Cluster = "local"
    latency: float | None = None
    timing: LatencyOptions = field(default_factory=LatencyOptions)
    finalists: int = 1

    def __post_init__(self) -> None:
        check_workers(self.workers, self.cluster)
        for name in ("params", "macs", "latency"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ConfigError(
                    f"budget.{name}={value} is outside (0, 1]; it is the fraction to keep, for example 0.4"
                )
        if self.finalists < 1:
            raise ConfigError(f"search.finalists must be at least 1, got {self.finalists}")
        if self.images < 1:
            raise ConfigError(f"search.images must be at least 1, got {self.images}")
        check_reward(self.reward, self.reward_options)
        check_selector(self.selector, self.selector_options)

    @property
    def kept_params(self) -> float | None:
        """The parameter budget; a reward that ignores size needs one."""
        given = (self.params, self.macs, self.latency)
        if all(fraction is None for fraction in given) and reward_source(self.reward).needs_budget:
            return DEFAULT_KEPT_PARAMS
        return self.params


@dataclass(frozen=True)
class SearchSetting:
    """What every chooser of one network faces alike.

    Attributes:
        problem: What is searched over.
        evaluator: Scores plans.
        reward: From scores to rewards.
        latency: The budget in time, if that is what is kept.
        refitted: Accuracy term of the network that a plan becomes, refit and all; None when no finalists are
            wanted.
    """

    problem: SearchProblem
    evaluator: Evaluator
    reward: Reward
    latency: LatencyBudget | None = None
    refitted: Callable[[CompressionPlan], float] | None = None


@dataclass(frozen=True)
class Choice:
    """A chosen plan and the search it came from.

    Attributes:
        problem: What was searched over.
        result: The best plan and the record.
    """

    problem: SearchProblem
    result: SearchResult


def calibration_images(data: ImageData, count: int, *, seed: int) -> Tensor:
    """Draw normalised training images (count, C, H, W), float32, for fitting layers.

    Raises:
        ConfigError: If `count` is not positive.
    """
    if count < 1:
        raise ConfigError(f"calibration.images must be at least 1, got {count}")
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(seed))
    chosen: Images = data.train.subset(order[:count])
    walk = batches(chosen, CALIBRATION_BATCH, mean=data.mean, std=data.std)
    return torch.cat([x for x, _ in walk])


def fit_candidates(
    model: nn.Module,
    inputs: Sequence[Tensor],
    options: CandidateOptions,
    *,
    cache: Path | None,
    seed: int,
) -> FitLibrary:
    """Calibrate and return the library of fits; nothing is fitted yet.

    Args:
        model: The dense network.
        inputs: Batches of calibration inputs, at least one.
        options: Format and effort.
        cache: Folder of fits that later runs reuse, or None.
        seed: Seed of the sampled patches.

    Raises:
        ConfigError: If no layer can be decomposed.
    """
    specs = compressible_layers(model, inputs[0].shape[1:])
    if not specs:
        raise ConfigError(
            "the network has no layer that can be decomposed; `rankrl task=inspect`, or "
            "decomposition.inspect_layers, lists its layers and why"
        )
    moments = collect_moments(model, specs, inputs, seed=seed)
    return FitLibrary(
        model,
        specs,
        options.format,
        moments=moments,
        sensitivities=collect_sensitivities(model, specs, inputs, seed=seed)
        if options.weigh_outputs
        else None,
        tensorised=options.tensorised,
        multiple=options.multiple,
        options=FitOptions(iterations=options.iterations),
        folder=cache,
    )


def choose_plan(
    model: nn.Module,
    data: ImageData,
    library: FitLibrary,
    options: SearchOptions,
    *,
    candidates: int,
    folder: Path,
    seed: int,
    on_episode: Callable[[EpisodeRow], None] | None = None,
    rewrite: Rewrite | None = None,
) -> Choice:
    """Search for the best plan; an interrupted search in `folder` is continued.

    Args:
        model: The dense network.
        data: The dataset; only held-out images score plans.
        library: The fits of the network's layers.
        options: Selector, reward, budget, limits.
        candidates: Candidate ranks a layer at most.
        folder: Where the search keeps its state and `episodes.csv`.
        seed: Seed of the selector.
        on_episode: Called with the row of every newly scored plan.
        rewrite: From a plan to the compressed network; needed for more than one finalist.

    Raises:
        ConfigError: If an option is unknown or out of range.
        DecompositionError: If no plan can reach the budget.
    """
    with search_setting(model, data, library, options, candidates=candidates, rewrite=rewrite) as setting:
        result = search_plan(setting, options, folder=folder, seed=seed, on_episode=on_episode)
    return Choice(setting.problem, result)


@contextmanager
def search_setting(
    model: nn.Module,
    data: ImageData,
    library: FitLibrary,
    options: SearchOptions,
    *,
    candidates: int,
    rewrite: Rewrite | None = None,
) -> Iterator[SearchSetting]:
    """Fit the candidates and make what scores plans; worker processes end with the block.

    The arguments and errors are those of `choose_plan`.
    """
    describe = partial(
        SearchProblem.from_model,
        model,
        input_shape=data.input_shape,
        params=options.kept_params,
        macs=options.macs,
    )
    unfitted = [library.unfitted_curve(name, limit=candidates) for name in library.specs]
    if options.latency is None:  # a budget that no plan can reach is refused before the fits take their time
        describe(curves=unfitted)
    elif options.params is not None or options.macs is not None:
        raise ConfigError("budget.latency is set beside another budget; set budget.params and .macs to null")
    curves = []
    with progress_bar("fit layers", total=len(unfitted)) as bar:
        for curve in unfitted:
            curves.append(library.fitted_curve(curve))
            bar.advance()
    timed: LatencyBudget | None = None
    if options.latency is None:
        problem = describe(curves=curves, library=library)
    else:
        timed = LatencyBudget(model, curves, data.input_shape, options.latency, options.timing)
        problem = timed.problem(library)
    reward = create_reward(options.reward, budgeted=problem.budget is not None, **options.reward_options)
    images = data.heldout.subset(torch.arange(min(options.images, len(data.heldout))))
    scoring: dict[str, Any] = {
        "mean": data.mean,
        "std": data.std,
        "augmentation": data.augmentation,
        "options": options.evaluator,
    }
    refitted = (
        None
        if rewrite is None or options.finalists == 1
        else score_refitted(rewrite, model, data, options.evaluator)
    )
    if options.workers is None:
        evaluator = PlanEvaluator(model, library, problem, images, **scoring)
        yield SearchSetting(problem, evaluator, reward, timed, refitted)
        return
    with ParallelEvaluator(
        model, library, problem, images, workers=options.workers, cluster=options.cluster, **scoring
    ) as parallel:
        yield SearchSetting(problem, parallel, reward, timed, refitted)


def search_plan(
    setting: SearchSetting,
    options: SearchOptions,
    *,
    folder: Path,
    seed: int,
    on_episode: Callable[[EpisodeRow], None] | None = None,
) -> SearchResult:
    """Let the selector of `options` look for the best plan; an interrupted search in `folder` is continued.

    The arguments and errors are those of `choose_plan`.
    """
    selector = create_selector(
        options.selector, setting.problem, seed=seed, episodes=options.episodes, **options.selector_options
    )
    with progress_bar("search", total=options.episodes) as bar:

        def show(row: EpisodeRow) -> None:
            bar.update(row.episode, best=row.best_reward)
            if on_episode is not None:
                on_episode(row)

        result = run_search(
            setting.problem,
            setting.evaluator,
            selector,
            episodes=options.episodes,
            reward=setting.reward,
            seconds=options.seconds,
            patience=options.patience,
            folder=folder,
            resume=True,
            on_episode=show,
        )
    log.info(
        "search: %d episodes (%d different plans) in %.1f s, best reward %.4f",
        len(result.rows),
        result.evaluations,
        result.seconds,
        result.best.reward,
    )
    if result.stopped_by == "interrupt":
        return result
    return choosing(setting.problem, result, _chosen_row(setting, result, options.finalists))


def _chosen_row(setting: SearchSetting, result: SearchResult, count: int) -> EpisodeRow:
    """Return the row of the plan to carry out: the best of those that keep the time, refit if wanted."""
    refitted = setting.refitted
    if setting.latency is not None:
        rows = setting.latency.rows_that_hold(setting.problem, result, 1 if refitted is None else count)
    else:
        rows = [result.best] if refitted is None else finalists(result, count)
    if refitted is None:
        return rows[0]
    return best_finalist(setting.problem, result, rows, refitted, setting.reward)
