"""Hold the arguments of one compress or search call, and open its search session."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from decomposition import list_heuristics
from decomposition.progress import Deadline, Progress
from rankrl.errors import ConfigError, counted
from rankrl.kits.kit import WrittenKit
from rankrl.networks.network import CandidateOptions, PricedNetwork, SearchableNetwork
from rankrl.onnx.runtimes import check_runtimes
from rankrl.options.decomposition import DecompositionOptions
from rankrl.options.search import CalibrationOptions
from rankrl.options.selectors import DEFAULT_SELECTOR
from rankrl.options.timing import LatencyOptions
from rankrl.plan_search.bounded_loss import MEASURE_PLANS, SearchCall
from rankrl.plan_search.latency_budget import LatencyBudget
from rankrl.plan_search.selectors import check_selector
from rankrl.plan_search.session import SearchGoal, SearchSession
from rankrl.runs.run_folder import COMPRESS
from rankrl.timing import suited_multiple

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """Decomposition options, goal and selector of one compress or search call."""

    goal: SearchGoal
    decomposition: DecompositionOptions
    selector: str = DEFAULT_SELECTOR
    selector_options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    cache: Path | None = None
    progress: Progress = None
    score_name: str | None = None
    overwrite: bool = False
    calibration: int = CalibrationOptions.images
    deadline: Deadline = field(default_factory=Deadline)

    def __post_init__(self) -> None:
        if self.deadline.seconds is None:  # a request is made when a call begins
            object.__setattr__(self, "deadline", Deadline(self.goal.search.seconds))

    @property
    def timing(self) -> LatencyOptions:
        return self.goal.timing

    @property
    def fits(self) -> Path | None:
        """Folder of fits and sensitivities, or None."""
        return None if self.cache is None else self.cache / "fits"

    def check(self) -> None:
        """Check the arguments that need neither network nor inputs."""
        if self.goal.needs_budget:
            raise ConfigError(
                "give a budget: params=0.4 keeps at most 40 % of the parameters; macs=, bytes=, latency= "
                "likewise"
            )
        check_runtimes(self.timing)
        check_selector(self.selector, self.selector_options, self.goal.setting(self.candidates()))

    def candidates(self) -> CandidateOptions:
        """Return the candidates of the layers, with ranks of any size unless the options restrict them."""
        return CandidateOptions.of(
            self.decomposition, self.goal.budget, reduce_range=self.timing.reduce_range
        )

    def timed_candidates(self) -> CandidateOptions:
        """Return the candidates of the layers; under a latency budget with ranks that suit the processor."""
        candidates = self.candidates()
        if self.goal.budget.latency is None or self.decomposition.rank_multiple is not None:
            return candidates
        return replace(candidates, multiple=suited_multiple(self.timing))

    def refitting(self) -> Request:
        """Return the same request with plans scored as refitted, where a data set's classifier allows it."""
        narrows = bool(self.decomposition.channels) or self.decomposition.blocks
        search = self.goal.search.resolved(refits=not narrows)
        return replace(self, goal=replace(self.goal, search=search))

    def fitted_to(self, images: int | None) -> Request:
        """Return the same request with layers fitted to this number of images of a data set, if given."""
        return self if images is None else replace(self, calibration=images)

    def timed_in(self, cache: Path | None, folder: Path | None) -> Request:
        """Return the same request with times kept in the cache, or without one in the search's folder."""
        return replace(self, goal=replace(self.goal, timing=self.timing.kept_in(cache, folder)))

    def stages(self, *, file: bool, tuned: bool = False, applied: bool = True) -> dict[str, float | None]:
        """Name the stages of a call and their costs next to one another, None for what nobody can expect."""
        budget, bounded = self.goal.budget, self.goal.budget.drop is not None
        rivals = bool({"latency", "bytes"} & budget.fractions.keys())
        stages: list[tuple[bool, str, float | None]] = [
            (file, "perturb nodes", 1.0),
            (budget.latency is not None, "time layers", 2.0),
            (True, "fit layers", 3.0),
            (bounded, MEASURE_PLANS, 3.0),
            (self.selector not in list_heuristics(), "search", None),
            (rivals and not bounded, MEASURE_PLANS, 1.0),
            (applied, "refit nodes" if file else "apply plan", 0.3),
            (tuned, "fine-tune", None),
            (applied, "finish", 0.3),
        ]
        return {name: cost for expected, name, cost in stages if expected}

    def search_call(self, folder: Path | None, **told: Any) -> SearchCall:
        """Return the call of the session's search, recorded in a folder; `told` are its other fields."""
        options = {"deadline": self.deadline, **told}
        return SearchCall(self.selector, self.selector_options, self.seed, folder, **options)

    def record(self, network: str) -> dict[str, Any]:
        """Return the arguments that a search depends on; data and score are in the search's own state."""
        goal = self.goal
        return {
            "task": COMPRESS,
            "network": network,
            **asdict(goal.budget),
            "episodes": goal.search.episodes,
            "timing": None if goal.budget.latency is None else goal.timing.record,
            "candidates": asdict(self.candidates()),
            "selector": self.selector,
            "selector options": {name: repr(value) for name, value in self.selector_options.items()},
            "seed": self.seed,
        }


def write_kit(
    network: PricedNetwork, candidates: CandidateOptions, request: Request, folder: Path
) -> WrittenKit:
    """Write the files of a network that a latency budget times into a folder, for another device."""
    library = network.library(candidates, cache=request.fits, seed=request.seed)
    sites = [library.unfitted(name, limit=candidates.candidates) for name in library.specs]
    kit = LatencyBudget(network, sites, 1.0, request.timing, library).kit.write(folder)
    log.info("%s of %.1f MB in %s", counted(kit.files, "file"), kit.bytes / 1e6, folder)
    return kit


def opened_session(
    network: SearchableNetwork, candidates: CandidateOptions, request: Request
) -> SearchSession:
    """Calibrate a network's layers and return the search session; nothing is fitted yet."""
    library = network.library(candidates, cache=request.fits, seed=request.seed)
    limit = candidates.candidates
    return SearchSession(
        network, library, request.goal, candidates=limit, progress=request.progress, deadline=request.deadline
    )
