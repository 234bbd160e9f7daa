"""A search over a network in an ONNX file: the same session as for PyTorch networks."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from decomposition import CandidateSet, CompressionPlan, FitLibrary, FitOptions
from decomposition.errors import DecompositionError
from decomposition.fitting import CHOOSING
from decomposition.listing import CandidateLister
from decomposition.operations.quantise import computes_in_integers
from rankrl.files import atomic_path
from rankrl.onnx_graph.budget import OnnxLatencyBudget
from rankrl.onnx_graph.capture import collect_moments
from rankrl.onnx_graph.given import GivenFile
from rankrl.onnx_graph.inputs import add_to_digest
from rankrl.onnx_graph.integers import without_integers
from rankrl.onnx_graph.network import Feed, OnnxNetwork
from rankrl.onnx_graph.rewrite import MARKED
from rankrl.onnx_graph.scoring import OnnxPlanEvaluator, OnnxScoring, single_node_divergences
from rankrl.onnx_graph.sensitivity import METHOD, collect_sensitivities
from rankrl.onnx_graph.site import SiteModules
from rankrl.plan_search.problem import SearchProblem
from rankrl.progress import progress_bar
from rankrl.workflow.latency import LatencyBudget
from rankrl.workflow.search_options import CandidateOptions, SearchOptions
from rankrl.workflow.session import SearchSession

log = logging.getLogger(__name__)


class OnnxSearchSession(SearchSession):
    """Everything that searches over one network in an ONNX file share.

    Args:
        given: The network and its inputs.
        library: The fits of its nodes.
        scoring: What plans are scored by.
        options: Budget, reward, limits.
        candidates: Candidate ranks a node and format at most.
        feed: The batch that is timed.
        apply: From a plan to the compressed network, for finalists.
        beside: Time of the network / that of the original, where that is another one.
    """

    def __init__(
        self,
        given: GivenFile,
        library: FitLibrary,
        scoring: OnnxScoring,
        options: SearchOptions,
        *,
        candidates: int,
        feed: Feed,
        apply: Callable[[CompressionPlan], OnnxNetwork],
        beside: float = 1.0,
    ) -> None:
        super().__init__(
            nn.Identity(),  # there is no module
            library,
            scoring,
            options,
            candidates=candidates,
            input_shape=given.shape,
            apply=apply,
        )
        self.given, self.feed, self.beside = given, feed, beside

    def _prepare(self) -> None:
        super()._prepare()
        self.problem = replace(self.problem, divergences=self._divergences)

    def _divergences(self, batches: int) -> list[np.ndarray]:
        """Measure what compressing each node alone does; not on what results are compared on."""
        split, evaluator = self.given.split, self.evaluator
        assert isinstance(evaluator, OnnxPlanEvaluator)
        feeds = (split.scored or split.calibration)[:batches]
        scoring = OnnxScoring(self.given.network, self.given.sites, feeds)
        return single_node_divergences(evaluator.graph, scoring)

    def _problem(self, sites: Sequence[CandidateSet], library: FitLibrary | None = None) -> SearchProblem:
        return _problem(self.given, sites, self.options, library)

    def _latency_budget(self, sites: Sequence[CandidateSet], fraction: float) -> LatencyBudget:
        given, options = self.given, self.options
        return OnnxLatencyBudget(
            given.network,
            given.sites,
            self.library,
            sites,
            given.totals,
            fraction,
            options.timing,
            self.feed,
            given.fractions(options.further),
            self.beside,
        )


def _problem(
    given: GivenFile, sites: Sequence[CandidateSet], search: SearchOptions, library: FitLibrary | None = None
) -> SearchProblem:
    fractions = given.fractions({**search.further, "params": search.kept_params})
    specs = [site.spec for site in given.sites]
    return SearchProblem.from_costs(specs, sites, given.shape, given.totals, fractions, library=library)


def check_reachable(given: GivenFile, candidates: CandidateOptions, search: SearchOptions) -> None:
    """Refuse a budget that no plan can reach, before anything is measured; one in time cannot be told yet.

    Ranks are not rounded up to multiples here, nor are nodes left out that integers do not suit, so a budget
    that is passed may still be refused later.

    Args:
        given: The network and its inputs.
        candidates: What may become of its nodes.
        search: The budgets.

    Raises:
        OnnxGraphError: No node can be compressed; the message gives the reasons.
        DecompositionError: No plan can reach a budget.
    """
    specs = [site.spec for site in given.usable]
    lister = CandidateLister(specs, candidates.formats, precisions=candidates.precisions)
    sites = [lister.candidates(spec.name, limit=candidates.candidates) for spec in specs]
    try:
        _problem(given, sites, search)
    except DecompositionError as error:
        if given.foreign is None:
            raise
        raise DecompositionError(f"{error}. {given.foreign}") from error


def fit_library(
    given: GivenFile,
    candidates: CandidateOptions,
    *,
    options: FitOptions = CHOOSING,
    folder: Path | None = None,
    seed: int = 0,
) -> FitLibrary:
    """Calibrate the nodes and return the library of their fits; nothing is fitted yet.

    Args:
        given: The network and its inputs.
        candidates: What may become of its nodes.
        options: How much work each fit may do.
        folder: Where fits and sensitivities are kept for later runs, or None.
        seed: Seed of patches and perturbations.

    Raises:
        OnnxGraphError: No node can be compressed; the message gives the reasons.
    """
    usable, batches = given.usable, given.split.calibration
    moments = collect_moments(given.network, usable, batches, seed=seed)
    sensitivities = (
        measured_sensitivities(given, folder=folder, seed=seed) if candidates.weigh_outputs else {}
    )
    return FitLibrary(
        SiteModules({site.name: site.module(MARKED) for site in usable}),
        [site.spec for site in usable],
        candidates.formats,
        moments=moments,
        sensitivities=sensitivities,
        precisions=candidates.precisions,
        unrounded=(
            without_integers(given.network, usable, batches[0])
            if computes_in_integers(candidates.precisions)
            else [site.name for site in usable if site.spread]
        ),
        multiple=candidates.multiple,
        options=options,
        folder=folder,
    )


def measured_sensitivities(
    given: GivenFile, *, folder: Path | None = None, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Return the sensitivity matrices of the nodes' outputs, by name (`collect_sensitivities`).

    Args:
        given: The network and its inputs.
        folder: Where they are kept for later runs on the same network and inputs, or None.
        seed: Seed of the perturbations.
    """
    usable, batches = given.usable, given.split.calibration
    path = None if folder is None else folder / f"sensitivities-{_measured_key(given, seed)}.safetensors"
    if path is not None and path.exists():
        try:
            return load_file(path)
        except (SafetensorError, OSError):
            log.warning("%s is damaged; sensitivities are measured anew", path)
    with progress_bar("perturb nodes", total=len(usable)) as bar:
        found = collect_sensitivities(
            given.network, usable, batches, seed=seed, progress=lambda _: bar.advance()
        )
    if path is not None:
        with atomic_path(path) as temporary:
            save_file(found, temporary)
    return found


def _measured_key(given: GivenFile, seed: int) -> str:
    """Hash everything that measured sensitivities depend on."""
    names = [node.name for site in given.usable for node in site.nodes]
    digest = hashlib.sha256(repr((METHOD, seed, names, given.network.axes)).encode())
    digest.update(given.network.model.SerializeToString())
    add_to_digest(digest, given.split.calibration)
    return digest.hexdigest()[:32]
