"""What budgets, searches and reports know of a network, be it a PyTorch module or an ONNX graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from decomposition import CompressionPlan, FitLibrary, LayerSpec
from decomposition.choose.listing import CandidateLister
from decomposition.network.inputs import InputShape
from decomposition.network.rewriting import Rewrite
from rankrl.networks.candidates import CandidateOptions
from rankrl.options.timing import LatencyOptions
from rankrl.plan_search.scores.scoring import Scoring
from rankrl.report import LayerRow
from rankrl.timing.latency import LatencyComparison
from rankrl.timing.network_timer import NetworkTimer
from rankrl.verify.agreement import OutputAgreement
from rankrl.verify.certificate import Basis


class PricedNetwork(Protocol):
    """A network with the inputs that it is calibrated on: all that a budget asks for."""

    @property
    def specs(self) -> Sequence[LayerSpec]:
        """Every layer in forward order, compressible or not."""

    @property
    def input_shape(self) -> InputShape:
        """Shape of one input without the batch axis, or what else is known of the inputs."""

    @property
    def costs(self) -> Mapping[str, int]:
        """`params`, `macs` (for one input) and `bytes` (of the parameters) of the dense network."""

    @property
    def preparation(self) -> tuple[Rewrite, ...]:
        """What was rewritten in the network before, for its plans."""

    @property
    def time_of_original(self) -> float:
        """Time of the network / that of what a user calls the original, where that is another one; else 1."""

    @property
    def caveat(self) -> str | None:
        """What a user must know, besides the budget, when that cannot be reached; None for nothing."""

    def fractions(self, kept: Mapping[str, float | None]) -> dict[str, float | None]:
        """Return fractions of the original's costs as fractions of this network's."""

    def lister(self, candidates: CandidateOptions) -> CandidateLister:
        """Return what lists the candidates of every layer, without any fit."""

    def library(self, candidates: CandidateOptions, *, cache: Path | None, seed: int) -> FitLibrary:
        """Calibrate and return the library of the layers' fits; nothing is fitted yet."""

    def timer(self, options: LatencyOptions, library: FitLibrary | None, /) -> NetworkTimer:
        """Return what measures times of this network."""


class SearchableNetwork(PricedNetwork, Protocol):
    """A network whose plans can be scored: all that a search asks for."""

    @property
    def scoring(self) -> Scoring:
        """What plans, and the networks that they become, are scored by."""

    def applied(self, plan: CompressionPlan, library: FitLibrary, /) -> Any:
        """Return the compressed network, refit and all, as `scoring` takes it."""


@dataclass(frozen=True)
class WrittenFile:
    """A compressed network's ONNX file, verified and timed."""

    verified: float
    latency: LatencyComparison
    outputs: tuple[OutputAgreement, ...] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)
    runtimes: Mapping[str, Any] | None = None


class Network(SearchableNetwork, Protocol):
    """A network that is compressed to a file: all that the end of the road asks for."""

    @property
    def compared_inputs(self) -> int:
        """How many inputs `score` looks at."""

    @property
    def rewritten(self) -> Mapping[str, str]:
        """What became of layers before anything was compressed, by name, where a report should say so."""

    def dense_int8(self) -> dict[str, Any] | None:
        """Return what the network in 8-bit integers costs and is worth: `dense_int8` of metrics.json.

        None where it is not asked for (`LatencyOptions.int8`) or cannot be made.
        """

    def write(self, compressed: Any, path: Path, metadata: Mapping[str, str]) -> WrittenFile:
        """Write a compressed network as an ONNX file, verify it, and time it along with the original's."""

    def costs_before(self) -> dict[str, int]:
        """Return `params`, `macs`, `bytes` (of the parameters) and `file_bytes` of the original."""

    def costs_after(self, plan: CompressionPlan, compressed: Any) -> dict[str, int]:
        """Return `params`, `macs` and `bytes` of a compressed network."""

    def score(self, compressed: Any | None) -> float:
        """Return how good a compressed network is on inputs that it was not fitted to; None: the original."""

    @property
    def basis(self) -> Basis:
        """What `values` are."""

    def values(self, compressed: Any | None) -> np.ndarray | None:
        """Return a score of every input, shape (N,), by which a loss is certified; None: of the original."""

    def collapsed(self, compressed: Any, score: float) -> str | None:
        """Return what to tell a reader if a compressed network answers no better than a constant."""

    def rows(self, plan: CompressionPlan, compressed: Any) -> Sequence[LayerRow]:
        """Return the report's row of every layer."""
