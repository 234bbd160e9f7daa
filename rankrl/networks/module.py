"""Implement the protocols of networks for PyTorch modules."""

from __future__ import annotations

import json
import logging
import math
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn

from decomposition import (
    CompressionPlan,
    DecompositionError,
    FitLibrary,
    Inputs,
    LayerSpec,
    apply_plan,
    compressible_layers,
    count_macs,
    count_parameters,
    inspect_layers,
)
from decomposition.cache import Cache
from decomposition.calibration.metric import WIDEST, Narrowing
from decomposition.choose.listing import CandidateLister, Removal
from decomposition.fit.fit_options import CHOOSING
from decomposition.network.inputs import InputShape, example_tensor, random_batch
from decomposition.network.layers import FLOAT_BYTES
from decomposition.operations import computes_in_integers
from decomposition.progress import Progress
from decomposition.rewrites import Rewrite, rewrites_of
from pruning import PruningError, channel_groups, residual_blocks
from rankrl.data import ImageData, Preprocessing
from rankrl.data.sample import calibration_images
from rankrl.device import accepted_layout, in_layout
from rankrl.errors import ConfigError, ExportError
from rankrl.networks.network import CandidateOptions, WrittenFile
from rankrl.onnx.export import export_onnx
from rankrl.onnx.export.onnx_file import check_names, name_file
from rankrl.onnx.export.tracing import feed_of
from rankrl.onnx.protobuf import load_model
from rankrl.operations import RemoveBlock
from rankrl.options.decomposition import DecompositionOptions
from rankrl.options.timing import LatencyOptions
from rankrl.plan_search.scores.evaluators import Score, checked_score
from rankrl.plan_search.scores.scoring import FunctionScoring, Scoring
from rankrl.report import LayerRow
from rankrl.timing.network_timer import ModuleFiles, NetworkTimer
from rankrl.verify.activations import DenseGraph, activation_bytes, one_input
from rankrl.verify.agreement import Basis
from rankrl.verify.file_export import (
    NO_CACHE,
    FileInputs,
    export_dense,
    export_file,
    int8_numbers,
    module_runtimes,
    unlike_file,
)
from rankrl.verify.measure import Measure, layer_rows, stored_bytes

log = logging.getLogger(__name__)


def block_removals(model: nn.Module, input_shape: InputShape) -> dict[str, Removal]:
    """Return the operation that removes a layer with its residual block, by the layer's name."""
    order = [spec.name for spec in compressible_layers(model, input_shape)]
    removals: dict[str, Removal] = {}
    for block in residual_blocks(model, example_tensor(model, input_shape)):
        layers = [name for name in order if name in block.layers]
        operation = RemoveBlock(block.name)
        removals.update({name: Removal(operation, last=name == layers[-1]) for name in layers})
    if not removals:
        raise ConfigError(
            "decomposition.blocks: the network has no residual block that can be removed, one that adds its "
            "input to an output of the same shape; leave it false"
        )
    return removals


def channel_narrowings(
    model: nn.Module, input_shape: InputShape, fractions: Sequence[float], multiple: int = 1
) -> dict[str, Narrowing]:
    """Return the numbers of input channels that a layer may keep, by the name of the reading layer.

    Channels can go where one layer writes them, one reads them, and the two follow each other. Channels that
    several layers share, or that a layer norm normalises together, are removed by `task=prune`.
    """
    wrong = [each for each in fractions if not 0 < each < 1]
    if wrong:
        raise ConfigError(
            f"decomposition.channels: {wrong[0]} is outside (0, 1); give fractions of the channels to keep, "
            "for example [0.75,0.5]"
        )
    try:
        groups = channel_groups(model, example_tensor(model, input_shape))
    except (PruningError, DecompositionError) as error:
        raise ConfigError(
            f"decomposition.channels: the network cannot be followed ({error}); leave channels empty"
        ) from error
    specs = compressible_layers(model, input_shape)
    order = [spec.name for spec in specs]
    wide = {spec.name for spec in specs if math.prod(spec.weight_shape[1:]) > WIDEST}  # they have no matrix
    narrowings: dict[str, Narrowing] = {}
    for group in groups:
        if group.obstacle is not None or group.norms or len(group.layers) != 1 or len(group.readers) != 1:
            continue
        ((producer, made),), ((reader, read),) = group.layers.items(), group.readers.items()
        # Channels that go in pairs or groups only (of a group norm, say) are left to task=prune.
        if made != read or group.units != len(made):
            continue
        if reader in wide or producer not in order or order.index(producer) + 1 >= len(order):
            continue
        counts = _counts(len(made), fractions, multiple)
        if counts and order[order.index(producer) + 1] == reader:
            narrowings[reader] = Narrowing(producer, counts)
    if not narrowings:
        raise ConfigError(
            "decomposition.channels: the network has no two layers of which one alone reads what the other "
            "makes; leave channels empty, or remove channels with task=prune"
        )
    return narrowings


