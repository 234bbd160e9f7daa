"""`compress_onnx`: from an ONNX file and some inputs to a smaller or faster ONNX file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from decomposition import FitLibrary, FitOptions, get_heuristic
from decomposition.fitting import CHOOSING
from decomposition.operations.base import FINAL
from rankrl.agreement import agreement, agreement_score
from rankrl.compression import Compression
from rankrl.errors import ConfigError
from rankrl.export import fast_multiple
from rankrl.onnx_graph.budget import (
    OnnxLatencyBudget,
    compared_with_original,
    input_shape,
    network_costs,
)
from rankrl.onnx_graph.capture import collect_moments
from rankrl.onnx_graph.errors import OnnxGraphError
from rankrl.onnx_graph.file import check_contracted, write_graph
from rankrl.onnx_graph.image_files import ImagePreprocessing
from rankrl.onnx_graph.inputs import HELDOUT, SplitInputs, batch_size, read_inputs, split_inputs
from rankrl.onnx_graph.network import Array, Feed, OnnxNetwork, open_session
from rankrl.onnx_graph.refit import refitted_graph
from rankrl.onnx_graph.rewrite import MARKED, check_formats, writable_formats
from rankrl.onnx_graph.sensitivity import collect_sensitivities
from rankrl.onnx_graph.sites import Site, SiteModules, find_sites
from rankrl.plan_search.problem import SearchProblem, check_budgets
from rankrl.progress import progress_bar
from rankrl.workflow.latency import LatencyOptions

log = logging.getLogger(__name__)

Inputs = Mapping[str, Array] | Array | Iterable[Feed] | str | Path
SessionScore = Callable[[onnxruntime.InferenceSession], float]
"""A user's score: from an onnxruntime session to a number, higher is better."""

_TIMED_BATCH = 16


@dataclass(frozen=True)
class OnnxCompression(Compression):
    """A compressed ONNX file and what is known of it.

    `verified` compares the factorised nodes with their contracted weights, relative to the largest number at
    the outputs.

    Attributes:
        sites: The nodes.
    """

    sites: tuple[Site, ...]


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
    images: ImagePreprocessing | None = None,
    selector: str = "greedy",
    heldout: float = HELDOUT,
    timing: LatencyOptions | None = None,
    candidates: int = 16,
    multiple: int | None = None,
    weigh_outputs: bool = True,
    options: FitOptions = CHOOSING,
    final_options: FitOptions = FINAL,
    seed: int = 0,
    cache: str | Path | None = None,
) -> OnnxCompression:
    """Compress a network in an ONNX file; no labels, gradients or PyTorch code are needed.

    Convolutions along one or two axes, Gemm and MatMul with a constant weight become several smaller nodes,
    fitted to the inputs that they receive; ranks are chosen within a budget by what the network's outputs
    lose (Lagrangian allocation).

    Args:
        path: The ONNX file, opset 13 or newer; it is only read.
        inputs: What the network will be used on, a few hundred: a .npz or .npy file, one array for each input
            by name (one array for a network with one input), or batches of such, any iterable; or a folder of
            images.
        target: The file to write.
        params: Fraction of the parameters to keep at most, in (0, 1].
        macs: Fraction of the multiply-accumulates to keep at most.
        bytes: Fraction of the parameters' bytes to keep at most.
        latency: Fraction of the original's time in onnxruntime to keep at most. Give one of the four, or two
            to be kept at once.
        score: Function from an onnxruntime session to a number, higher is better, for the report; the
            agreement with the original on held-out inputs when omitted.
        decomposition: Name of a tensor format, or of several that every node chooses from; all that can be
            written as plain nodes when omitted (`writable_formats`).
        precisions: What every node may compute with or be stored in: `float32`, `int8`, `int8_weights`,
            `int4_weights`.
        images: How image files become inputs, where `inputs` is a folder of them.
        selector: Name of the rule that chooses ranks: `greedy`, `energy`, `uniform` or `vbmf`.
        heldout: Share of the inputs that the result is compared on; nothing is fitted to them.
        timing: How time is measured; batches of 16 in one thread when omitted.
        candidates: Candidate ranks a node and format at most.
        multiple: Ranks are multiples of it; with a budget in time what suits the processor when omitted.
        weigh_outputs: Count channels and nodes by what the network's outputs make of them, measured by
            forward passes.
        options: How much work each fit may do while ranks are chosen.
        final_options: How much work each fit may do in the end.
        seed: Seed of everything random.
        cache: Where fits are kept for later calls; None keeps nothing.

    Returns:
        The file and what is known of it.

    Raises:
        OnnxGraphError: The file or the inputs cannot be used, or no node can be compressed.
        ConfigError: No budget or more than two are given, or an option is unknown or out of range.
        DecompositionError: No plan reaches the budget.
        ExportError: onnxruntime cannot quantise or time the result.
        StorageError: The target cannot be written.
    """
    fractions = {"params": params, "macs": macs, "bytes": bytes, "latency": latency}  # time is the last
    check_budgets(fractions)
    if all(value is None for value in fractions.values()):
        raise ConfigError(
            "give a budget: latency=0.5 keeps at most half of the time; params=, macs=, bytes= likewise"
        )
    if Path(target).resolve() == Path(path).resolve():
        raise ConfigError(f"the target {target} is the original itself, which is never written; name another")
    formats = chosen_formats(decomposition)
    heuristic = get_heuristic(selector)
    network = OnnxNetwork.load(path)
    given = read_inputs(inputs, network, images) if isinstance(inputs, str | Path) else inputs
    split = split_inputs(given, network, heldout=heldout, seed=seed)
    timing = LatencyOptions(batch=_TIMED_BATCH) if timing is None else timing
    feed = timed_feed(network, split, timing.batch)
    timing = replace(timing, batch=batch_size(feed))
    if multiple is None:
        folder = None if cache is None else Path(cache) / "latencies"
        multiple = 1 if latency is None else fast_multiple(folder)
    sites = find_sites(network, split.calibration[0])
    library = fit_library(
        network,
        sites,
        split,
        formats,
        precisions=tuple(precisions),
        multiple=multiple,
        weigh_outputs=weigh_outputs,
        options=options,
        folder=None if cache is None else Path(cache) / "fits",
        seed=seed,
    )
    with progress_bar("fit nodes", total=len(library.specs)) as bar:
        candidate_sets = library.all_candidates(limit=candidates, progress=lambda _: bar.advance())
    totals = network_costs(network, sites)
    further = {name: value for name, value in fractions.items() if name != "latency"}
    if latency is None:
        specs, shape = [site.spec for site in sites], input_shape(network, feed)
        problem = SearchProblem.from_costs(specs, candidate_sets, shape, totals, fractions, library=library)
    else:
        budget = OnnxLatencyBudget(
            network, sites, library, candidate_sets, totals, latency, timing, feed, further
        )
        problem = budget.problem(library)
    assert problem.budget is not None
    choices = heuristic.choose(library, problem.sites, problem.budget)
    plan = problem.plan(choices, selector)
    with progress_bar("refit nodes", total=len(sites)) as bar:
        graph = refitted_graph(
            network,
            sites,
            plan,
            split.calibration,
            sensitivities=library.sensitivities,
            options=final_options,
            seed=seed,
            progress=lambda _: bar.advance(),
        )
    verified = check_contracted(graph, split.heldout[:2], network.source)
    cost = problem.cost([int(each) for each in choices])
    target = Path(target)
    write_graph(graph, target, split.calibration, {"plan": plan.to_json()})
    compressed = OnnxNetwork.load(target)
    outputs = agreement(network.session(), compressed.session(), split.heldout)
    after = {"params": cost.params, "macs": cost.macs, "bytes": cost.bytes}
    return OnnxCompression(
        path=target,
        plan=plan,
        sites=tuple(sites),
        before={**totals, "file_bytes": network.model.ByteSize()},
        after={**after, "file_bytes": target.stat().st_size},
        outputs=tuple(outputs),
        score=agreement_score(outputs) if score is None else scored(score, compressed),
        baseline_score=1.0 if score is None else scored(score, network),
        verified=verified,
        errors=graph.errors,
        latency=compared_with_original(network, target, feed, timing),
    )


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


