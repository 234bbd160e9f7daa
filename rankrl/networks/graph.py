"""A network in an ONNX file as searches see it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from decomposition import CompressionPlan, FitLibrary, FitOptions, LayerSpec
from decomposition.cache import Cache, digest
from decomposition.candidates.listing import CandidateLister
from decomposition.fit.fit_options import CHOOSING
from decomposition.network.rewriting import Rewrite
from decomposition.operations.base import FINAL
from decomposition.operations.quantise import computes_in_integers
from rankrl.networks.candidates import CandidateOptions
from rankrl.onnx.graph.capture import collect_moments
from rankrl.onnx.graph.file import write_graph
from rankrl.onnx.graph.integers import without_integers
from rankrl.onnx.graph.network import Feed, OnnxNetwork
from rankrl.onnx.graph.prepared_file import PreparedFile
from rankrl.onnx.graph.refit import CompressedGraph, refitted_graph
from rankrl.onnx.graph.rewrite import MARKED
from rankrl.onnx.graph.sensitivity import METHOD, collect_sensitivities
from rankrl.onnx.graph.site import SiteModules
from rankrl.options.timing import LatencyOptions
from rankrl.progress import progress_bar
from rankrl.timing.graph_files import GraphFiles
from rankrl.timing.network_timer import NetworkTimer


@dataclass(frozen=True, eq=False)
class GraphNetwork:
    """A network in an ONNX file with its inputs; a `rankrl.networks.base.Network`.

    Attributes:
        given: The network and its inputs.
        feed: The batch that is timed.
        final_fit: How much work each fit may do when a plan is carried out.
        reduce_range: As in `quantise_onnx`.
        seed: Seed of the patches that a plan is carried out on.
        time_of_original: Time of the network / that of the file, where it was rewritten.
    """

    given: PreparedFile
    feed: Feed = field(repr=False)
    final_fit: FitOptions = FINAL
    reduce_range: bool | None = None
    seed: int = 0
    time_of_original: float = 1.0

    preparation: tuple[Rewrite, ...] = ()
    """Graphs are rewritten by the file's own reading, which a plan does not repeat."""

    @property
    def specs(self) -> list[LayerSpec]:
        """Every node with a weight in forward order."""
        return [site.spec for site in self.given.sites]

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of the first input for one input of the network."""
        return self.given.shape

    @property
    def costs(self) -> Mapping[str, int]:
        """`params`, `macs` and `bytes` of the network (`network_costs`)."""
        return self.given.totals

    @property
    def caveat(self) -> str | None:
        """Which nodes hold weights but are no operators of ONNX."""
        return self.given.foreign

    def fractions(self, kept: Mapping[str, float | None]) -> dict[str, float | None]:
        """Return fractions of the file's costs as fractions of what it was rewritten to."""
        return self.given.fractions(kept)

    def lister(self, candidates: CandidateOptions) -> CandidateLister:
        """Return what lists the candidates of every node; see `Network`."""
        specs = [site.spec for site in self.given.usable]
        return CandidateLister(specs, candidates.formats, precisions=candidates.precisions)

    def library(self, candidates: CandidateOptions, *, cache: Path | None, seed: int) -> FitLibrary:
        """Calibrate the nodes and return the library of their fits; see `Network`."""
        return fit_library(self.given, candidates, folder=cache, seed=seed)

    def timer(self, options: LatencyOptions, library: FitLibrary | None, /) -> NetworkTimer:
        """Return what measures times of the graph, whose nodes hold fits while it is timed."""
        assert library is not None
        options = replace(options, batch=self.given.network.axes.size(self.feed))
        files = GraphFiles(self.given, self.feed, library)
        return NetworkTimer(files, self.specs, self.input_shape, options)

    def applied(self, plan: CompressionPlan, library: FitLibrary, /) -> OnnxNetwork:
        """Return the network that a plan becomes, as it is written."""
        batches = self.given.split.calibration
        graph = self.refitted(plan, batches, library.sensitivities)
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "compressed.onnx"
            write_graph(graph, path, batches, reduce_range=self.reduce_range)
            return OnnxNetwork.load(path)

    def refitted(
        self, plan: CompressionPlan, batches: Sequence[Feed], sensitivities: Mapping[str, torch.Tensor]
    ) -> CompressedGraph:
        """Return the graph under a plan, its nodes fitted one after the other (`refitted_graph`).

        Args:
            plan: What becomes of the nodes.
            batches: Inputs that they are fitted on.
            sensitivities: G (out, out) of the nodes' outputs, by name.
        """
        with progress_bar("refit nodes", total=len(self.given.sites)) as bar:
            return refitted_graph(
                self.given.network,
                self.given.sites,
                plan,
                batches,
                sensitivities=sensitivities,
                options=self.final_fit,
                seed=self.seed,
                progress=lambda _: bar.advance(),
            )


def fit_library(
    given: PreparedFile,
    candidates: CandidateOptions,
    *,
    folder: Path | None = None,
    seed: int = 0,
) -> FitLibrary:
    """Calibrate the nodes and return the library of their fits; nothing is fitted yet.

    Args:
        given: The network and its inputs.
        candidates: What may become of its nodes.
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
        options=replace(CHOOSING, iterations=candidates.iterations),
        folder=folder,
    )


def measured_sensitivities(
    given: PreparedFile, *, folder: Path | None = None, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Return the sensitivity matrices of the nodes' outputs, by name (`collect_sensitivities`).

    Args:
        given: The network and its inputs.
        folder: Where they are kept for later runs on the same network and inputs, or None.
        seed: Seed of the perturbations.
    """
    usable, batches, network = given.usable, given.split.calibration, given.network

    def measured() -> dict[str, torch.Tensor]:
        with progress_bar("perturb nodes", total=len(usable)) as bar:
            return collect_sensitivities(
                network, usable, batches, seed=seed, progress=lambda _: bar.advance()
            )

    names = [node.name for site in usable for node in site.nodes]
    key = digest(METHOD, seed, names, network.axes, network.digest, batches)
    return Cache(folder).tensors("sensitivities", key, measured)
