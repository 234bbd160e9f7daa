"""Compress a network in an ONNX file: calibrate, apply plans, write, score and time (`GraphNetwork`)."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import onnxruntime
import torch

from decomposition import CompressionPlan, FitLibrary, LayerSpec, Quantise
from decomposition.calibration.moments import (
    PATCHES_PER_LAYER,
    UNREACHED,
    InputMoments,
    fit_sizes,
    settled,
    warn_unreached,
)
from decomposition.choose.listing import CandidateLister
from decomposition.fit.fit_options import CHOOSING
from decomposition.memory import release_memory, without_room
from decomposition.operations import computes_in_integers
from decomposition.progress import progress_bar
from decomposition.rewrites import Rewrite
from rankrl.networks.graph_scoring import FileMetric, GraphLibrary, NodeLosses, OnnxScoring, SessionScore
from rankrl.networks.network import CandidateOptions, WrittenFile
from rankrl.onnx.export import quantise_onnx
from rankrl.onnx.export.static_quantiser import RangeChoice
from rankrl.onnx.graph.calibration import collect_moments, collect_sensitivities, first_inputs
from rankrl.onnx.graph.compressed import CompressedGraph, check_contracted, refitted_graph, write_graph
from rankrl.onnx.graph.network import Feed, OnnxNetwork, open_session
from rankrl.onnx.graph.prepared_file import PreparedFile, chosen_ranges, network_costs, plan_costs
from rankrl.onnx.graph.rewrite import MARKED
from rankrl.onnx.graph.sites import Site, SiteModules
from rankrl.onnx.graph_edits import quantises
from rankrl.onnx.protobuf import to_proto, write_checked
from rankrl.onnx.runtimes import Session
from rankrl.options.decomposition import DecompositionOptions
from rankrl.options.timing import LatencyOptions
from rankrl.plan_search.scores.evaluators import checked_score, values_of_inputs
from rankrl.report import LayerRow
from rankrl.timing.latency import LatencyComparison
from rankrl.timing.network_timer import GraphFiles, NetworkTimer, compared_with_original
from rankrl.verify.activations import Activations, DenseGraph, activation_bytes
from rankrl.verify.agreement import (
    OWN_SCORE,
    Basis,
    OutputAgreement,
    agreement_score,
    agreement_values,
    collapse,
)
from rankrl.verify.file_export import ComparedFiles, rival_numbers, runtime_numbers
from rankrl.verify.measure import layer_row, once_per_network


class FileSession:
    """An open file of any runtime, with the interface of an `onnxruntime.InferenceSession`."""

    def __init__(self, session: Session, original: onnxruntime.InferenceSession) -> None:
        self._session = session
        self.get_inputs, self.get_outputs = original.get_inputs, original.get_outputs

    def run(
        self, names: Sequence[str] | None, feed: Mapping[str, Any], _options: Any = None, /
    ) -> list[np.ndarray[Any, Any]]:
        outputs = dict(
            zip((entry.name for entry in self.get_outputs()), self._session.run(feed), strict=True)
        )
        return [outputs[name] for name in names or outputs]


_JUDGED_PATCHES = 2**14
"""Patches that nodes are fitted to where plans are compared."""
_JUDGED_MACS, _JUDGED_INPUTS = 2**37, 24
"""Multiply-accumulates of passes through a network that nodes are fitted in there, and fewest inputs."""


@dataclass(frozen=True, eq=False)
class WrittenGraph:
    """A graph compressed under a plan: in floating point, and in the precision of its file."""

    graph: CompressedGraph
    network: OnnxNetwork
    scoring: OnnxScoring

    @cached_property
    def session(self) -> onnxruntime.InferenceSession:
        return open_session(self.network.whole(tensors=True), self.network.source)

    @cached_property
    def outputs(self) -> tuple[OutputAgreement, ...]:
        return tuple(self.scoring.agreement(self.session))


@dataclass(frozen=True, eq=False)
class GraphNetwork:
    """A network in an ONNX file with its inputs; a `rankrl.networks.network.Network`."""

    file: PreparedFile
    feed: Feed = field(repr=False)
    timing: LatencyOptions
    options: DecompositionOptions
    judge: SessionScore | None = None
    metric: FileMetric = OnnxScoring.metric
    seed: int = 0
    time_of_original: float = 1.0

    unit: ClassVar[str] = "score"
    preparation: tuple[Rewrite, ...] = ()
    """Graphs are rewritten by the file's own reading, which a plan does not repeat."""

    @property
    def specs(self) -> list[LayerSpec]:
        return [site.spec for site in self.file.sites]

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self.file.shape

    @property
    def costs(self) -> Mapping[str, int]:
        return self.file.totals

    @property
    def caveat(self) -> str | None:
        return self.file.foreign

    def fractions(self, kept: Mapping[str, float | None]) -> dict[str, float | None]:
        return self.file.fractions(kept)

    def lister(self, candidates: CandidateOptions) -> CandidateLister:
        specs = [site.spec for site in self.file.changing]
        return CandidateLister(specs, candidates.formats, precisions=candidates.precisions, as_nodes=True)

    def library(self, candidates: CandidateOptions, *, cache: Path | None, seed: int) -> FitLibrary:
        return fit_library(self.file, candidates, folder=cache, seed=seed)

    def dense_graph(self) -> DenseGraph:
        network = self.file.network.without_casts()
        weights = {site.name: network.weight_inputs[site.name] for site in self.file.usable}
        return DenseGraph(network.model, network.axes.one(self.feed), weights)

    def activation_bytes(self, path: Path | None = None) -> int:
        feed = self.file.split.axes.one(self.feed)
        if path is not None:
            return activation_bytes(path, feed)
        return Activations(self._original.model, feed).peak

    def timer(self, options: LatencyOptions, library: FitLibrary | None, /) -> NetworkTimer:
        """Return the timer of the graph, whose nodes hold fits while it is timed."""
        assert library is not None
        options = replace(options, batch=self.file.network.axes.size(self.feed))
        files = GraphFiles(self.file, self.feed, library)
        return NetworkTimer(files, self.specs, self.input_shape, options)

    @property
    def scoring(self) -> OnnxScoring:
        """Scoring on the inputs set apart for it, or on the held-out ones where nothing is searched."""
        split = self.file.split
        # A rule's plan is one, so that no input chooses it.
        scored, single = split.scored or split.heldout, split.scored or split.calibration
        others = split.calibration if split.scored else ()
        return OnnxScoring(
            self.file.network, self.file.sites, scored, self.judge, self.metric, single, others
        )

    def applied(self, plan: CompressionPlan, library: FitLibrary, /) -> WrittenGraph:
        """Return the network under a plan, as it is written, fitted as well as choosing a plan needs.

        Fits begin with the library's, stop as those do, and see fewer patches than those of a result.
        """
        count = max(_JUDGED_INPUTS, _JUDGED_MACS // max(1, self.file.totals["macs"]))
        batches = first_inputs(self.file.split.calibration, count, self.file.network.axes)
        return self.written(plan, batches, library.sensitivities, library, _JUDGED_PATCHES)

    def finished(self, plan: CompressionPlan, sensitivities: Mapping[str, torch.Tensor]) -> WrittenGraph:
        """Return the network under the chosen plan, fitted to the inputs that plans were scored on, too."""
        split = self.file.split
        return self.written(plan, [*split.calibration, *split.scored], sensitivities)

    def written(
        self,
        plan: CompressionPlan,
        batches: Sequence[Feed],
        sensitivities: Mapping[str, torch.Tensor],
        starts: FitLibrary | None = None,
        patches: int = PATCHES_PER_LAYER,
    ) -> WrittenGraph:
        """Return the network under a plan, its nodes fitted one after the other (`refitted_graph`)."""
        with progress_bar("refit nodes", total=len(self.file.sites)) as bar:
            graph = refitted_graph(
                self.file.network,
                self.file.sites,
                plan,
                batches,
                sensitivities=sensitivities,
                options=self.options.final_fit() if starts is None else starts.options,
                starts=starts,
                patches=patches,
                seed=self.seed,
                progress=lambda _: bar.advance(),
            )
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "compressed.onnx"
            choice = self._range_choice if graph.computing else None
            write_graph(graph, path, batches, reduce_range=self.timing.reduce_range, choice=choice)
            network = self._original.rewritten(OnnxNetwork.load(path).model)
            release_memory()
            return WrittenGraph(graph, network, self._compared)

    def write(self, compressed: WrittenGraph, path: Path, metadata: Mapping[str, str]) -> WrittenFile:
        original = self._original
        verified = check_contracted(compressed.graph, self.file.split.heldout[:2], original.source)
        model = compressed.network.model.clone()
        model.metadata_props.update(metadata)
        write_checked(model, path, "the compressed network")
        times = compared_with_original(original, path, self.feed, self.timing)
        numbers = {"runtime": self.timing.runtime}
        runtimes = self._runtimes(path)
        if original.aside:  # both were timed without
            write_checked(original.aside.put_back(to_proto(model)), path, "the compressed network")
        return WrittenFile(verified, times, compressed.outputs, numbers, runtimes)

    def dense_int8(self) -> dict[str, Any] | None:
        split, original = self.file.split, self._original
        computes_half = self.file.original.half.computes
        if not self.timing.int8 or computes_half or any(map(quantises, original.model.graph)):
            return None

        def measured(path: Path) -> tuple[dict[str, Any], LatencyComparison]:
            plain, reduced = path.with_name("original.onnx"), self.timing.reduce_range
            original.without_casts().save(plain)
            quantise_onnx(plain, path, split.calibration, cut=split.axes.parts, reduce_range=reduced)
            whole = original.aside.put_back(onnx.load(path), tensors=True)
            score = self._score_of(open_session(whole, original.source))
            return {"score": score}, compared_with_original(original, path, self.feed, self.timing)

        with tempfile.TemporaryDirectory() as scratch:
            return rival_numbers(Path(scratch) / "dense-int8.onnx", measured)

    def _runtimes(self, path: Path) -> dict[str, Any] | None:
        """Score and time the file and the original in every requested runtime; None for a single one."""
        if len(self.timing.compared_runtimes) == 1:
            return None
        session, split = open_session(self._original.model, self._original.source), self.file.split
        with tempfile.TemporaryDirectory() as scratch:
            baseline = Path(scratch) / "original.onnx"
            self._original.save(baseline)
            timing = replace(self.timing, batch=split.axes.size(self.feed))
            files = ComparedFiles(
                baseline,
                path,
                timing,
                lambda: split.calibration,
                lambda file: self._score_of(FileSession(file, session)),
                self.feed,
                split.axes.parts,
            )
            return runtime_numbers(files, Path(scratch), integers=not self.file.original.half.computes)

    def _score_of(self, session: Any) -> float:
        """Return the user's score of an open file, or its agreement with the original."""
        if self.judge is None:
            return agreement_score(self._compared.agreement(session))
        return checked_score(self.judge(session), "a file")

    def costs_before(self) -> dict[str, int]:
        return {**self.file.original_totals, "file_bytes": self._original.whole().ByteSize()}

    def costs_after(self, plan: CompressionPlan, compressed: WrittenGraph) -> dict[str, int]:
        costs = plan_costs(self.file.totals, self.file.sites, plan)
        if not plan.chosen(Quantise):  # without integers the constants alone give the bytes
            costs["bytes"] = network_costs(compressed.network, self.file.original_sites)["bytes"]
        return costs

    def score(self, compressed: WrittenGraph | None) -> float:
        if self.judge is None:
            return 1.0 if compressed is None else agreement_score(compressed.outputs)
        what = "the original network" if compressed is None else "the compressed network"
        return checked_score(self._answer(self._original if compressed is None else compressed), what)

    @cached_property
    def _answer(self) -> Callable[[WrittenGraph | OnnxNetwork], Any]:
        """The user's score of a network, called once per network."""
        judge = self.judge
        assert judge is not None

        def asked(network: WrittenGraph | OnnxNetwork) -> Any:
            if isinstance(network, WrittenGraph):
                return judge(network.session)
            return judge(open_session(network.whole(tensors=True), network.source))

        return once_per_network(asked)

    @property
    def basis(self) -> Basis:
        """The held-out inputs, or those of the user's own score."""
        return Basis("agreement", "held-out inputs") if self.judge is None else OWN_SCORE

    def values(self, compressed: WrittenGraph | None) -> np.ndarray | None:
        if self.judge is None:
            return (
                np.ones(self.compared_inputs)
                if compressed is None
                else agreement_values(compressed.outputs, self.compared_inputs)
            )
        return values_of_inputs(self._answer(self._original if compressed is None else compressed))

    def collapsed(self, compressed: WrittenGraph, score: float) -> str | None:
        del score
        return collapse(compressed.outputs, self._compared.constant_agreement(), self.compared_inputs)

    @property
    def rewritten(self) -> dict[str, str]:
        return self.file.rewritten

    def rows(self, plan: CompressionPlan, compressed: WrittenGraph) -> list[LayerRow]:
        errors, rewritten = compressed.graph.errors, self.rewritten
        specs = {site.name: site.spec for site in self.file.sites if site.spec.params}
        before = {site.name: site.spec for site in self.file.original_sites}
        rows = [
            layer_row(layer, before[layer.name], specs[layer.name], error=errors.get(layer.name))
            for layer in plan
            if layer.name in specs
        ]
        return [
            replace(row, reason=f"computes {rewritten[row.name]}") if row.name in rewritten else row
            for row in rows
        ]

    @property
    def compared_inputs(self) -> int:
        return sum(map(self.file.split.axes.size, self.file.split.heldout))

    @cached_property
    def _original(self) -> OnnxNetwork:
        """The network as the file has it, in its own precision."""
        return self.file.original.as_in_file()

    @cached_property
    def _range_choice(self) -> RangeChoice | None:
        """Ranges and bias corrections of all integer files of the network, whichever is written first.

        Inputs that plans are scored on take part, too: the finished file is fitted to all of them.
        """
        file, split = self.file, self.file.split
        names = [site.name for site in file.usable if site.name not in file.unrounded]
        if not names:
            return None
        return chosen_ranges(
            file.network, names, [*split.calibration, *split.scored], self.timing.reduce_range
        )

    @cached_property
    def _compared(self) -> OnnxScoring:
        """Scoring by which results are compared with the original."""
        return OnnxScoring(self._original, self.file.sites, self.file.split.heldout, self.judge)


def fit_library(
    file: PreparedFile,
    candidates: CandidateOptions,
    *,
    folder: Path | None = None,
    seed: int = 0,
    measure: bool = True,
) -> FitLibrary:
    """Calibrate the nodes and return the library of their fits; nothing is fitted yet.

    Weights exist three times then: in the graph, in float32 in modules, and in float64 for fits.
    """
    usable, changing, batches = file.usable, file.changing, file.split.calibration
    inputs = sum(map(file.network.axes.size, batches))
    dense, unreached = without_room({site.name: fit_sizes(site.spec, inputs) for site in usable}), list[str]()
    fitted = [site for site in usable if site.name not in dense]
    moments = settled(collect_moments(file.network, fitted, batches, seed=seed, unreached=unreached))
    warn_unreached(unreached)
    release_memory()
    dense |= dict.fromkeys(unreached, UNREACHED)
    # The weights of an LSTM are rounded one by one, and its loss is measured.
    moments |= {site.name: InputMoments.even(site.weight.shape[1]) for site in changing if site.hidden}
    weigh = candidates.weigh_outputs and fitted
    sensitivities = measured_sensitivities(file, fitted, folder=folder, seed=seed) if weigh else {}
    losses = NodeLosses(file.network, changing, batches, folder) if measure else None
    return GraphLibrary(
        SiteModules({site.name: site.module(MARKED) for site in changing}),
        [site.spec for site in changing],
        candidates.formats,
        moments=moments,
        sensitivities=sensitivities,
        precisions=candidates.precisions,
        dense=dense,
        unrounded=[site.name for site in usable if site.spread],
        floating=file.unrounded if computes_in_integers(candidates.precisions) else (),
        as_nodes=True,
        multiple=candidates.multiple,
        options=replace(CHOOSING, iterations=candidates.iterations),
        folder=folder,
        losses=losses,
    )


def measured_sensitivities(
    file: PreparedFile, sites: Sequence[Site] | None = None, *, folder: Path | None = None, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Return the sensitivity matrices of usable nodes' outputs, by name (`collect_sensitivities`)."""
    sites = file.usable if sites is None else sites
    with progress_bar("perturb nodes", total=len(sites)) as bar:
        return collect_sensitivities(
            file.network,
            sites,
            file.split.calibration,
            seed=seed,
            folder=folder,
            progress=lambda _: bar.advance(),
        )
