"""Compress a network in an ONNX file, as a request asks."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from decomposition import CompressionPlan, list_heuristics
from decomposition.cache import digest
from decomposition.files import announce_write
from decomposition.plan.plan import LayerPlan, fingerprint
from rankrl.errors import ConfigError
from rankrl.kits.kit import WrittenKit
from rankrl.networks.graph import GraphNetwork, measured_sensitivities
from rankrl.networks.graph_scoring import FileMetric, OnnxScoring, SessionScore
from rankrl.networks.network import CandidateOptions
from rankrl.onnx.graph.compressed import check_plan
from rankrl.onnx.graph.inputs import HELDOUT, ImagePreprocessing
from rankrl.onnx.graph.network import Axes
from rankrl.onnx.graph.precisions import check_without_integers, without_integers
from rankrl.onnx.graph.prepared_file import FileInputs, PreparedFile
from rankrl.onnx.graph.rewrite import METADATA, check_formats, from_metadata, to_metadata
from rankrl.onnx.runtimes import check_runtimes
from rankrl.plan_search.run import ChosenPlan, SearchResult
from rankrl.plan_search.session import SearchSession, check_reachable
from rankrl.request import Request, opened_session, write_kit
from rankrl.result import Compression, finish, run_numbers, write_call
from rankrl.runs.run_folder import SAME_CALL, RunFolder
from rankrl.timing.form import faster_positions
from rankrl.timing.network_timer import relative_time
from rankrl.verify.fidelity import check_as_read

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FileSource:
    path: Path
    inputs: FileInputs = field(repr=False)
    images: ImagePreprocessing | None = None
    batch_axes: Axes | None = None
    heldout: float = HELDOUT
    score: SessionScore | None = None
    metric: FileMetric = OnnxScoring.metric

    def read(self, request: Request, *, scored: float = 0.0) -> PreparedFile:
        return PreparedFile.read(
            self.path,
            self.inputs,
            images=self.images,
            batch_axes=self.batch_axes,
            heldout=self.heldout,
            scored=scored,
            skip=request.decomposition.skip,
            only=request.decomposition.only,
            seed=request.seed,
        )


@dataclass(frozen=True)
class FileSearch:
    request: Request
    network: GraphNetwork
    candidates: CandidateOptions
    kept: bool = False

    @classmethod
    def of(cls, source: FileSource, request: Request) -> FileSearch:
        """Read a network, check the request, and under a latency budget rewrite slow nodes."""
        request.check()
        check_options(request)
        file = source.read(request, scored=source.heldout if _chooses(source, request) else 0.0)
        file.check_gaps()
        check_as_read(file)
        candidates = _of_file(request.candidates(), file)
        network = _network(file, source, request)
        check_reachable(network, candidates, request.goal)
        request = replace(request, goal=replace(request.goal, timing=network.timing))
        begun = cls(request, network, candidates)
        return begun if request.goal.budget.latency is None else begun._rewritten(request.goal.budget.latency)

    def session(self) -> SearchSession:
        """Calibrate the layers and return the search session; nothing is fitted yet."""
        return opened_session(self.network, self.candidates, self.request)

    def write(
        self, plan: CompressionPlan, target: Path, sensitivities: Mapping[str, torch.Tensor]
    ) -> Compression:
        _check_target(target, Path(self.network.file.network.source))
        return _finished(self.network, self.request, plan, target, sensitivities)

    def _rewritten(self, latency: float) -> FileSearch:
        """Return the search with nodes rewritten where that alone is faster, and ranks that suit them."""
        request, network = self.request, self.network
        file, timing = network.file, request.timing
        candidates = _of_file(request.timed_candidates(), file)
        budget = request.goal.budget
        in_time_alone = not any(budget.counted.values())
        if timing.tables:  # nothing is timed here
            return replace(self, candidates=candidates)
        if in_time_alone:
            faster = faster_positions(file.network, file.sites, network.feed, timing)
            file = file.with_several_positions(faster)
            if faster:
                check_as_read(file)
        if file.network is file.original:
            return replace(self, candidates=candidates)
        share = relative_time(file.original, file.network, network.feed, timing)
        kept = in_time_alone and share <= latency and budget.drop is None
        if kept:
            log.info("rewritten, it takes %.3f of its time: nothing has to be compressed", share)
        network = replace(network, file=file, time_of_original=share)
        return replace(self, network=network, candidates=candidates, kept=kept)


def compress_file(
    source: FileSource, target: Path, request: Request, *, folder: Path | None = None, **told: Any
) -> Compression:
    """Compress a network in an ONNX file; see `rankrl.compress`."""
    _check_target(target, source.path)
    begun = FileSearch.of(source, request)
    if begun.kept:
        return _finished(begun.network, begun.request, _as_it_is(begun.network.file), target, {})
    with (session := begun.session()):
        result = session.choose(request.search_call(folder, **told))
    if isinstance(result, SearchResult) and result.stopped_by == "interrupt":
        raise KeyboardInterrupt("the search was stopped; with a folder the same call goes on with it")
    sensitivities = session.library.sensitivities
    return _finished(begun.network, begun.request, result.plan, target, sensitivities, result)


def compress_file_in(
    source: FileSource, folder: Path | None, request: Request, target: Path, claimed: RunFolder | None = None
) -> Compression:
    """Compress a file; if the target is a folder, write plan, metrics and report there, too."""
    request = request.timed_in(request.cache, folder)
    if claimed is not None:
        tracking = claimed.tracking
        tracked = {"on_episode": tracking.episode, "on_update": tracking.update}
        result = compress_file(source, target, request, folder=folder, **tracked)
        result.plan.save(claimed.plan)
        return result
    if folder is None or target != folder:
        return compress_file(source, target, request, folder=folder)
    request.check()
    run = RunFolder(folder)
    record = request.record(digest(source.path.read_bytes())[:16])
    if not request.overwrite:
        run.check(record, advice=SAME_CALL)
    run.begin(record)
    result = compress_file(source, run.state / "model.onnx", request, folder=folder)
    run.remove_results()
    announce_write(run.onnx)
    os.replace(result.path, run.onnx)
    result.plan.save(run.plan)
    result = replace(result, path=run.onnx)
    write_call(run, result, request, source.path.stem, run_numbers(result))
    return result


def write_file_kit(source: FileSource, request: Request, folder: Path) -> WrittenKit:
    """Write the timing kit of a network in an ONNX file; see `rankrl.timing_kit`."""
    begun = FileSearch.of(source, request)
    return write_kit(begun.network, begun.candidates, begun.request, folder)


def apply_to_file(source: FileSource, plan: CompressionPlan, target: Path, request: Request) -> Compression:
    """Apply a plan to a network in an ONNX file; see `rankrl.apply_plan`."""
    _check_target(target, source.path)
    check_runtimes(request.timing)
    file = source.read(request)
    several = plan.metadata.get(METADATA, {})
    file = file.with_several_positions(from_metadata(several, file.network, file.sites))
    check_plan(plan, file.sites, file.network.source)
    if file.network.half.computes:
        check_without_integers(plan, file.network.source)
    file.check_gaps()
    check_as_read(file)
    sensitivities: Mapping[str, torch.Tensor] = {}
    if request.decomposition.weigh_outputs:
        sensitivities = measured_sensitivities(file, folder=request.fits, seed=request.seed)
    return _finished(_network(file, source, request), request, plan, target, sensitivities)


def check_options(request: Request) -> None:
    """Refuse options that only PyTorch modules support."""
    options = request.decomposition
    check_formats(options.choices)
    if options.channels:
        raise ConfigError("decomposition.channels removes channels of PyTorch networks; leave it out here")
    if options.blocks:
        raise ConfigError("decomposition.blocks removes blocks of PyTorch networks; leave it out here")


def _check_target(target: Path, path: Path) -> None:
    if target.resolve() == path.resolve():
        raise ConfigError(f"the target {target} is the original itself, which is never written; name another")


def _chooses(source: FileSource, request: Request) -> bool:
    """Tell whether plans are compared on inputs; a heuristic within a budget of counts has a single plan."""
    budget = request.goal.budget
    several = bool({"latency", "bytes"} & set(budget.fractions)) or budget.drop is not None
    return source.score is None and (several or request.selector not in list_heuristics())


def _of_file(candidates: CandidateOptions, file: PreparedFile) -> CandidateOptions:
    """Return the candidates without integer precisions if the file computes in half precision."""
    if not file.network.half.computes:
        return candidates
    return replace(candidates, precisions=without_integers(candidates.precisions, file.network.source))


def _network(file: PreparedFile, source: FileSource, request: Request) -> GraphNetwork:
    """Return the network as searches see it, timed with batches that the file accepts."""
    feed = file.feed(request.timing.batch)
    timing = replace(request.timing, batch=file.network.axes.size(feed))
    options = request.decomposition
    return GraphNetwork(file, feed, timing, options, source.score, source.metric, request.seed)


def _as_it_is(file: PreparedFile) -> CompressionPlan:
    """Return the plan that leaves every node as it is."""
    reason = "the budget is kept without"
    layers = tuple(LayerPlan(site.name, reason=site.spec.refusal or reason) for site in file.sites)
    return CompressionPlan(layers, fingerprint([site.spec for site in file.sites]), file.shape, "rewriting")


def _finished(
    network: GraphNetwork,
    request: Request,
    plan: CompressionPlan,
    target: Path,
    sensitivities: Mapping[str, torch.Tensor],
    search: ChosenPlan | None = None,
) -> Compression:
    """Apply a plan, write the file and compare it with the original."""
    if network.file.several:
        plan = replace(plan, metadata={**plan.metadata, METADATA: to_metadata(network.file.several)})
    compressed = network.finished(plan, sensitivities)
    result = finish(network, plan, compressed, target, search=search, budget=request.goal.budget)
    if result.collapsed is not None:
        log.error(result.collapsed)
    return result
