"""Compress a user's own PyTorch module with the user's inputs: score, export, verify and report."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from decomposition import CompressionPlan, FitLibrary, apply_plan
from decomposition.network.inputs import split
from decomposition.operations.quantise import computes_in_integers
from rankrl.networks.module import ModuleNetwork
from rankrl.networks.network import CandidateOptions, WrittenFile, once_per_network
from rankrl.onnx.export import export_onnx, quantise_onnx, verify_onnx
from rankrl.onnx.export.onnx_file import check_names, name_file
from rankrl.onnx.export.tracing import BATCH_SIZES
from rankrl.options.decomposition import DecompositionOptions
from rankrl.options.timing import LatencyOptions
from rankrl.plan_search.scores.score_evaluator import Score, answer, checked_score, values_of_inputs
from rankrl.plan_search.scores.scoring import FunctionScoring
from rankrl.progress import Progress
from rankrl.timing import compare_latency
from rankrl.timing.latency import LatencyComparison
from rankrl.verify.agreement import agreement_score
from rankrl.verify.certificate import OWN_SCORE, Basis
from rankrl.verify.file_export import export_file, rival_numbers
from rankrl.verify.own_inputs import HeldoutScore, OwnInputs
from rankrl.verify.runtimes import ComparedFiles, runtime_numbers
from rankrl.verify.simulation import unlike_file


@dataclass(frozen=True, eq=False, kw_only=True)
class ScoredModule(ModuleNetwork):
    """A module whose plans a function scores; a `rankrl.networks.network.SearchableNetwork`."""

    judge: Score
    options: DecompositionOptions
    seed: int = 0
    progress: Progress = field(default=None, repr=False)

    @property
    def scoring(self) -> FunctionScoring:
        """Scoring by the user's function."""
        return FunctionScoring(self.model, self.judge, self.inputs)

    def applied(self, plan: CompressionPlan, _library: FitLibrary | None = None, /) -> nn.Module:
        """Return the compressed module, its layers refitted one after the other."""
        options = self.options
        return apply_plan(
            self.model,
            plan,
            self.inputs,
            sequential=options.sequential,
            weigh_outputs=options.weigh_outputs,
            options=options.final_fit(),
            seed=self.seed,
            progress=self.progress,
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class OwnModule(ScoredModule):
    """A module that is compressed to a file; a `rankrl.networks.network.Network`."""

    heldout: HeldoutScore
    files: OwnInputs
    timing: LatencyOptions
    folder: Path
    unseen: HeldoutScore | None = None

    @cached_property
    def baseline(self) -> Path:
        """ONNX file of the dense network, compared with it on held-out inputs."""
        path = self.folder / "dense.onnx"
        timing = self.timing
        export_onnx(
            self.model,
            path,
            self.input_shape,
            channel_block=timing.channel_block,
            dynamic_axes=timing.dynamic_axes,
            progress=False,
        )
        check_names(path, timing)
        verify_onnx(self.model, path, split(self.heldout.sample.inputs, max(BATCH_SIZES))[0])
        return path

    def floating(self, candidates: CandidateOptions) -> Collection[str]:
        """Return the layers whose integers PyTorch does not simulate as the file has them (`unlike_file`)."""
        return self._unlike_file if computes_in_integers(candidates.precisions) else ()

    @cached_property
    def _unlike_file(self) -> list[str]:
        return unlike_file(
            self.model,
            self.specs,
            self.input_shape,
            self.baseline,
            self.files,
            self.timing.reduce_range,
        )

    def write(self, compressed: nn.Module, path: Path, metadata: Mapping[str, str]) -> WrittenFile:
        """Export a compressed network, verify the file on real inputs and time it; see `Network`."""
        timing = self.timing
        numbers, times = export_file(
            compressed,
            self.baseline,
            self.files,
            path,
            opset=None,
            channel_block=timing.channel_block,
            reduce_range=timing.reduce_range,
            timing=timing.timing,
            metadata=metadata,
            scratch=self.folder,
            dynamic_axes=timing.dynamic_axes,
        )
        outputs = tuple(self.files.agreement(self.baseline, path))
        runtimes = None
        if len(timing.compared_runtimes) > 1:
            files, score = self.files, self.files.score(self.baseline)
            compared = ComparedFiles(self.baseline, path, timing, files.feeds, score, files.timed)
            runtimes = runtime_numbers(compared, self.folder)
        name_file(path, timing)
        if timing.output_names:
            named = zip(outputs, timing.output_names, strict=True)
            outputs = tuple(replace(output, name=name) for output, name in named)
        return WrittenFile(numbers["max_abs_difference"], times, outputs, numbers, runtimes)

    def dense_int8(self) -> dict[str, Any] | None:
        """Return the section `dense_int8` of metrics.json; None if it is not asked for or cannot be made."""
        timing, files = self.timing, self.files
        if not timing.int8:
            return None

        def measured(path: Path) -> tuple[dict[str, Any], LatencyComparison]:
            quantise_onnx(self.baseline, path, files.feeds(), reduce_range=timing.reduce_range)
            worth = {"agreement": agreement_score(files.agreement(self.baseline, path))}
            if self._by_class:
                worth["score"] = files.accuracy(path)
            return worth, compare_latency(self.baseline, path, inputs=files.timed, **timing.timing)

        return rival_numbers(self.folder / "dense-int8.onnx", measured)

    @property
    def _by_class(self) -> bool:
        return self.judge is self.heldout and self.heldout.by_class

    @property
    def compared_inputs(self) -> int:
        """Number of inputs that `score` uses: the held-out ones."""
        return len(self.heldout.sample)

    def costs_before(self) -> dict[str, int]:
        """Return the costs of the dense network."""
        return {**self.costs, "file_bytes": self.baseline.stat().st_size}

    def score(self, compressed: nn.Module | None) -> float:
        """Return the function's score of a compressed network, or of the dense one."""
        if compressed is None:
            return checked_score(self._answer(self.model), "the dense network")
        return checked_score(self._answer(compressed), "the compressed network")

    @cached_property
    def _answer(self) -> Callable[[nn.Module], Any]:
        """The function's score of a network, computed once per network."""
        return once_per_network(partial(answer, self.judge))

    @property
    def basis(self) -> Basis:
        """The held-out inputs, which choose no plan, or those of the user's own score."""
        if self.judge is not self.heldout:
            return OWN_SCORE
        measure = self.heldout if self.unseen is None else self.unseen
        return Basis(measure.unit, f"{measure.what} inputs")

    def values(self, compressed: nn.Module | None) -> np.ndarray | None:
        """Return the score of every input; see `Network`."""
        network = self.model if compressed is None else compressed
        if self.judge is self.heldout:
            return None if self.unseen is None else self.unseen.values(network)
        return values_of_inputs(self._answer(network))

    def collapsed(self, compressed: nn.Module, score: float) -> str | None:
        """Return a message if outputs on held-out inputs are no better than a constant; see `Network`."""
        del score
        return self.heldout.collapsed(compressed)
