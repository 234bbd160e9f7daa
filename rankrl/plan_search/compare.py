"""Compare selectors with the same fits, evaluator, number of evaluations and fine-tuning."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from decomposition import CompressionPlan
from decomposition.cache import Cache, digest
from decomposition.progress import Deadline
from rankrl.data import ImageData
from rankrl.errors import ConfigError
from rankrl.models.classifiers import network_digest
from rankrl.options.search import SearchOptions
from rankrl.plan_search.bounded_loss import SearchCall
from rankrl.plan_search.run import SearchResult
from rankrl.plan_search.selectors import SelectorEntry, create_selector, selector_class
from rankrl.plan_search.session import SearchSession
from rankrl.plan_search.space.problem import SearchProblem
from rankrl.report.comparison import ComparisonRow
from rankrl.training import TrainingRecipe
from rankrl.training.networks import run_training
from rankrl.verify.measure import test_accuracy

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ComparedSearch:
    """One search of a comparison."""

    entry: SelectorEntry
    seed: int | None

    @property
    def folder_name(self) -> str:
        """Name of the folder that its search is kept in."""
        name = self.entry.folder_name
        return name if self.seed is None else f"{name}-{self.seed}"


def compared_searches(entries: Sequence[SelectorEntry], seeds: Sequence[int]) -> list[ComparedSearch]:
    """List the searches: every seeded selector with every seed, deterministic selectors once."""
    if not entries or not seeds:
        raise ConfigError("compare.selectors and compare.seeds must each hold at least one entry")
    if min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise ConfigError(f"compare.seeds must be different whole numbers >= 0, got {list(seeds)}")
    return [
        ComparedSearch(entry, seed)
        for entry in entries
        for seed in (seeds if selector_class(entry.selector).seeded else (None,))
    ]


def compare_selectors(
    session: SearchSession, entered: Sequence[ComparedSearch], folder: Path, final: FinalTest | None
) -> tuple[SearchResult, list[ComparisonRow]]:
    """Run every search and test its plan; return the one with the best reward, and a row for each."""

    def search(call: SearchCall) -> SearchResult:
        session.evaluator.restore({})  # one selector's scores would save the next one evaluations
        return session.search(call)

    results = search_all(session.problem, session.goal.search, search, entered, folder)
    return winner(results), tested(session, results, final)


def search_all(
    problem: SearchProblem,
    limits: SearchOptions,
    search: Callable[[SearchCall], SearchResult],
    searches: Sequence[ComparedSearch],
    folder: Path | None = None,
) -> dict[ComparedSearch, SearchResult]:
    """Run every search; with a folder, read finished ones and resume an interrupted one."""
    for compared in searches:
        if compared.seed is not None:  # deterministic selectors fail quickly and are slow to make
            entry = compared.entry
            create_selector(entry.selector, problem, episodes=limits.episodes, **entry.options)
    results = {}
    for number, compared in enumerate(searches, 1):
        log.info("compare: %s (%d of %d)", compared.folder_name, number, len(searches))
        own, entry = folder and folder / compared.folder_name, compared.entry
        deadline = Deadline(limits.seconds)
        call = SearchCall(entry.selector, entry.options, compared.seed or 0, own, deadline=deadline)
        results[compared] = search(call)
        if results[compared].stopped_by == "interrupt":
            raise KeyboardInterrupt
        if own is not None:
            results[compared].plan.save(own / "plan.json")
    return results


@dataclass(frozen=True)
class FinalTest:
    """Measures test accuracies of plans: applied, then fine-tuned, all by the same recipe."""

    data: ImageData
    teacher: nn.Module
    recipe: TrainingRecipe | None
    folder: Path

    def accuracies(self, session: SearchSession, plan: CompressionPlan) -> tuple[float, float | None]:
        """Return the test accuracy of a plan before and, if there is a recipe, after fine-tuning."""
        recipe = None if self.recipe is None else asdict(self.recipe)
        operations = [[operation.to_dict() for operation in layer.operations] for layer in plan]
        key = digest(session.problem.fingerprint, operations, recipe, network_digest(self.teacher))
        state = self.folder / f"{key}.safetensors"

        def tested() -> tuple[float, float | None]:
            network = session.applied(plan)
            before, after = test_accuracy(network, self.data), None
            if self.recipe is not None:
                run_training(
                    "fine-tune", network, self.data, self.recipe, state_file=state, teacher=self.teacher
                )
                after = test_accuracy(network, self.data)
            return before, after

        before, after = Cache(self.folder).value("accuracies", key, tested)
        state.unlink(missing_ok=True)
        return before, after


def winner(results: Mapping[ComparedSearch, SearchResult]) -> SearchResult:
    """Return the result whose plan has the best reward; the first of equals."""
    return max(results.values(), key=lambda result: result.row.reward)


def tested(
    session: SearchSession, results: Mapping[ComparedSearch, SearchResult], final: FinalTest | None
) -> list[ComparisonRow]:
    """Return the comparison's rows: every search with the test accuracies of its plan, if it is applied."""
    rows = []
    for compared, result in results.items():
        before, after = (None, None) if final is None else final.accuracies(session, result.plan)
        if before is not None:
            shown = before if after is None else after
            log.info("compare: %s: test accuracy %.4f", compared.folder_name, shown)
        accuracies = {"test_accuracy": before, "finetuned_accuracy": after}
        rows.append(compared_row(compared, result, heldout_accuracy=result.row.accuracy, **accuracies))
    return rows


def compared_row(compared: ComparedSearch, result: SearchResult, **known: Any) -> ComparisonRow:
    """Return the comparison's row of a search; `known` is what was measured of its plan."""
    accuracies = dict.fromkeys(("heldout_accuracy", "test_accuracy", "finetuned_accuracy"))
    return ComparisonRow(
        selector=compared.entry.text,
        seed=compared.seed,
        best_reward=result.row.reward,
        params_kept=result.row.params_kept,
        macs_kept=result.row.macs_kept,
        episodes=len(result.rows),
        evaluations=result.evaluations,
        seconds=result.seconds,
        best_rewards=tuple(row.best_reward for row in result.different),
        **{**accuracies, **known},
    )