def _counts(channels: int, fractions: Sequence[float], multiple: int) -> tuple[int, ...]:
    """Return the numbers of channels that are kept, largest first."""
    step = multiple if channels > multiple else 1
    counts = {max(step, step * round(fraction * channels / step)) for fraction in fractions}
    return tuple(sorted((each for each in counts if each < channels), reverse=True))


@dataclass(frozen=True, eq=False)
class ModuleNetwork:
    """A PyTorch module and its calibration inputs; a `rankrl.networks.network.PricedNetwork`."""

    model: nn.Module
    input_shape: InputShape
    inputs: Sequence[Inputs] = field(default=(), repr=False)
    preprocessing: Preprocessing | None = None

    time_of_original = 1.0
    caveat = None
    rewritten: ClassVar[Mapping[str, str]] = {}

    @cached_property
    def specs(self) -> tuple[LayerSpec, ...]:
        return tuple(inspect_layers(self.model, self.input_shape))

    @cached_property
    def costs(self) -> dict[str, int]:
        parameters = count_parameters(self.model)
        macs = count_macs(self.model, self.input_shape)
        return {"params": parameters, "macs": macs, "bytes": FLOAT_BYTES * parameters}

    @property
    def preparation(self) -> tuple[Rewrite, ...]:
        return rewrites_of(self.model)

    def fractions(self, kept: Mapping[str, float | None]) -> dict[str, float | None]:
        """Return the fractions unchanged: the module is the original."""
        return dict(kept)

    def lister(self, candidates: CandidateOptions) -> CandidateLister:
        return CandidateLister.of_network(
            self.model, self.input_shape, candidates.formats, **self._listed(candidates)
        )

    def floating(self, candidates: CandidateOptions) -> Collection[str]:
        """Return the layers that cannot compute in integers; none where no file is written."""
        del candidates
        return ()

    def library(self, candidates: CandidateOptions, *, cache: Path | None, seed: int) -> FitLibrary:
        return FitLibrary.calibrated(
            self.model,
            self.inputs[0],
            candidates.formats,
            self.inputs,
            weigh_outputs=candidates.weigh_outputs,
            multiple=candidates.multiple,
            options=replace(CHOOSING, iterations=candidates.iterations),
            folder=cache,
            seed=seed,
            **self._listed(candidates),
        )

    def dense_graph(self) -> DenseGraph:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "dense.onnx"
            export_onnx(self.model, path, self.input_shape, progress=False)
            feed = feed_of(self.model, random_batch(self.model, self.input_shape, 1))
            return DenseGraph(load_model(path), feed, self._weights)

    @property
    def _weights(self) -> dict[str, str]:
        return {spec.name: f"{spec.name}.weight" for spec in self.specs}

    def timer(self, options: LatencyOptions, _library: FitLibrary | None = None, /) -> NetworkTimer:
        """Return the timer of the exported module; no fits are needed."""
        preprocessing = self.preprocessing if options.preprocess else None
        files = ModuleFiles(self.model, self.input_shape, options.batch, options.channel_block, preprocessing)
        return NetworkTimer(files, self.specs, self.input_shape, options)

    def refitted(
        self,
        plan: CompressionPlan,
        options: DecompositionOptions,
        seed: int,
        progress: Progress,
        statistics: Inputs | None = None,
    ) -> nn.Module:
        """Apply a plan, its layers refitted one after the other; see `decomposition.apply_plan`."""
        return apply_plan(
            self.model,
            plan,
            self.inputs,
            sequential=options.sequential,
            weigh_outputs=options.weigh_outputs,
            options=options.final_fit(),
            seed=seed,
            statistics=statistics,
            progress=progress,
        )

    def costs_after(self, plan: CompressionPlan, compressed: nn.Module) -> dict[str, int]:
        return {
            "params": count_parameters(compressed),
            "macs": count_macs(compressed, self.input_shape),
            "bytes": stored_bytes(plan, self.model, compressed),
        }

    def rows(self, plan: CompressionPlan, compressed: nn.Module) -> list[LayerRow]:
        return layer_rows(plan, self.model, compressed)

    def _listed(self, candidates: CandidateOptions) -> dict[str, Any]:
        """Return what is listed for every layer, as arguments of `CandidateLister` and `FitLibrary`."""
        names = ("skip", "only", "precisions", "tensorised")
        listed: dict[str, Any] = {name: getattr(candidates, name) for name in names}
        listed["floating"] = self.floating(candidates)
        if candidates.channels:
            listed["narrowings"] = channel_narrowings(
                self.model, self.input_shape, candidates.channels, candidates.multiple
            )
        if candidates.blocks:
            listed["removals"] = block_removals(self.model, self.input_shape)
        return listed


