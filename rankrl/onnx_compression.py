"""`compress_onnx`: from an ONNX file and some inputs to a smaller or faster ONNX file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from decomposition import CompressionPlan, FitOptions, list_heuristics
from decomposition.fit.fit_options import CHOOSING
from decomposition.operations.base import FINAL
from decomposition.plan.layer_plan import LayerPlan
from decomposition.plan.plan import fingerprint
from rankrl.argument_types import checked_arguments
from rankrl.errors import ConfigError
from rankrl.files import storage_errors
from rankrl.networks.candidates import CandidateOptions
from rankrl.networks.graph import GraphNetwork, measured_sensitivities
from rankrl.networks.graph_scoring import FileTerm, OnnxScoring, SessionScore
from rankrl.onnx.graph.axis_suggestions import Axes
from rankrl.onnx.graph.costs import network_costs, plan_costs
from rankrl.onnx.graph.file import check_contracted, write_graph
from rankrl.onnx.graph.given import GivenFile, Inputs
from rankrl.onnx.graph.half import check_without_integers, without_integers
from rankrl.onnx.graph.image_files import ImagePreprocessing
from rankrl.onnx.graph.inputs import HELDOUT
from rankrl.onnx.graph.network import OnnxNetwork, open_session
from rankrl.onnx.graph.positions import METADATA, from_metadata, to_metadata
from rankrl.onnx.graph.refit import check_plan
from rankrl.onnx.graph.rewrite import check_formats, writable_formats
from rankrl.onnx.graph.site import Site
from rankrl.onnx.protobuf import to_proto
from rankrl.options.budget import BudgetOptions
from rankrl.options.search import SearchOptions
from rankrl.options.timing import LatencyOptions
from rankrl.plan_search.goal import SearchGoal
from rankrl.plan_search.run import SearchResult
from rankrl.plan_search.scores.history import EpisodeRow
from rankrl.plan_search.selectors import check_selector
from rankrl.plan_search.session import SearchSession, check_reachable
from rankrl.runs.run_lock import alone_in_folder
from rankrl.timing import fast_multiple
from rankrl.timing.graph_files import compared_with_original, time_beside
from rankrl.timing.positions import faster_positions
from rankrl.verify.agreement import agreement_score
from rankrl.verify.as_read import check_as_read
from rankrl.verify.collapse import collapse
from rankrl.verify.compression import Compression

log = logging.getLogger(__name__)

TIMED_BATCH = 16
"""Inputs of a timed pass, unless another number is given."""


@dataclass(frozen=True)
class OnnxCompression(Compression):
    """A compressed ONNX file and what is known of it.

    `verified` compares the factorised nodes with their contracted weights, relative to the largest number at
    the outputs.

    Attributes:
        sites: The nodes that the plan is for.
        originals: The nodes of the original.
        rewritten: What became of nodes before anything was compressed, by their names.
        heldout: How many inputs it was compared on.
        search: The record of the search for the plan; None where there was none.
    """

    sites: tuple[Site, ...] = field(repr=False)
    originals: tuple[Site, ...] = field(repr=False)
    rewritten: Mapping[str, str]
    heldout: int
    search: SearchResult | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Finishing:
    """How a plan is carried out and judged in the end.

    Attributes:
        score: Function from an onnxruntime session to a number, higher is better; the agreement with the
            original on held-out inputs when None.
        timing: How time is measured.
        weigh_outputs: Count channels and nodes by what the network's outputs make of them.
        options: How much work each fit may do.
        seed: Seed of everything random.
    """

    score: SessionScore | None = None
    timing: LatencyOptions = field(default_factory=lambda: LatencyOptions(batch=TIMED_BATCH))
    weigh_outputs: bool = True
    options: FitOptions = FINAL
    seed: int = 0


@checked_arguments(without=("inputs", "batch_axes"))
@storage_errors()
@alone_in_folder
def compress_onnx(
    path: str | Path,
    inputs: Inputs,
    target: str | Path,
    *,
    params: float | None = None,
    macs: float | None = None,
    bytes: float | None = None,
    latency: float | None = None,
    score: SessionScore | None = None,
    decomposition: str | Sequence[str] | None = None,
    precisions: Sequence[str] = ("float32",),
    skip: Sequence[str] = (),
    only: Sequence[str] = (),
    images: ImagePreprocessing | None = None,
    batch_axes: Axes | None = None,
    selector: str = "greedy",
    selector_options: Mapping[str, Any] | None = None,
    episodes: int = 100,
    finalists: int = 1,
    term: FileTerm = OnnxScoring.term,
    heldout: float = HELDOUT,
    timing: LatencyOptions | None = None,
    candidates: int = 16,
    multiple: int | None = None,
    weigh_outputs: bool = True,
    options: FitOptions = CHOOSING,
    final_options: FitOptions = FINAL,
    seed: int = 0,
    cache: str | Path | None = None,
    folder: str | Path | None = None,
) -> OnnxCompression:
    """Compress a network in an ONNX file; no labels, gradients or PyTorch code are needed.

    Convolutions along one or two axes, Gemm and MatMul with a constant weight become several smaller nodes,
    fitted to the inputs that they receive; ranks are chosen within a budget by what the network's outputs
    lose (Lagrangian allocation), or by a search that scores plans.

    Args:
        path: The ONNX file; it is only read.
        inputs: What the network will be used on, a few hundred: a .npz or .npy file, one array for each input
            by name (one array for a network with one input), or batches of such, any iterable, where a list
            of batches is a sequence that stays together; or a folder of images.
        target: The file to write.
        params: Fraction of the parameters to keep at most, in (0, 1].
        macs: Fraction of the multiply-accumulates to keep at most.
        bytes: Fraction of the parameters' bytes to keep at most.
        latency: Fraction of the original's time in onnxruntime to keep at most. Give one of the four, or two
            to be kept at once.
        score: Function from an onnxruntime session to a number, higher is better; the agreement with the
            original on held-out inputs when omitted. A search maximises it.
        decomposition: Name of a tensor format, or of several that every node chooses from; all that can be
            written as plain nodes when omitted (`writable_formats`).
        precisions: What every node may compute with or be stored in: `float32`, `int8`, `int8_weights`,
            `int4_weights`. `int8` becomes `int7` where weights have to have 7 bits (`LatencyOptions`).
        skip: Nodes that stay as they are: names, or patterns of names (`encoder/*`).
        only: Nodes that alone may change, named likewise; empty for all.
        images: How image files become inputs, where `inputs` is a folder of them.
        batch_axes: The axis of every input that counts the inputs of a batch, by name; None for an input that
            goes with every batch as it is, such as a rate. What is left out is found by trying.
        selector: Name of what chooses: `greedy`, `energy`, `uniform` and `vbmf` need no search; `bayes`,
            `ddpg`, `tpe` and others score plans, on as many inputs as are held out, which nothing is fitted
            to and the result is not compared on.
        selector_options: Its options.
        episodes: Plans to score at most.
        finalists: How many of the best plans are carried out, refit and all, and scored again.
        term: What plans are scored by without `score` (`OnnxScoring`).
        heldout: Share of the inputs that the result is compared on; nothing is fitted to them.
        timing: How time is measured; batches of 16 in one thread when omitted.
        candidates: Candidate ranks a node and format at most.
        multiple: Ranks are multiples of it; with a budget in time what suits the processor when omitted.
        weigh_outputs: Count channels and nodes by what the network's outputs make of them, measured by
            forward passes.
        options: How much work each fit may do while ranks are chosen.
        final_options: How much work each fit may do in the end.
        seed: Seed of everything random.
        cache: Where fits, sensitivities and times are kept for later calls; None keeps nothing.
        folder: Where the search keeps its record, for a killed one to go on; None keeps nothing. No two calls
            may work in it at once.

    Returns:
        The file and what is known of it.

    Raises:
        OnnxGraphError: The file or the inputs cannot be used, or no node can be compressed.
        ConfigError: No budget or more than two are given, or an option is unknown or out of range.
        DecompositionError: No plan reaches the budget.
        ExportError: onnxruntime cannot quantise or time the result.
        KeyboardInterrupt: The search was interrupted; with a folder the same call goes on with it.
        NonFiniteError: A score is NaN or infinite.
        StorageError: The target cannot be written, or the disk is full.
    """
    timing = (LatencyOptions(batch=TIMED_BATCH) if timing is None else timing).kept_in(cache, folder)
    goal = SearchGoal(
        BudgetOptions(params, macs, bytes, latency),
        SearchOptions(finalists=finalists, episodes=episodes),
        timing,
    )
    chosen = CandidateOptions(
        chosen_formats(decomposition),
        precisions=tuple(precisions),
        reduce_range=timing.reduce_range,
        candidates=candidates,
        multiple=1 if multiple is None else multiple,
        weigh_outputs=weigh_outputs,
        skip=tuple(skip),
        only=tuple(only),
    )
    return compress_file(
        path,
        inputs,
        target,
        chosen,
        goal,
        selector,
        selector_options or {},
        Finishing(score, timing, weigh_outputs, final_options, seed),
        images=images,
        batch_axes=batch_axes,
        term=term,
        heldout=heldout,
        options=options,
        suit_processor=multiple is None,
        cache=None if cache is None else Path(cache),
        folder=None if folder is None else Path(folder),
    )


def compress_file(
    path: str | Path,
    inputs: Inputs,
    target: str | Path,
    candidates: CandidateOptions,
    goal: SearchGoal,
    selector: str,
    selector_options: Mapping[str, Any],
    finishing: Finishing,
    *,
    images: ImagePreprocessing | None = None,
    batch_axes: Axes | None = None,
    term: FileTerm = OnnxScoring.term,
    heldout: float = HELDOUT,
    options: FitOptions = CHOOSING,
    suit_processor: bool = False,
    cache: Path | None = None,
    folder: Path | None = None,
    on_episode: Callable[[EpisodeRow], None] | None = None,
) -> OnnxCompression:
    """Compress a network in an ONNX file; see `compress_onnx`.

    Args:
        path: The ONNX file.
        inputs: What it will be used on.
        target: The file to write.
        candidates: What may become of its nodes.
        goal: Budget, reward, limits.
        selector: Name of what chooses.
        selector_options: Its options.
        finishing: How the chosen plan is carried out and judged.
        images: How image files become inputs.
        batch_axes: The axis of every input that counts the inputs of a batch.
        term: What plans are scored by without a score of the user's.
        heldout: Share of the inputs that the result is compared on.
        options: How much work each fit may do while ranks are chosen.
        suit_processor: With a budget in time, measure what ranks had better be multiples of on this
            processor, in place of the candidates' own multiple.
        cache: Where fits are kept for later calls, or None.
        folder: Where the search keeps its record, or None.
        on_episode: Called with the row of every newly scored plan.

    Raises:
        RankrlError: As `compress_onnx`.
    """
    if goal.needs_budget:
        raise ConfigError(
            "give a budget: latency=0.5 keeps at most half of the time; params=, macs=, bytes= likewise"
        )
    check_selector(selector, selector_options, goal.setting(candidates))
    seed, score = finishing.seed, finishing.score
    searches = selector not in list_heuristics()
    _check_target(target, path)
    given = GivenFile.read(
        path,
        inputs,
        images=images,
        batch_axes=batch_axes,
        heldout=heldout,
        scored=heldout if searches and score is None else 0.0,
        skip=candidates.skip,
        only=candidates.only,
        seed=seed,
    )
    check_as_read(given)
    if given.network.half:
        candidates = replace(
            candidates, precisions=without_integers(candidates.precisions, given.network.source)
        )
    network = _network(given, finishing, options)
    check_reachable(network, candidates, goal)
    timing = replace(finishing.timing, batch=given.network.axes.size(network.feed))
    if goal.budget.latency is not None:
        if suit_processor:
            candidates = replace(candidates, multiple=fast_multiple(timing.folder))
        in_time_alone = not any(goal.budget.counted.values())
        if in_time_alone:
            faster = faster_positions(given.network, given.sites, network.feed, timing)
            given = given.with_several_positions(faster)
            if faster:
                check_as_read(given)
        if given.network is not given.original:
            beside = time_beside(given.original, given.network, network.feed, timing)
            network = replace(network, given=given, time_of_original=beside)
            if in_time_alone and beside <= goal.budget.latency:
                log.info("rewritten, it takes %.3f of its time: nothing has to be compressed", beside)
                return _finished(network, _as_it_is(given), Path(target), {}, finishing)
    library = network.library(candidates, cache=_fits(cache), seed=seed)
    # A rule's plan is one, so that no input chooses it.
    split = given.split
    scored, single = split.scored or split.heldout, split.scored or split.calibration
    scoring = OnnxScoring(given.network, given.sites, scored, score, term, single)
    goal = replace(goal, timing=timing)
    with SearchSession(network, library, scoring, goal, candidates=candidates.candidates) as session:
        found = session.search(selector, selector_options, seed=seed, folder=folder, on_episode=on_episode)
    if found.stopped_by == "interrupt":
        raise KeyboardInterrupt("the search was stopped; with a folder the same call goes on with it")
    return _finished(network, found.plan, Path(target), library.sensitivities, finishing, found)


@storage_errors()
def apply_onnx_plan(
    path: str | Path,
    inputs: Inputs,
    target: str | Path,
    plan: CompressionPlan,
    *,
    score: SessionScore | None = None,
    images: ImagePreprocessing | None = None,
    batch_axes: Axes | None = None,
    heldout: float = HELDOUT,
    timing: LatencyOptions | None = None,
    weigh_outputs: bool = True,
    final_options: FitOptions = FINAL,
    seed: int = 0,
    cache: str | Path | None = None,
) -> OnnxCompression:
    """Carry out a plan on a network in an ONNX file.

    Args:
        path: The ONNX file that the plan was made for, or one with the same nodes; it is only read.
        inputs: What the network will be used on, as for `compress_onnx`.
        target: The file to write.
        plan: What becomes of every node.
        score: As for `compress_onnx`.
        images: As for `compress_onnx`.
        batch_axes: As for `compress_onnx`.
        heldout: As for `compress_onnx`.
        timing: As for `compress_onnx`.
        weigh_outputs: As for `compress_onnx`.
        final_options: As for `compress_onnx`.
        seed: As for `compress_onnx`.
        cache: Where sensitivities are kept for later calls; None keeps nothing.

    Returns:
        The file and what is known of it.

    Raises:
        PlanError: The plan was made for another network, or does something that a node cannot become.
        RankrlError: As `compress_onnx`.
    """
    _check_target(target, path)
    given = GivenFile.read(path, inputs, images=images, batch_axes=batch_axes, heldout=heldout, seed=seed)
    several = plan.metadata.get(METADATA, {})
    given = given.with_several_positions(from_metadata(several, given.network, given.sites))
    check_plan(plan, given.sites, given.network.source)
    if given.network.half:
        check_without_integers(plan, given.network.source)
    check_as_read(given)
    timing = LatencyOptions(batch=TIMED_BATCH) if timing is None else timing
    finishing = Finishing(score, timing, weigh_outputs, final_options, seed)
    folder = _fits(cache)
    sensitivities = measured_sensitivities(given, folder=folder, seed=seed) if weigh_outputs else {}
    return _finished(_network(given, finishing), plan, Path(target), sensitivities, finishing)


def chosen_formats(decomposition: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of the formats.

    Raises:
        ConfigError: One cannot be written as plain nodes.
        DecompositionError: One is unknown.
    """
    if decomposition is None:
        return tuple(writable_formats())
    names = (decomposition,) if isinstance(decomposition, str) else tuple(decomposition)
    check_formats(names)
    return names


