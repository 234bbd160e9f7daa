"""Budgets in time: measured layers, and the promise that the exported network keeps the budget."""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from decomposition import (
    CandidateSet,
    CompressionPlan,
    DecompositionError,
    FitLibrary,
    LatencyTable,
    build_structure,
    factorised_layers,
    inspect_layers,
    plan_from_choices,
)
from rankrl.data import Preprocessing
from rankrl.export import compare_latency, export_network, measure_layer_latencies
from rankrl.export.latency import SMALLEST_CHANGE
from rankrl.files import write_json
from rankrl.operations import KeepChannels
from rankrl.plan_search.history import EpisodeRow
from rankrl.plan_search.problem import SearchProblem
from rankrl.plan_search.run import SearchResult, best_rows
from rankrl.progress import progress_bar
from rankrl.wording import counted
from rankrl.workflow.latency_fit import corrected

log = logging.getLogger(__name__)

_ADJUSTMENTS = 9
# A greedy plan that takes at least this share of the time allowed leaves little unused.
_CLOSE = 0.95
_PLANS_TRIED = 20
# Measured again, a plan that is this little too slow may keep the budget.
_HAIR = 1 + SMALLEST_CHANGE
# Sums of measured times are compared with their own, added up in another order.
_ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class TimedPlans:
    """The best plans of a search that keep a budget in time.

    Attributes:
        rows: Their rows, best first; if none keeps it, that of the fastest among the best plans.
        missed: What to tell a reader if none keeps it, else None.
    """

    rows: list[EpisodeRow]
    missed: str | None = None


@dataclass(frozen=True)
class LatencyOptions:
    """How time is measured; the exported network is timed alike.

    Attributes:
        batch: Inputs of a forward pass.
        threads: Threads of onnxruntime.
        runs: Timed passes.
        folder: Where tables of measured layers are kept for later runs, or None.
        preprocess: Whether the exported network normalises its images itself.
    """

    batch: int = 64
    threads: int = 1
    runs: int = 30
    folder: Path | None = None
    preprocess: bool = False


