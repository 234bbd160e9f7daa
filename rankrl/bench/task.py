"""RankBench's tasks for agents, selectors and Optuna: scores come from a table or its surrogate."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from decomposition.registry import did_you_mean
from rankrl.bench.table import Table, read_tables
from rankrl.errors import ConfigError
from rankrl.options.search import SearchOptions
from rankrl.options.selectors import ActionKind, Feature
from rankrl.plan_search.bounded_loss import SearchCall
from rankrl.plan_search.envs.actions import ActionMap, create_action_map
from rankrl.plan_search.envs.rank_selection import RankSelectionEnv
from rankrl.plan_search.run import SearchResult, run_search
from rankrl.plan_search.scores.evaluation import RememberingEvaluator
from rankrl.plan_search.selectors import create_selector
from rankrl.plan_search.space.problem import Choices
from rankrl.task import PlanTask

if TYPE_CHECKING:
    from optuna.trial import BaseTrial

log = logging.getLogger(__name__)

LEAST_CORRELATION = 0.8
"""Spearman's correlation on plans left out below which a surrogate does not answer."""


class BenchTask(PlanTask):
    """A task of RankBench: the choice of a plan, where scores are looked up or predicted.

    Plans of the table have their measured scores, others those of the table's `Surrogate`, if it predicts
    plans that it does not know at a rank correlation of at least 0.8. A plan's reward is what it scores more
    than greedy's.

    Attributes:
        table: The measured plans.
        problem: Layers, candidates, costs and budget.
    """

    def __init__(self, table: Table) -> None:
        super().__init__(table.problem)
        self.table = table

    @property
    def name(self) -> str:
        """The task's name."""
        return self.table.name

    @cached_property
    def correlation(self) -> float:
        """Spearman's correlation of predicted with measured scores, on plans that a fit leaves out."""
        known = self.table.about.get("correlation")
        return self.table.surrogates["scores"].correlation if known is None else float(known)

    @property
    def answers(self) -> bool:
        """Whether plans that the table lacks have a score."""
        return self.correlation >= LEAST_CORRELATION

    def measured(self, choices: Sequence[int]) -> bool:
        """Whether the table holds the plan."""
        return self.problem.checked(choices) in self.table.rows

    def judged(self, choices: Sequence[int]) -> float:
        """Score a plan on inputs that no search sees, after the refit."""
        return self._look_up("judged", self.problem.checked(choices))[0]

    def uncertainty(self, choices: Sequence[int]) -> float:
        """Return the standard deviation of the plan's score; 0 where the table holds it."""
        return self._look_up("scores", self.problem.checked(choices))[1]

    def regret(self, choices: Sequence[int]) -> float:
        """Return how much more the best plan of the table scores on inputs that no search sees."""
        return float(self.table.judged.max()) - self.judged(choices)

    def search(self, selector: str, plans: int, *, seed: int = 0, **options: Any) -> SearchResult:
        """Search with a selector of ours or a plugin.

        Args:
            selector: Its name.
            plans: Number of plans that it proposes, repeated ones included.
            seed: Seed of its draws.
            **options: The selector's own.
        """
        return self.searched(SearchOptions(episodes=plans), SearchCall(selector, options, seed))

    def searched(self, limits: SearchOptions, call: SearchCall) -> SearchResult:
        """Search as a session does: recorded and resumed in the call's folder, if it names one."""
        known = create_selector(
            call.selector, self.problem, seed=call.seed, episodes=limits.episodes, **call.selector_options
        )
        return run_search(
            self.problem,
            _TableEvaluator(self),
            known,
            episodes=limits.episodes,
            plans=limits.plans,
            patience=limits.patience,
            deadline=call.deadline,
            folder=call.folder,
            resume=True,
        )

    def objective(self, trial: BaseTrial) -> float:
        """Score the plan that Optuna suggests; maximise it."""
        return self.score(self.suggested(trial))

    def suggested(self, trial: BaseTrial) -> Choices:
        """Return the plan of a trial, also a finished one, which has an importance in [-1, 1] for each layer.

        Every plan spends the budget; without one, these numbers are the layers' ranks themselves.
        """
        suggested = [trial.suggest_float(name, -1.0, 1.0) for name in self.problem.names]
        return self.problem.checked(self._map.choices_of(np.array(suggested, dtype=np.float32)))

    @cached_property
    def _map(self) -> ActionMap:
        return create_action_map(self.problem, None)

    def _evaluate(self, choices: Choices) -> tuple[float, float]:
        score = self._look_up("scores", choices)[0]
        return score, score - float(self.table.scores[0])

    def _look_up(self, values: str, choices: Choices) -> tuple[float, float]:
        """Return a value of a plan and its standard deviation."""
        row = self.table.rows.get(choices)
        if row is not None:
            return float(getattr(self.table, values)[row]), 0.0
        if not self.answers:
            raise ConfigError(
                f"task {self.name!r} has no row of the plan {list(choices)}, and its surrogate's correlation "
                f"is {self.correlation:.2f}, less than {LEAST_CORRELATION}; take a plan of task.table.choices"
            )
        mean, deviation = self.table.surrogates[values].predict(np.array([choices]))
        return float(mean[0]), float(deviation[0])