def _fits(cache: str | Path | None) -> Path | None:
    """Return the folder of a cache that holds what is measured and fitted."""
    return None if cache is None else Path(cache) / "fits"


def _check_target(target: str | Path, path: str | Path) -> None:
    if Path(target).resolve() == Path(path).resolve():
        raise ConfigError(f"the target {target} is the original itself, which is never written; name another")


def _network(given: GivenFile, finishing: Finishing, options: FitOptions = CHOOSING) -> GraphNetwork:
    """Return the network as searches see it."""
    timing = finishing.timing
    return GraphNetwork(
        given,
        given.feed(timing.batch),
        options,
        finishing.options,
        timing.reduce_range,
        finishing.seed,
    )


def _as_it_is(given: GivenFile) -> CompressionPlan:
    """Return the plan that leaves every node as it is."""
    reason = "the budget is kept without"
    layers = tuple(LayerPlan(site.name, reason=site.spec.refusal or reason) for site in given.sites)
    return CompressionPlan(layers, fingerprint([site.spec for site in given.sites]), given.shape, "rewriting")


def _finished(
    rewritten: GraphNetwork,
    plan: CompressionPlan,
    target: Path,
    sensitivities: Mapping[str, torch.Tensor],
    finishing: Finishing,
    search: SearchResult | None = None,
) -> OnnxCompression:
    """Carry out a plan, write the file and compare it with the original."""
    given, feed = rewritten.given, rewritten.feed
    timing = replace(finishing.timing, batch=given.network.axes.size(feed))
    network, split, score = given.original.as_in_file(), given.split, finishing.score
    batches = [*split.calibration, *split.scored]  # those that plans were scored on have done their work
    if given.several:
        plan = replace(plan, metadata={**plan.metadata, METADATA: to_metadata(given.several)})
    graph = rewritten.refitted(plan, batches, sensitivities)
    verified = check_contracted(graph, split.heldout[:2], network.source)
    write_graph(graph, target, batches, {"plan": plan.to_json()}, reduce_range=timing.reduce_range)
    compressed = open_session(OnnxNetwork.load(target).model, str(target))
    scoring = OnnxScoring(network, given.sites, split.heldout, score)
    outputs = scoring.agreement(compressed)
    found, baseline = agreement_score(outputs), 1.0
    if score is not None:
        found = scoring.of_session(compressed, "the compressed network")
        baseline = scoring.of_session(open_session(network.model, network.source), "the original network")
    heldout = sum(map(split.axes.size, split.heldout))
    collapsed = collapse(outputs, scoring.constant_agreement(), heldout)
    if collapsed is not None:
        log.error(collapsed)
    before, after = dict(given.original_totals), plan_costs(given.totals, given.sites, plan)
    if given.original.half:  # what the search counts is float32
        for costs, each in ((before, network), (after, OnnxNetwork.load(target))):
            costs["bytes"] = network_costs(each, given.original_sites)["bytes"]
    return OnnxCompression(
        path=target,
        plan=plan,
        sites=given.sites,
        originals=tuple(given.original_sites),
        rewritten=given.rewritten,
        heldout=heldout,
        before={**before, "file_bytes": to_proto(network.model).ByteSize()},
        after={**after, "file_bytes": target.stat().st_size},
        outputs=tuple(outputs),
        score=found,
        baseline_score=baseline,
        verified=verified,
        errors=graph.errors,
        latency=compared_with_original(network, target, feed, timing),
        search=search,
        collapsed=collapsed,
    )