class LatencyBudget:
    """A budget in time for one network: the table of its layers, and whole networks timed beside it.

    Args:
        model: The dense network.
        sites: The candidates of its layers.
        input_shape: Shape of one input without the batch axis.
        fraction: Fraction of the dense network's time to keep at most, in (0, 1].
        options: How time is measured.
        preprocessing: What an exported network that preprocesses does to its images.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[CandidateSet],
        input_shape: Sequence[int],
        fraction: float,
        options: LatencyOptions,
        preprocessing: Preprocessing | None = None,
    ) -> None:
        self.model, self.sites, self.shape = model, list(sites), tuple(input_shape)
        self.fraction, self.options = fraction, options
        self.inside = preprocessing if options.preprocess else None

    def problem(self, library: FitLibrary) -> SearchProblem:
        """Return the search problem whose budget holds for greedy's plan when it is exported and timed.

        Where the fastest plan misses the budget by no more than what two timings of one file differ by, it is
        searched all the same.

        Layers measured alone do not quite add up to a network. The budget of the search is tightened or
        loosened until the greedy plan, exported as a whole, keeps the fraction that was asked for, and little
        less. What was found is kept beside the table of layers, so that a search is resumed with the same.

        Raises:
            DecompositionError: If no plan can reach the budget.
        """
        table = self._table()
        path = self._path(table, "budget", self.fraction)
        if path is not None and path.exists():
            return self._problem(table, float(json.loads(path.read_text(encoding="utf-8"))), library)
        least = table.budget(1.0, self.sites).least(table.attach(self.sites))
        wanted, holds, fails = max(self.fraction, min(1.0, least * _ROUNDING)), 0.0, float("inf")
        fastest, nearest = float("inf"), wanted
        for _ in range(_ADJUSTMENTS):
            problem = self._problem(table, wanted, library)
            kept = self.measured(problem.plan(problem.preset, "greedy"))
            if kept < fastest:
                fastest, nearest = kept, wanted
            log.info("latency: %.3f asked, %.3f expected, %.3f measured", self.fraction, wanted, kept)
            if kept <= self.fraction:
                holds = max(holds, wanted)
            else:
                fails = min(fails, wanted)
            if self.fraction * _CLOSE <= kept <= self.fraction or wanted == 1:
                break
            wanted = min(1.0, 0.99 * wanted * self.fraction / kept)
            if not holds < wanted < fails:
                wanted = (holds + min(fails, 1.0)) / 2
            wanted = max(wanted, min(1.0, least * _ROUNDING))
            if wanted >= fails or wanted <= holds:
                break
        if holds == 0.0 and fastest <= self.fraction * _HAIR:
            holds = nearest
        if holds == 0.0:
            raise DecompositionError(
                f"budget.latency={self.fraction} cannot be reached: the fastest plan takes {fastest:.3f} of "
                f"the dense network's time ({table.conditions}). Ask for that, or try another format"
            )
        if path is not None:
            write_json(path, holds)
        return self._problem(table, holds, library)

    def measured(self, plan: CompressionPlan) -> float:
        """Return the time of the network under a plan / that of the dense one, exported and timed in turns.

        The weights do not matter for that, so none are fitted.
        """
        compressed = build_structure(self.model, plan)
        for layer in factorised_layers(compressed).values():
            for parameter in layer.parameters():
                nn.init.normal_(parameter, std=0.1)
        shape, sizes = self.shape, self.inside
        if sizes is not None:
            shape = (sizes.height, sizes.width, sizes.channels)
        generator = np.random.default_rng(0)
        size = (self.options.batch, *shape)
        sample: np.ndarray = generator.standard_normal(size, dtype=np.float32)
        if sizes is not None:
            sample = generator.integers(256, size=size, dtype=np.uint8)
        with tempfile.TemporaryDirectory() as scratch:
            paths = Path(scratch) / "dense.onnx", Path(scratch) / "compressed.onnx"
            for network, path in zip((self.model, compressed), paths, strict=True):
                export_network(network, path, self.shape, [sample], preprocessing=self.inside)
            times = compare_latency(
                *paths, batch=self.options.batch, threads=self.options.threads, runs=self.options.runs
            )
        return 1 / times.ratio

    def holding(self, problem: SearchProblem, result: SearchResult, count: int) -> TimedPlans:
        """Export and time the best plans of a search, until enough of them keep the budget.

        Args:
            problem: What was searched over.
            result: The search.
            count: Rows to return at most.
        """
        found: list[EpisodeRow] = []
        tried = best_rows(result.rows, max(_PLANS_TRIED, count))
        nearest, least = tried[0], float("inf")
        for row in tried:
            kept = self.measured(problem.plan(row.key, result.plan.chosen_by))
            if kept < least:
                nearest, least = row, kept
            if kept <= self.fraction:
                found.append(row)
            if len(found) == count:
                break
        if found:
            return TimedPlans(found)
        return TimedPlans(
            [nearest],
            f"budget.latency={self.fraction} is missed: of the {counted(len(tried), 'best plan')} none is "
            f"that fast when it is exported. The fastest was taken; it keeps {least:.3f} of the dense "
            "network's time. Ask for a little less, measure on a quiet machine, or raise search.episodes",
        )

    def _path(self, table: LatencyTable, kind: str, *further: Any) -> Path | None:
        """Return where something that follows from a table and the candidates is kept, or None."""
        if self.options.folder is None:
            return None
        candidates = [[each.content() for each in site.candidates] for site in self.sites]
        losses = [site.losses.tolist() for site in self.sites]
        content = repr(
            (
                table.conditions,
                table.rest,
                table.sites,
                table.borders,
                candidates,
                losses,
                further,
                self.inside,
            )
        )
        return self.options.folder / f"{hashlib.sha256(content.encode()).hexdigest()[:24]}-{kind}.json"

    def _table(self) -> LatencyTable:
        with progress_bar("time layers", total=len(self.sites)) as bar:
            table = measure_layer_latencies(
                self.model,
                self.sites,
                self.shape,
                batch=self.options.batch,
                threads=self.options.threads,
                runs=self.options.runs,
                folder=self.options.folder,
                progress=lambda _: bar.advance(),
            )
        if not table.borders:
            return table
        path = self._path(table, "corrected")
        if path is not None and path.exists():
            return LatencyTable.load(path)
        specs = inspect_layers(self.model, self.shape)

        def measured(sites: Sequence[CandidateSet], choices: np.ndarray) -> float:
            plan = plan_from_choices(sites, choices, specs, self.shape, "a trial", keep=KeepChannels)
            return self.measured(plan)

        table = corrected(table, self.sites, measured)
        if path is not None:
            table.save(path)
        return table

    def _problem(self, table: LatencyTable, fraction: float, library: FitLibrary | None) -> SearchProblem:
        return SearchProblem.from_model(
            self.model,
            self.sites,
            self.shape,
            latency=fraction,
            latencies=table,
            library=library,
        )
