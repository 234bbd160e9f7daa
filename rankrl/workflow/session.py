"""One way into a search: calibrate, fit the candidates, keep a budget, let selectors choose."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import nn

from decomposition import CandidateSet, CompressionPlan, FitLibrary, Inputs, apply_plan
from decomposition.fitting import CHOOSING
from decomposition.inputs import InputShape, input_shape_of
from decomposition.listing import CandidateLister
from rankrl.data import Preprocessing
from rankrl.errors import ConfigError
from rankrl.plan_search.clusters import open_cluster
from rankrl.plan_search.divergence import single_layer_divergences
from rankrl.plan_search.evaluator import Evaluator, PlanEvaluator
from rankrl.plan_search.history import EpisodeRow
from rankrl.plan_search.problem import SearchProblem
from rankrl.plan_search.rewards import Reward, create_reward
from rankrl.plan_search.run import SearchResult, choosing, run_search
from rankrl.plan_search.workers import WorkerCluster, Workers
from rankrl.progress import Progress, progress_bar
from rankrl.selectors import create_selector
from rankrl.wording import counted
from rankrl.workflow.blocks import block_removals
from rankrl.workflow.channels import channel_narrowings
from rankrl.workflow.finalists import best_finalist, finalists
from rankrl.workflow.latency import LatencyBudget
from rankrl.workflow.scoring import Scoring
from rankrl.workflow.search_options import CandidateOptions, SearchOptions

log = logging.getLogger(__name__)

Apply = Callable[[CompressionPlan], nn.Module]
"""From a plan to the compressed network."""


def calibrated_library(
    model: nn.Module,
    inputs: Sequence[Inputs],
    options: CandidateOptions,
    *,
    cache: Path | None,
    seed: int,
) -> FitLibrary:
    """Calibrate and return the library of fits; nothing is fitted yet.

    Args:
        model: The dense network.
        inputs: Batches of calibration inputs, at least one.
        options: Formats and effort.
        cache: Folder of fits that later runs reuse, or None.
        seed: Seed of the sampled patches.

    Raises:
        ConfigError: If a fraction of `options.channels` is out of range, or no channel or block can be
            removed.
        DecompositionError: If no layer can be decomposed.
    """
    return FitLibrary.calibrated(
        model,
        inputs[0],
        options.formats,
        inputs,
        weigh_outputs=options.weigh_outputs,
        skip=options.skip,
        only=options.only,
        precisions=options.precisions,
        tensorised=options.tensorised,
        multiple=options.multiple,
        **_removable(model, input_shape_of(inputs[0]), options),
        options=replace(CHOOSING, iterations=options.iterations),
        folder=cache,
        seed=seed,
    )


def _removable(model: nn.Module, input_shape: InputShape, options: CandidateOptions) -> dict[str, Any]:
    """Return which channels and blocks may go, as `FitLibrary` takes it."""
    found: dict[str, Any] = {}
    if options.channels:
        found["narrowings"] = channel_narrowings(model, input_shape, options.channels, options.multiple)
    if options.blocks:
        found["removals"] = block_removals(model, input_shape)
    return found


def check_reachable(
    model: nn.Module, input_shape: InputShape, candidates: CandidateOptions, search: SearchOptions
) -> None:
    """Refuse a budget that no plan can reach, whatever the weights; one in time cannot be told yet.

    Ranks are not rounded up to multiples here, so a budget that is passed may still be refused later.

    Args:
        model: The network, trained or not.
        input_shape: Shape of one input without the batch axis, or what else is known of the inputs.
        candidates: What may become of its layers.
        search: The budgets.

    Raises:
        ConfigError: The network has nothing to search over, or blocks may go and no budget says how many.
        DecompositionError: No plan can reach a budget, or no layer can be decomposed.
    """
    if candidates.blocks and not search.setting(candidates).measures:
        raise ConfigError(
            "decomposition.blocks removes as many blocks as a budget asks for, and there is none; set "
            "budget.latency, budget.macs or budget.params"
        )
    lister = CandidateLister.of_network(
        model,
        input_shape,
        candidates.formats,
        skip=candidates.skip,
        only=candidates.only,
        precisions=candidates.precisions,
        tensorised=candidates.tensorised,
        **_removable(model, input_shape, candidates),
    )
    SearchProblem.from_model(
        model,
        [lister.candidates(name, limit=candidates.candidates) for name in lister.specs],
        input_shape,
        params=search.kept_params,
        macs=search.macs,
        bytes=search.bytes,
    )


def session_on_inputs(
    model: nn.Module,
    inputs: Sequence[Inputs],
    scoring: Scoring,
    candidates: CandidateOptions,
    options: SearchOptions,
    *,
    cache: Path | None,
    seed: int,
    progress: Progress = None,
) -> SearchSession:
    """Return the session of a search over a network of the user's own.

    Args:
        model: The dense network.
        inputs: Batches of calibration inputs, at least one.
        scoring: What plans are scored by.
        candidates: What may become of its layers.
        options: Budget, reward, limits.
        cache: Folder of fits that later searches reuse, or None.
        seed: Seed of everything random.
        progress: As for `SearchSession`.

    Raises:
        ConfigError: The network has nothing to search over.
        DecompositionError: No plan can reach a budget, or no layer can be decomposed.
    """
    shape = input_shape_of(inputs[0])
    check_reachable(model, shape, candidates, options)
    library = calibrated_library(model, inputs, candidates, cache=cache, seed=seed)

    def applied(plan: CompressionPlan) -> nn.Module:
        weighed = candidates.weigh_outputs
        return apply_plan(model, plan, inputs, weigh_outputs=weighed, seed=seed, progress=progress)

    return SearchSession(
        model,
        library,
        scoring,
        options,
        candidates=candidates.candidates,
        input_shape=shape,
        apply=applied,
        progress=progress,
    )


class SearchSession:
    """Everything that searches over one network share: candidates, budget, evaluator, reward.

    Used as a context: worker processes end with the block. Whatever cannot work is refused when the block is
    entered, before the fits take their time.

    Args:
        model: The dense network.
        library: The fits of its layers.
        scoring: What plans are scored by.
        options: Budget, reward, limits.
        candidates: Candidate ranks a layer and format at most.
        input_shape: Shape of one input without the batch axis, or what else is known of the inputs.
        apply: From a plan to the compressed network as `scoring` takes it, for finalists.
        preprocessing: What the network's images go through, for a budget in time of files that do it
            themselves.
        progress: Where progress goes: None draws bars on a terminal, False shows nothing; a function is
            called with the stage, the number of its steps that are done and the number of all.

    Attributes:
        problem: What is searched over; set within the block, like the following.
        evaluator: Scores plans.
        reward: From scores to rewards.
        latency: The budget in time, if that is what is kept.

    Raises:
        ConfigError: An option is unknown or out of range (on entry).
        DecompositionError: No plan can reach the budget (on entry).
    """

    problem: SearchProblem
    evaluator: Evaluator
    reward: Reward
    latency: LatencyBudget | None

    def __init__(
        self,
        model: nn.Module,
        library: FitLibrary,
        scoring: Scoring,
        options: SearchOptions,
        *,
        candidates: int,
        input_shape: InputShape,
        apply: Callable[[CompressionPlan], Any],
        preprocessing: Preprocessing | None = None,
        progress: Progress = None,
    ) -> None:
        self.progress = progress
        self.model, self.library, self.scoring, self.options = model, library, scoring, options
        self.candidates, self.input_shape, self.apply = candidates, input_shape, apply
        self.preprocessing = preprocessing
        self._network_score: Callable[[Any], float] | None = None
        self._cluster: WorkerCluster | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with self._stack:  # which ends what was begun where something is refused
            self._prepare()
            self._stack = self._stack.pop_all()
        return self

    def _prepare(self) -> None:
        options = self.options
        if self.candidates < 1:
            raise ConfigError(f"decomposition.candidates must be at least 1, got {self.candidates}")
        unfitted = [self.library.unfitted(name, limit=self.candidates) for name in self.library.specs]
        if options.latency is None:
            self._problem(unfitted)
        self.scoring.check(self.model)
        if options.workers is not None:
            asked = Workers(options.workers, options.cluster, options.worker_cpus, options.worker_gpus)
            self._cluster = open_cluster(asked)
            self._stack.callback(self._cluster.close)
        sites = self._fitted(unfitted)
        self.latency = None
        if options.latency is None:
            self.problem = self._problem(sites, self.library)
        else:
            self.latency = self._latency_budget(sites, options.latency)
            self.problem = self.latency.problem(self.library)
        self.reward = create_reward(
            options.reward, budgeted=self.problem.budget is not None, **options.reward_options
        )
        scoring = self.scoring.evaluator(self.model, self.library, self.problem, cluster=self._cluster)
        self.evaluator = self._stack.enter_context(scoring)
        if isinstance(self.evaluator, PlanEvaluator):
            self.problem = replace(
                self.problem, divergences=partial(single_layer_divergences, self.evaluator)
            )

    def _problem(self, sites: Sequence[CandidateSet], library: FitLibrary | None = None) -> SearchProblem:
        """Return what is searched over where there is no budget in time."""
        options = self.options
        return SearchProblem.from_model(
            self.model,
            sites,
            self.input_shape,
            params=options.kept_params,
            macs=options.macs,
            bytes=options.bytes,
            library=library,
        )

    def _latency_budget(self, sites: Sequence[CandidateSet], fraction: float) -> LatencyBudget:
        """Return the budget in time."""
        return LatencyBudget(
            self.model,
            sites,
            self.input_shape,
            fraction,
            self.options.timing,
            self.preprocessing,
            further=self.options.further,
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def search(
        self,
        selector: str,
        selector_options: Mapping[str, Any],
        *,
        seed: int,
        folder: Path | None = None,
        anew_for_other_scores: bool = False,
        on_set_aside: Callable[[], None] | None = None,
        on_episode: Callable[[EpisodeRow], None] | None = None,
    ) -> SearchResult:
        """Let a selector look for the best plan; an interrupted search in `folder` is continued.

        Args:
            selector: Its name.
            selector_options: Its options.
            seed: Its seed.
            folder: Where the search keeps its state and `episodes.csv`; None keeps nothing.
            anew_for_other_scores: Whether a search in `folder` that scored plans otherwise is set aside for a
                new one; refused otherwise.
            on_set_aside: As for `run_search`.
            on_episode: Called with the row of every newly scored plan.

        Returns:
            The chosen plan and the record. Within a budget in time the plan keeps it when it is exported and
            timed; if none of the best does, the result says so (`missed`).

        Raises:
            ConfigError: The selector or an option is unknown, or an option is out of range.
            NonFiniteError: A score or reward is NaN or infinite.
        """
        options = self.options
        chosen = create_selector(
            selector, self.problem, seed=seed, episodes=options.episodes, **selector_options
        )
        with progress_bar("search", total=options.episodes, progress=self.progress) as bar:

            def show(row: EpisodeRow) -> None:
                bar.update(row.episode, best=row.best_reward)
                if on_episode is not None:
                    on_episode(row)

            result = run_search(
                self.problem,
                self.evaluator,
                chosen,
                episodes=options.episodes,
                reward=self.reward,
                seconds=options.seconds,
                patience=options.patience,
                folder=folder,
                resume=True,
                anew_for_other_scores=anew_for_other_scores,
                on_set_aside=on_set_aside,
                on_episode=show,
            )
        log.info(
            "search: %s (%s scored) in %.1f s, best reward %.4f",
            counted(len(result.rows), "episode"),
            counted(result.evaluations, "different plan"),
            result.seconds,
            result.best.reward,
        )
        if result.stopped_by == "interrupt":
            return result
        missed = None
        if self.latency is not None:
            timed = self.latency.holding(self.problem, result, options.finalists, folder=folder)
            rows, missed = timed.rows, timed.missed
            if missed is not None:
                log.warning(missed)
        else:
            rows = [result.best] if options.finalists == 1 else finalists(result, options.finalists)
        return choosing(self.problem, result, self._best_refit(result, rows), missed)

    def _best_refit(self, result: SearchResult, rows: Sequence[EpisodeRow]) -> EpisodeRow:
        """Return the row of the plan to apply, chosen by the networks that plans become if that is wanted."""
        if self.options.finalists == 1:
            return rows[0]
        if self._network_score is None:
            self._network_score = self.scoring.of_networks(self.model)
        score = self._network_score
        by = result.plan.chosen_by
        return best_finalist(self.problem, rows, lambda plan: score(self.apply(plan)), self.reward, by)

    def _fitted(self, unfitted: Sequence[CandidateSet]) -> list[CandidateSet]:
        sites: dict[str, CandidateSet] = {}
        with progress_bar("fit layers", total=len(unfitted), progress=self.progress) as bar:

            def finish(site: CandidateSet) -> None:
                sites[site.name] = site
                bar.advance()

            spread = None if self._cluster is None else self._cluster.spread
            self.library.fit_all(unfitted, finish, workers=spread)
        return [sites[site.name] for site in unfitted]
