"""Prepare candidates, budget, evaluator and reward of one network, and run searches over them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from decomposition import CandidateSet, CompressionPlan, FitLibrary, list_heuristics
from decomposition.errors import DecompositionError
from decomposition.operations import computes_in_integers
from decomposition.plan.plan import LayerPlan
from decomposition.progress import Deadline, Progress, in_words, progress_bar
from rankrl.errors import ConfigError, counted
from rankrl.networks.network import CandidateOptions, PricedNetwork, SearchableNetwork
from rankrl.options.search import BudgetOptions, SearchOptions, objective_line
from rankrl.options.timing import LatencyOptions
from rankrl.plan_search.bounded_loss import (
    SearchCall,
    best_finalist,
    best_of_standard_plans,
    finalists,
    within_bounded_loss,
)
from rankrl.plan_search.latency_budget import LatencyBudget
from rankrl.plan_search.run import (
    ChosenPlan,
    SearchResult,
    layer_costs,
    run_search,
    with_row,
)
from rankrl.plan_search.scores.evaluation import (
    EpisodeRow,
    Evaluator,
    MeasuresDivergences,
    best_rows,
)
from rankrl.plan_search.scores.rewards import Reward, check_reward, create_reward, reward_source
from rankrl.plan_search.selectors import create_selector
from rankrl.plan_search.selectors.selector import heuristic_choices
from rankrl.plan_search.space.problem import SearchProblem, SearchSetting
from rankrl.workers.processes import WorkerCluster, Workers
from rankrl.workers.ray_cluster import open_cluster

log = logging.getLogger(__name__)

DEFAULT_KEPT_PARAMS = 0.4

_Chosen = TypeVar("_Chosen", bound=ChosenPlan)


@dataclass(frozen=True)
class SearchGoal:
    """Budget, limits, timing and reward of all searches of a session."""

    budget: BudgetOptions = field(default_factory=BudgetOptions)
    search: SearchOptions = field(default_factory=SearchOptions)
    timing: LatencyOptions = field(default_factory=LatencyOptions)
    reward: str = "accuracy"
    reward_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_reward(self.reward, self.reward_options)

    @property
    def needs_budget(self) -> bool:
        """Whether there is no budget although the reward ignores size."""
        return not self.budget.fractions and reward_source(self.reward).needs_budget

    @property
    def budget_numbers(self) -> dict[str, float | str]:
        """The budget that plans keep, as metrics.json has it: the default one where none is set."""
        return {"params": DEFAULT_KEPT_PARAMS} if self.needs_budget else self.budget.numbers

    def setting(self, candidates: CandidateOptions) -> SearchSetting:
        """Return the search's setting, as far as options alone decide it."""
        return SearchSetting(
            ("params",) if self.needs_budget else tuple(self.budget.fractions),
            bool(candidates.channels) or candidates.blocks,
            self.budget.latency is not None and computes_in_integers(candidates.precisions),
            self.search.workers is not None,
        )

    @property
    def counted(self) -> dict[str, float | None]:
        """Fractions of counted costs to keep; a reward that ignores size gets a default budget."""
        return {**self.budget.counted, **({"params": DEFAULT_KEPT_PARAMS} if self.needs_budget else {})}


def problem_of(
    network: PricedNetwork,
    sites: Sequence[CandidateSet],
    goal: SearchGoal,
    library: FitLibrary | None = None,
) -> SearchProblem:
    """Build the search problem of a network without a latency budget."""
    return SearchProblem.from_costs(
        network.specs,
        sites,
        network.input_shape,
        network.costs,
        network.fractions(goal.counted),
        library=library,
        preparation=network.preparation,
    )


def check_reachable(network: PricedNetwork, candidates: CandidateOptions, goal: SearchGoal) -> None:
    """Refuse a budget that no plan can reach, whatever the weights; a latency budget cannot be checked yet.

    Ranks are not rounded up to multiples here, and layers that do not suit integers still count, so a budget
    that passes may be refused later.
    """
    if candidates.blocks and not goal.setting(candidates).measures:
        raise ConfigError(
            "decomposition.blocks removes as many blocks as a budget asks for, and there is none; set "
            "budget.latency, budget.macs or budget.params"
        )
    lister = network.lister(candidates)
    sites = [lister.candidates(name, limit=candidates.candidates) for name in lister.specs]
    for name, precisions in lister.left_out().items():
        level = logging.WARNING if len(lister.formats) == 1 else logging.INFO
        log.log(level, "layers in %s cannot be %s: no such candidate is taken", name, " or ".join(precisions))
    try:
        problem_of(network, sites, goal)
    except DecompositionError as error:
        if network.caveat is None:
            raise
        raise DecompositionError(f"{error}. {network.caveat}") from error