@dataclass(frozen=True, eq=False, kw_only=True)
class ScoredModule(ModuleNetwork):
    """A module whose plans a function scores; a `rankrl.networks.network.SearchableNetwork`."""

    judge: Score
    options: DecompositionOptions
    seed: int = 0
    progress: Progress = field(default=None, repr=False)

    @property
    def scoring(self) -> FunctionScoring:
        return FunctionScoring(self.model, self.judge, self.inputs)

    def applied(self, plan: CompressionPlan, _library: FitLibrary | None = None, /) -> nn.Module:
        return self.refitted(plan, self.options, self.seed, self.progress)


@dataclass(frozen=True, eq=False, kw_only=True)
class FileModule(ModuleNetwork):
    """A module compressed to a file; classifiers and users' networks differ in scoring, measure and files."""

    scoring: Scoring
    measure: Measure
    files: FileInputs
    options: DecompositionOptions
    export: LatencyOptions
    folder: Path
    without_file: bool = False
    seed: int = 0
    cache: Cache = NO_CACHE
    statistics: Callable[[], Inputs] | None = field(default=None, repr=False)
    progress: Progress = field(default=None, repr=False)

    def applied(self, plan: CompressionPlan, _library: FitLibrary | None = None, /) -> nn.Module:
        statistics = None if self.statistics is None else self.statistics()
        return self.refitted(plan, self.options, self.seed, self.progress, statistics)

    @cached_property
    def baseline(self) -> Path:
        """ONNX file of the dense network, compared with it on real inputs."""
        path = export_dense(self.model, self.files, self.folder, self.cache)
        check_names(path, self.export)
        return path

    def dense_graph(self) -> DenseGraph:
        return DenseGraph(load_model(self.baseline), one_input(next(self.files.feeds())), self._weights)

    def activation_bytes(self, path: Path | None = None) -> int:
        return activation_bytes(path or self.baseline, one_input(next(self.files.feeds())))

    def floating(self, candidates: CandidateOptions) -> Collection[str]:
        """Return the layers whose integers PyTorch does not simulate as the file has them (`unlike_file`)."""
        return self._unlike_file if computes_in_integers(candidates.precisions) else ()

    @cached_property
    def _unlike_file(self) -> list[str]:
        if self.without_file:
            return []
        return unlike_file(self.model, self.specs, self.baseline, self.files)

    def write(self, compressed: nn.Module, path: Path, metadata: Mapping[str, str]) -> WrittenFile:
        """Export a compressed network, verify the file on real inputs and time it; see `Network`.

        The file's metadata holds the description of images under `preprocessing`.
        """
        files, options = self.files, self.export
        if self.preprocessing is not None:
            metadata = {"preprocessing": json.dumps(self.preprocessing.to_dict()), **metadata}
        numbers, times = export_file(compressed, self.baseline, files, path, metadata, self.folder)
        outputs = tuple(files.agreement(self.baseline, path))
        runtimes = module_runtimes(compressed, self.baseline, path, files, known=numbers, scratch=self.folder)
        name_file(path, options)
        if outputs and options.output_names:
            named = zip(outputs, options.output_names, strict=True)
            outputs = tuple(replace(output, name=name) for output, name in named)
        return WrittenFile(numbers["max_abs_difference"], times, outputs, numbers, runtimes)

    def dense_int8(self) -> dict[str, Any] | None:
        if not self.export.int8 or self.without_file:
            return None
        try:
            baseline = self.baseline
        except ExportError as error:  # of a comparison of plans, which exports nothing else
            log.warning("the dense network in 8-bit integers is not measured: %s", error)
            return None
        return int8_numbers(baseline, self.files, self.folder, self.cache)

    @property
    def compared_inputs(self) -> int:
        return len(self.measure)

    def costs_before(self) -> dict[str, int]:
        return self.costs if self.without_file else {**self.costs, "file_bytes": self.baseline.stat().st_size}

    @property
    def unit(self) -> str:
        return self.measure.unit

    def score(self, compressed: nn.Module | None) -> float:
        if compressed is None:
            return checked_score(self.measure.score(self.model), "the dense network")
        return checked_score(self.measure.score(compressed), "the compressed network")

    @property
    def basis(self) -> Basis:
        return self.measure.basis

    def values(self, compressed: nn.Module | None) -> np.ndarray | None:
        return self.measure.values(self.model if compressed is None else compressed)

    def collapsed(self, compressed: nn.Module, score: float) -> str | None:
        return self.measure.collapsed(compressed, score)


def calibrating_images(model: nn.Module, data: ImageData, count: int, *, seed: int) -> Tensor:
    """Return the training images that layers are fitted to, in the network's fastest layout."""
    images = calibration_images(data, count, seed=seed)
    return in_layout(images, accepted_layout(model, images[:2]))
