"""Budgets in time: measured layers, and the promise that the exported network keeps the budget."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from decomposition import (
    CompressionPlan,
    DecompositionError,
    FitLibrary,
    LatencyTable,
    RankCurve,
    build_structure,
    factorised_layers,
)
from rankrl.errors import ConfigError
from rankrl.export import compare_latency, export_onnx, measure_layer_latencies
from rankrl.plan_search.problem import SearchProblem
from rankrl.plan_search.run import SearchResult, best_rows
from rankrl.progress import progress_bar

log = logging.getLogger(__name__)

_ADJUSTMENTS = 5
# A greedy plan that takes at least this share of the time allowed leaves little unused.
_CLOSE = 0.95
_PLANS_TRIED = 20


@dataclass(frozen=True)
class LatencyOptions:
    """How time is measured; the exported network is timed alike.

    Attributes:
        batch: Inputs of a forward pass.
        threads: Threads of onnxruntime.
        runs: Timed passes.
        folder: Where tables of measured layers are kept for later runs, or None.
    """

    batch: int = 64
    threads: int = 1
    runs: int = 30
    folder: Path | None = None


class LatencyBudget:
    """A budget in time for one network: the table of its layers, and whole networks timed beside it.

    Args:
        model: The dense network.
        curves: The candidates of its layers.
        input_shape: Shape of one input without the batch axis.
        fraction: Fraction of the dense network's time to keep at most, in (0, 1].
        options: How time is measured.
    """

    def __init__(
        self,
        model: nn.Module,
        curves: Sequence[RankCurve],
        input_shape: Sequence[int],
        fraction: float,
        options: LatencyOptions,
    ) -> None:
        self.model, self.curves, self.shape = model, list(curves), tuple(input_shape)
        self.fraction, self.options = fraction, options

    def problem(self, library: FitLibrary) -> SearchProblem:
        """Return the search problem whose budget holds for greedy's plan when it is exported and timed.

        Layers measured alone do not quite add up to a network. The budget of the search is tightened or
        loosened until the greedy plan, exported as a whole, keeps the fraction that was asked for, and little
        less.

        Raises:
            DecompositionError: If no plan can reach the budget.
        """
        table = self._table()
        wanted, holds, fails = self.fraction, 0.0, float("inf")
        found: SearchProblem | None = None
        for _ in range(_ADJUSTMENTS):
            try:
                problem = self._problem(table, wanted, library)
            except DecompositionError as error:
                if found is not None:
                    break
                raise DecompositionError(
                    f"budget.latency={self.fraction}: {error} (as this machine's table of layers has it)"
                ) from error
            kept = self.measured(problem.plan(problem.preset, "greedy"))
            log.info("latency: %.3f asked, %.3f expected, %.3f measured", self.fraction, wanted, kept)
            if kept <= self.fraction:
                holds, found = wanted, problem
            else:
                fails = wanted
            if self.fraction * _CLOSE <= kept <= self.fraction or wanted == 1:
                break
            wanted = min(1.0, 0.99 * wanted * self.fraction / kept)
            if not holds < wanted < fails:
                wanted = (holds + min(fails, 1.0)) / 2
        return problem if found is None else found

    def measured(self, plan: CompressionPlan) -> float:
        """Return the time of the network under a plan / that of the dense one, exported and timed in turns.

        The weights do not matter for that, so none are fitted.
        """
        compressed = build_structure(self.model, plan)
        for layer in factorised_layers(compressed).values():
            for parameter in layer.parameters():
                nn.init.normal_(parameter, std=0.1)
        with tempfile.TemporaryDirectory() as scratch:
            paths = Path(scratch) / "dense.onnx", Path(scratch) / "compressed.onnx"
            for network, path in zip((self.model, compressed), paths, strict=True):
                export_onnx(network, path, self.shape)
            times = compare_latency(
                *paths, batch=self.options.batch, threads=self.options.threads, runs=self.options.runs
            )
        return 1 / times.ratio

    def first_that_holds(self, problem: SearchProblem, result: SearchResult) -> CompressionPlan:
        """Return the best plan of a search that keeps the budget when it is exported and timed.

        Raises:
            ConfigError: If none of the best plans does.
        """
        least = float("inf")
        for row in best_rows(result.rows, _PLANS_TRIED):
            plan = problem.plan_from_ranks(row.ranks_key, result.plan.chosen_by)
            kept = self.measured(plan)
            if kept <= self.fraction:
                return plan
            least = min(least, kept)
        raise ConfigError(
            f"budget.latency={self.fraction}: of the {_PLANS_TRIED} best plans none is that fast when it is "
            f"exported; the fastest keeps {least:.3f} of the dense network's time. Ask for a little less, "
            "measure on a quiet machine, or raise search.episodes"
        )

    def _table(self) -> LatencyTable:
        with progress_bar("time layers", total=len(self.curves)) as bar:
            return measure_layer_latencies(
                self.model,
                self.curves,
                self.shape,
                batch=self.options.batch,
                threads=self.options.threads,
                runs=self.options.runs,
                folder=self.options.folder,
                progress=lambda _: bar.advance(),
            )

    def _problem(self, table: LatencyTable, fraction: float, library: FitLibrary) -> SearchProblem:
        return SearchProblem.from_model(
            self.model,
            self.curves,
            self.shape,
            latency=fraction,
            latencies=table,
            library=library,
        )