class SearchSession:
    """Everything that searches over one network share: candidates, budget, evaluator, reward.

    Used as a context: worker processes end with the block. Invalid options are refused when the block is
    entered, before layers are fitted.
    """

    problem: SearchProblem
    reward: Reward
    latency: LatencyBudget | None

    def __init__(
        self,
        network: SearchableNetwork,
        library: FitLibrary,
        goal: SearchGoal,
        *,
        candidates: int,
        progress: Progress = None,
        deadline: Deadline | None = None,
    ) -> None:
        self.progress = progress
        self.deadline = Deadline() if deadline is None else deadline
        self.network, self.library, self.goal = network, library, goal
        self.scoring = network.scoring
        self.candidates = candidates
        self._network_scores: dict[tuple[LayerPlan, ...], float] = {}
        self._cluster: WorkerCluster | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with self._stack:  # closes workers and evaluator if `_prepare` raises
            self._prepare()
            self._stack = self._stack.pop_all()
        return self

    def _prepare(self) -> None:
        goal, search = self.goal, self.goal.search
        latency = goal.budget.latency
        if self.candidates < 1:
            raise ConfigError(f"decomposition.candidates must be at least 1, got {self.candidates}")
        unfitted = [self.library.unfitted(name, limit=self.candidates) for name in self.library.specs]
        if goal.budget.memory is not None:
            unfitted = self.network.dense_graph().within(unfitted, goal.budget.memory)
        if latency is None:
            problem_of(self.network, unfitted, goal)
        self.scoring.check()
        if search.workers is not None:
            asked = Workers(search.workers, search.cluster, search.worker_cpus, search.worker_gpus)
            self._cluster = open_cluster(asked)
            self._stack.callback(self._cluster.close)
        self.latency = None
        if latency is None:
            self.problem = problem_of(self.network, self._fitted(unfitted), goal, self.library)
        else:
            self.latency = LatencyBudget(
                self.network, unfitted, latency, goal.timing, self.library, counted=goal.budget.counted
            )
            self.latency.fit(self._fitted)  # times need no weights, and slow candidates no fit
            bounded = goal.budget.drop is not None
            self.problem = (self.latency.unbounded if bounded else self.latency.problem)(self.library)
        self.reward = create_reward(
            goal.reward, budgeted=self.problem.budget is not None, **goal.reward_options
        )
        if self._cluster is None:
            self.problem = replace(self.problem, divergences=self._divergences)

    @cached_property
    def evaluator(self) -> Evaluator:
        """The evaluator of plans, made for the first plan that is scored: a rule needs none."""
        evaluator = self.scoring.evaluator(self.library, self.problem, cluster=self._cluster)
        return self._stack.enter_context(evaluator)

    def _divergences(self, batches: int) -> list[np.ndarray] | None:
        evaluator = self.evaluator
        return evaluator.divergences(batches) if isinstance(evaluator, MeasuresDivergences) else None

    @cached_property
    def _of_network(self) -> Callable[[Any], float]:
        return self.scoring.of_networks()

    def network_score(self, plan: CompressionPlan) -> float:
        """Apply and refit a plan and return the network's score; each plan is scored once."""
        if plan.layers not in self._network_scores:
            self._network_scores[plan.layers] = self._of_network(self.applied(plan))
        return self._network_scores[plan.layers]

    def applied(self, plan: CompressionPlan) -> Any:
        """Apply and refit a plan."""
        return self.network.applied(plan, self.library)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def search(self, call: SearchCall) -> SearchResult:
        """Search with a selector for the best plan; an interrupted search in a folder is resumed."""
        return self._described(self._ended(call), call)

    def choose(self, call: SearchCall) -> ChosenPlan:
        """Choose a plan to apply: by a rule, from candidates and budget alone, or by a search."""
        ruled = call.selector in list_heuristics()
        return self._described(self._ruled(call) if ruled else self._ended(call), call)

    def _described(self, chosen: _Chosen, call: SearchCall) -> _Chosen:
        if call.deadline.stopped and chosen.stopped_by != "interrupt":
            limit = call.deadline.seconds
            log.warning("search.seconds=%s is over: the best plan measured so far is taken", limit)
            chosen = replace(chosen, stopped_by="seconds")
        estimate = None if self.latency is None else self.latency.estimate(self.problem, chosen.key)
        problem, cost = self.problem, self.problem.cost(chosen.key)
        ratios = {"params": problem.params / cost.params, "macs": problem.macs / cost.macs}
        return replace(chosen, layers=layer_costs(problem, chosen.key), ratios=ratios, estimate=estimate)

    def _ruled(self, call: SearchCall) -> ChosenPlan:
        """Return the plan of a rule; nothing is scored but the plans that rival it in time or bytes."""
        self._announce(call.selector, {})
        drop, problem = self.goal.budget.drop, self.problem
        if drop is not None:
            result = within_bounded_loss(self, call, drop)
            return ChosenPlan(plan=result.plan, key=result.key, measured=result.measured)
        key = heuristic_choices(problem, call.selector)
        missed = None
        if self.latency is not None:
            missed = self.latency.timed_plans(problem, [key], 1, folder=call.folder).missed
            if missed is not None:
                log.warning(missed)
        chosen = ChosenPlan(plan=problem.plan(key, call.selector), key=key, missed=missed)
        return best_of_standard_plans(self, chosen, call)

    def _ended(self, call: SearchCall) -> SearchResult:
        """Search, and return the best of the plans that were applied."""
        if self.goal.budget.drop is not None:
            return within_bounded_loss(self, call, self.goal.budget.drop)
        result = self.searched(self.problem, call)
        if result.stopped_by == "interrupt":
            return result
        count, missed = self.goal.search.scores().finalists, None
        if self.latency is not None:
            best = best_rows(result.rows, len(result.rows))
            timed = self.latency.timed_plans(
                self.problem, [row.key for row in best], count, folder=call.folder
            )
            rows, missed = [row for row in best if row.key in timed.keys], timed.missed
            if missed is not None:
                log.warning(missed)
        else:
            rows = [result.best] if count == 1 else finalists(result, count)
        if call.deadline.over():
            rows = rows[:1]
        refitted = with_row(self.problem, result, self._best_refit(result, rows), missed)
        return best_of_standard_plans(self, refitted, call)

    def searched(self, problem: SearchProblem, call: SearchCall) -> SearchResult:
        """Run the selector on a problem with the session's candidates, without applying any plan."""
        options = self.goal.search
        selector = create_selector(
            call.selector, problem, seed=call.seed, episodes=options.episodes, **call.selector_options
        )
        objective = {"reward": str(self.reward), "metric": self.scoring.metric_name}
        if selector.action_kind is not None:
            objective["action"] = selector.action_kind
        self._announce(call.selector, objective)
        with progress_bar("search", total=options.episodes, progress=self.progress) as bar:

            def show(row: EpisodeRow) -> None:
                bar.update(row.episode, best=row.best_reward)
                if call.on_episode is not None:
                    call.on_episode(row)

            result = run_search(
                problem,
                self.evaluator,
                selector,
                episodes=options.episodes,
                reward=self.reward,
                deadline=call.deadline,
                patience=options.patience,
                plans=options.plans,
                folder=call.folder,
                resume=True,
                anew_for_other_scores=call.anew_for_other_scores,
                on_set_aside=call.on_set_aside,
                on_episode=show,
                on_update=call.on_update,
            )
        log.info(
            "search: %s (%s scored) in %.1f s, best reward %.4f (reward %s, metric %s)",
            counted(len(result.rows), "episode"),
            counted(result.evaluations, "different plan"),
            result.seconds,
            result.best.reward,
            objective["reward"],
            objective["metric"],
        )
        return replace(result, objective=objective)

    def _announce(self, selector: str, objective: Mapping[str, str]) -> None:
        default = " (the default, as the reward ignores size)" if self.goal.needs_budget else ""
        line = objective_line(objective, self.goal.budget_numbers)
        log.info("search: selector %s, %s%s", selector, line, default)

    def _best_refit(self, result: SearchResult, rows: Sequence[EpisodeRow]) -> EpisodeRow:
        """Return the row of the plan to apply: of several, the one whose refitted network is best."""
        if len(rows) == 1:
            return rows[0]
        by = result.plan.chosen_by
        return best_finalist(self.problem, rows, self.network_score, self.reward, by)

    def _fitted(self, unfitted: Sequence[CandidateSet]) -> list[CandidateSet]:
        sites: dict[str, CandidateSet] = {}
        before = self.deadline.elapsed
        with progress_bar("fit layers", total=len(unfitted), progress=self.progress) as bar:

            def finish(site: CandidateSet) -> None:
                sites[site.name] = site
                bar.advance()
                done, count, elapsed = len(sites), len(unfitted), self.deadline.elapsed
                if done < count and self.deadline.over():
                    needed = before + (elapsed - before) * count / done
                    raise ConfigError(
                        f"search.seconds={self.deadline.seconds:g} is over with {done} of {count} layers "
                        f"fitted, and no plan chosen; all of them take about {in_words(needed)}. Raise it: "
                        "fits are kept where there is a cache"
                    )

            spread = None if self._cluster is None else self._cluster.spread
            self.library.fit_all(unfitted, finish, workers=spread)
        fitted = [sites[site.name] for site in unfitted]
        network = self.network
        unbounded = SearchProblem.from_costs(
            network.specs, fitted, network.input_shape, network.costs, {}, library=self.library
        )
        importance = {each.name: each.importance for each in self.scoring.weighed(self.library, unbounded)}
        return [replace(site, importance=importance.get(site.name, site.importance)) for site in fitted]