class _TableEvaluator(RememberingEvaluator):
    """Scores the plans of a search from a table."""

    def __init__(self, task: BenchTask) -> None:
        super().__init__(task.problem)
        self._task = task

    @property
    def fingerprint(self) -> str:
        """Hash of the problem and the number of plans."""
        return f"{self.problem.fingerprint}-{len(self._task.table)}"

    def value(self, choices: Choices) -> float:
        """Look up or predict the score."""
        return self._task.score(choices)


def bench_tasks(
    family: str | None = None, network: str | None = None, path: str | Path | None = None
) -> list[str]:
    """List the names of RankBench's tasks, all or those of a family of networks or of one network."""
    tasks = read_tables(path).tasks
    return [
        name
        for name, entry in tasks.items()
        if family in (None, entry["family"]) and network in (None, entry["network"])
    ]


def bench_task(name: str, path: str | Path | None = None) -> BenchTask:
    """Read a task of RankBench.

    Args:
        name: One of `bench_tasks()`.
        path: Another file than the one in the folder RANKRL_DATA, or that which comes with rankrl.

    Raises:
        ConfigError: There is no such task, or the file is damaged.
    """
    return BenchTask(read_tables(path).table(name))


def answering_tasks(names: Sequence[str], path: str | Path | None = None) -> list[BenchTask]:
    """Read the tasks of some names or patterns, such as `separable *`, that score every plan."""
    known, found = bench_tasks(path=path), {}
    for pattern in names:
        for name in [each for each in known if fnmatchcase(each, pattern)] or [pattern]:
            found[name] = bench_task(name, path)
    answering = [task for task in found.values() if task.answers]
    for task in found.values():
        if task not in answering:
            log.warning("%s: its surrogate does not answer, so it is left out", task.name)
    if not answering:
        raise ConfigError(
            f"none of the tasks {list(names)} scores plans that its table lacks, as a search needs; "
            "rankrl.bench.bench_tasks() lists them all"
        )
    return answering


class BenchEnv(RankSelectionEnv):
    """`rankrl/RankBench-v0`: an episode chooses a plan for one of RankBench's tasks.

    The reward at its end is the plan's score less greedy's. The task is drawn at `reset`, or named by
    `reset(options={"task": NAME})`.

    Args:
        task: A task's name; None for `tasks`.
        tasks: Several names; None for all tasks that score every plan.
        action: As in `RankSelectionEnv`.
        features: As in `RankSelectionEnv`; what several networks share by default.

    Raises:
        ConfigError: There is no such task.
    """

    def __init__(
        self,
        task: str | None = None,
        tasks: Sequence[str] | None = None,
        *,
        action: ActionKind | None = None,
        features: Sequence[Feature] = ("macs", "curve", "descriptors"),
        path: str | Path | None = None,
    ) -> None:
        if task is None and tasks is None:
            found = answering_tasks(["*"], path)
        else:
            found = [bench_task(name, path) for name in (tasks or [] if task is None else [task])]
        self.names = tuple(each.name for each in found)
        super().__init__(
            [each.problem for each in found],
            [each.reward for each in found],
            action=action,
            features=features,
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin an episode; the option `task` is the name of one of the tasks, or its number."""
        asked = dict(options or {})
        name = asked.get("task")
        if isinstance(name, str):
            if name not in self.names:
                raise ConfigError(
                    f"the environment has no task {name!r}; it has {', '.join(self.names)}."
                    f"{did_you_mean(name, self.names)}"
                )
            asked["task"] = self.names.index(name)
        return super().reset(seed=seed, options=asked)
