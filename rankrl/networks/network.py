"""The protocol of networks that are compressed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from decomposition import CompressionPlan, FitLibrary, LayerSpec
from decomposition.choose.listing import CandidateLister
from decomposition.network.inputs import InputShape
from decomposition.network.rewriting import Rewrite
from rankrl.onnx.export.ranges import runnable
from rankrl.options.decomposition import (
    DecompositionOptions,
    FittingOptions,
    default_precisions,
    differing_formats,
)
from rankrl.options.search import BudgetOptions
from rankrl.options.timing import LatencyOptions
from rankrl.plan_search.scores.scoring import Scoring
from rankrl.report import LayerRow
from rankrl.timing.latency import LatencyComparison
from rankrl.timing.network_timer import NetworkTimer
from rankrl.verify.agreement import OutputAgreement
from rankrl.verify.certificate import Basis


@dataclass(frozen=True)
class CandidateOptions(FittingOptions):
    """Which candidates there are and how they are fitted."""

    formats: tuple[str, ...]
    precisions: tuple[str, ...] = ("float32",)
    reduce_range: bool | None = None
    multiple: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        # Fits, scores and fine-tuning round as the finished file does, so nothing sees what was asked for.
        object.__setattr__(self, "precisions", runnable(self.precisions, self.reduce_range))

    @classmethod
    def of(
        cls,
        options: DecompositionOptions,
        budget: BudgetOptions,
        *,
        multiple: int | None = None,
        reduce_range: bool | None = None,
    ) -> CandidateOptions:
        """Return which candidates there are under a budget."""
        return cls(
            differing_formats(options.choices, budget),
            default_precisions(budget) if options.precisions is None else options.precisions,
            reduce_range,
            options.rank_multiple or multiple or 1,
            **{each.name: getattr(options, each.name) for each in fields(FittingOptions)},
        )


_Network = TypeVar("_Network")
_Answer = TypeVar("_Answer")


def once_per_network(function: Callable[[_Network], _Answer]) -> Callable[[_Network], _Answer]:
    """Return a function that calls another one once for every network and remembers its answer.

    Networks are told apart as objects and not kept alive. A network must not change between calls.
    """
    answers: WeakKeyDictionary[_Network, _Answer] = WeakKeyDictionary()

    def answer(network: _Network) -> _Answer:
        if network not in answers:
            answers[network] = function(network)
        return answers[network]

    return answer


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
