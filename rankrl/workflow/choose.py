"""Choosing a plan: calibrate, fit every layer at its candidate ranks, search."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from decomposition import (
    FitLibrary,
    FitOptions,
    collect_moments,
    compressible_layers,
)
from rankrl.data import ImageData, Images, batches
from rankrl.errors import ConfigError
from rankrl.plan_search.evaluator import EvaluatorOptions, PlanEvaluator
from rankrl.plan_search.history import EpisodeRow
from rankrl.plan_search.problem import SearchProblem
from rankrl.plan_search.rewards import create_reward, reward_source
from rankrl.plan_search.run import SearchResult, run_search
from rankrl.progress import progress_bar
from rankrl.selectors import create_selector

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
        iterations: L-BFGS iterations of each fit.
    """

    format: str
    tensorised: bool = False
    candidates: int = 16
    iterations: int = 60


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
        episodes: Plans to score.
        seconds: Time limit, or None.
        patience: Stop after so many episodes without a better plan, or None.
        images: Held-out images that plans are scored on at most.
        evaluator: What is scored, and how.
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

    def __post_init__(self) -> None:
        for name in ("params", "macs"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ConfigError(
                    f"budget.{name}={value} is outside (0, 1]; it is the fraction to keep, for example 0.4"
                )
        if self.images < 1:
            raise ConfigError(f"search.images must be at least 1, got {self.images}")
        reward_source(self.reward)

    @property
    def kept_params(self) -> float | None:
        """The parameter budget; a reward that ignores size needs one."""
        if self.params is None and self.macs is None and reward_source(self.reward).needs_budget:
            return DEFAULT_KEPT_PARAMS
        return self.params


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
        tensorised=options.tensorised,
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

    Raises:
        ConfigError: If an option is unknown or out of range.
        DecompositionError: If no plan can reach the budget.
    """
    with progress_bar("fit layers", total=len(library.specs)) as bar:
        curves = library.curves(limit=candidates, progress=lambda _: bar.advance())
    problem = SearchProblem.from_model(
        model, curves, data.input_shape, params=options.kept_params, macs=options.macs, library=library
    )
    images = data.heldout.subset(torch.arange(min(options.images, len(data.heldout))))
    evaluator = PlanEvaluator(
        model,
        library,
        problem,
        images,
        mean=data.mean,
        std=data.std,
        augmentation=data.augmentation,
        options=options.evaluator,
    )
    reward = create_reward(options.reward, budgeted=problem.budget is not None, **options.reward_options)
    selector = create_selector(
        options.selector, problem, seed=seed, episodes=options.episodes, **options.selector_options
    )
    with progress_bar("search", total=options.episodes) as bar:

        def show(row: EpisodeRow) -> None:
            bar.update(row.episode, best=row.best_reward)

        result = run_search(
            problem,
            evaluator,
            selector,
            episodes=options.episodes,
            reward=reward,
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
    return Choice(problem, result)