def fit_library(
    network: OnnxNetwork,
    sites: Sequence[Site],
    split: SplitInputs,
    formats: Sequence[str],
    *,
    weigh_outputs: bool = True,
    seed: int = 0,
    **options: Any,
) -> FitLibrary:
    """Calibrate the nodes and return the library of their fits; nothing is fitted yet.

    Args:
        network: The network.
        sites: Its nodes (`find_sites`).
        split: The inputs.
        formats: Names of tensor formats.
        weigh_outputs: As for `compress_onnx`.
        seed: Seed of patches and perturbations.
        **options: Those of `FitLibrary`.

    Raises:
        OnnxGraphError: No node can be compressed; the message gives the reasons.
    """
    usable = [site for site in sites if site.spec.refusal is None]
    if not usable:
        reasons = "; ".join(f"{site.name}: {site.spec.refusal}" for site in sites[:5])
        raise OnnxGraphError(
            f"{network.source} has no node that can be compressed "
            f"({reasons or 'no Conv, Gemm or MatMul with a constant weight'})"
        )
    moments = collect_moments(network, usable, split.calibration, seed=seed)
    sensitivities = {}
    if weigh_outputs:
        with progress_bar("perturb nodes", total=len(usable)) as bar:
            sensitivities = collect_sensitivities(
                network, usable, split.calibration, seed=seed, progress=lambda _: bar.advance()
            )
    modules = SiteModules({site.name: site.module(MARKED) for site in usable})
    specs = [site.spec for site in usable]
    return FitLibrary(modules, specs, formats, moments=moments, sensitivities=sensitivities, **options)


def timed_feed(network: OnnxNetwork, split: SplitInputs, batch: int) -> Feed:
    """Return a batch of real inputs of a size, or of the file's own where that is fixed."""
    if network.fixed_batch is not None:
        return split.calibration[0]
    rows = [feed for feed in (*split.calibration, *split.heldout) if _alike(feed, split.calibration[0])]
    whole = {name: np.concatenate([feed[name] for feed in rows]) for name in rows[0]}
    wanted = np.arange(batch) % batch_size(whole)
    return {name: value[wanted] for name, value in whole.items()}


def scored(score: SessionScore, network: OnnxNetwork) -> float:
    """Return a user's score of a network.

    Raises:
        OnnxGraphError: It is no finite number.
    """
    found = score(open_session(network.model, network.source))
    if isinstance(found, bool) or not isinstance(found, int | float | np.floating) or not np.isfinite(found):
        raise OnnxGraphError(f"the score is {found!r}; it must be a finite number, higher for better")
    return float(found)


def _alike(feed: Feed, other: Feed) -> bool:
    return all(feed[name].shape[1:] == other[name].shape[1:] for name in other)
