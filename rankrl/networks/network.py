"""Define the protocols of networks that are priced, searched and compressed to files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from decomposition import CompressionPlan, FitLibrary, LayerSpec, get_format
from decomposition.choose.listing import CandidateLister
from decomposition.network.inputs import InputShape
from decomposition.rewrites import Rewrite
from rankrl.onnx.export.static_quantiser import runnable
from rankrl.options.decomposition import DecompositionOptions, FittingOptions, default_precisions
from rankrl.options.search import BudgetOptions
from rankrl.options.timing import LatencyOptions
from rankrl.plan_search.scores.scoring import Scoring
from rankrl.report import LayerRow
from rankrl.timing.latency import LatencyComparison
from rankrl.timing.network_timer import NetworkTimer
from rankrl.verify.activations import DenseGraph
from rankrl.verify.agreement import Basis, OutputAgreement


@dataclass(frozen=True)
class CandidateOptions(FittingOptions):
    """Formats, precisions and rank multiples of candidates, and the options of their fits."""

    formats: tuple[str, ...]
    precisions: tuple[str, ...] = ("float32",)
    reduce_range: bool | None = None
    multiple: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        # Fits, scores and fine-tuning must round as the finished file does on this processor.
        object.__setattr__(self, "precisions", runnable(self.precisions, self.reduce_range))

    @classmethod
    def of(
        cls, options: DecompositionOptions, budget: BudgetOptions, *, reduce_range: bool | None = None
    ) -> CandidateOptions:
        return cls(
            _differing(options.choices, budget),
            default_precisions(budget) if options.precisions is None else options.precisions,
            reduce_range,
            options.rank_multiple or 1,
            **{each.name: getattr(options, each.name) for each in fields(FittingOptions)},
        )


def _differing(formats: tuple[str, ...], budget: BudgetOptions) -> tuple[str, ...]:
    """Return the formats that differ by what a budget counts."""
    if budget.params is not None or budget.bytes is not None:
        return formats
    return tuple(name for name in formats if not get_format(name).stores_less_alone) or formats


class PricedNetwork(Protocol):
    """A network with its calibration inputs, as budgets use it."""

    @property
    def specs(self) -> Sequence[LayerSpec]:
        """Every layer in forward order, compressible or not."""

    @property
    def input_shape(self) -> InputShape:
        """Shape of one input without the batch axis, or the specification of several inputs."""

    @property
    def costs(self) -> Mapping[str, int]:
        """`params`, `macs` (for one input) and `bytes` (of the parameters) of the dense network."""

    @property
    def preparation(self) -> tuple[Rewrite, ...]:
        """Rewrites of the network before compression, which plans record."""

    @property
    def time_of_original(self) -> float:
        """Time of this network / that of the user's original, 1 where both are the same."""

    @property
    def caveat(self) -> str | None:
        """Message to users whose budget cannot be reached, None without one."""

    def fractions(self, kept: Mapping[str, float | None]) -> dict[str, float | None]:
        """Convert fractions of the original's costs to fractions of this network's."""

    def lister(self, candidates: CandidateOptions) -> CandidateLister:
        """Return the lister of every layer's candidates, without any fit."""

    def library(self, candidates: CandidateOptions, *, cache: Path | None, seed: int) -> FitLibrary:
        """Calibrate and return the library of the layers' fits; nothing is fitted yet."""

    def dense_graph(self) -> DenseGraph:
        """Return the network as a graph, whose activations a limit of memory counts."""

    def timer(self, options: LatencyOptions, library: FitLibrary | None, /) -> NetworkTimer:
        """Return the timer of this network's layers and of the network under plans."""


class SearchableNetwork(PricedNetwork, Protocol):
    """A network whose plans can be scored, as searches use it."""

    @property
    def scoring(self) -> Scoring:
        """Scoring of plans and of compressed networks."""

    def applied(self, plan: CompressionPlan, library: FitLibrary, /) -> Any:
        """Return the compressed and refitted network, as `scoring` takes it."""


@dataclass(frozen=True)
class WrittenFile:
    """A compressed network's ONNX file, verified and timed."""

    verified: float
    latency: LatencyComparison
    outputs: tuple[OutputAgreement, ...] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)
    runtimes: Mapping[str, Any] | None = None


class Network(SearchableNetwork, Protocol):
    """A network that is compressed to a file: exported, verified, timed and scored."""

    @property
    def compared_inputs(self) -> int:
        """Number of inputs that `score` uses."""

    @property
    def rewritten(self) -> Mapping[str, str]:
        """Descriptions of layers that were rewritten before compression, by name, for the report."""

    def dense_int8(self) -> dict[str, Any] | None:
        """Return `dense_int8` of metrics.json; None where integers are not requested or cannot be made."""

    def write(self, compressed: Any, path: Path, metadata: Mapping[str, str]) -> WrittenFile:
        """Write a compressed network as an ONNX file, verify it, and time it along with the original's."""

    def activation_bytes(self, path: Path | None = None) -> int:
        """Return the peak memory of the activations of a file, or of the original, for one input."""

    def costs_before(self) -> dict[str, int]:
        """Return `params`, `macs`, `bytes` (of the parameters) and `file_bytes` of the original."""

    def costs_after(self, plan: CompressionPlan, compressed: Any) -> dict[str, int]:
        """Return `params`, `macs` and `bytes` of a compressed network."""

    @property
    def unit(self) -> str:
        """Key of `score` in metrics.json: `accuracy` on test images, else `score`."""

    def score(self, compressed: Any | None) -> float:
        """Return a compressed network's score on inputs that it was not fitted to; None: the original's."""

    @property
    def basis(self) -> Basis:
        """Kind and inputs of the scores that `values` returns."""

    def values(self, compressed: Any | None) -> np.ndarray | None:
        """Return a score of every input, shape (N,), by which a loss is certified; None: of the original."""

    def collapsed(self, compressed: Any, score: float) -> str | None:
        """Return a message if a compressed network's answers are no better than a constant, else None."""

    def rows(self, plan: CompressionPlan, compressed: Any) -> Sequence[LayerRow]:
        """Return the report's row of every layer."""
