"""Implement the protocol of networks for PyTorch modules: own modules, and classifiers of data sets."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
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
from decomposition.network.inputs import InputShape, example_tensor, split
from decomposition.network.layers import FLOAT_BYTES
from decomposition.network.rewriting import Rewrite, rewrites_of
from decomposition.operations.quantise import computes_in_integers
from decomposition.progress import Progress
from pruning import PruningError, channel_groups, residual_blocks
from rankrl.data import ImageData, Preprocessing
from rankrl.data.calibration import calibration_images
from rankrl.errors import ConfigError, ExportError
from rankrl.networks.network import CandidateOptions, WrittenFile, once_per_network
from rankrl.onnx.export import export_onnx, quantise_onnx, verify_onnx
from rankrl.onnx.export.onnx_file import check_names, name_file
from rankrl.onnx.export.tracing import BATCH_SIZES
from rankrl.operations import RemoveBlock
from rankrl.options.decomposition import DecompositionOptions
from rankrl.options.timing import ExportOptions, LatencyOptions
from rankrl.plan_search.scores.evaluators import (
    EvaluatorOptions,
    Score,
    answer,
    checked_score,
    values_of_inputs,
)
from rankrl.plan_search.scores.scoring import FunctionScoring, ImageScoring
from rankrl.report import LayerRow
from rankrl.timing import compare_latency
from rankrl.timing.latency import LatencyComparison
from rankrl.timing.network_timer import ModuleFiles, NetworkTimer
from rankrl.training.accuracy import guessing_share, share
from rankrl.verify.agreement import agreement_score
from rankrl.verify.certificate import OWN_SCORE, Basis, accuracy_collapse
from rankrl.verify.file_export import export_file, rival_numbers, unlike_file
from rankrl.verify.measure import (
    NO_CACHE,
    HeldoutScore,
    ImageInputs,
    OwnInputs,
    correct_tests,
    export_dense,
    int8_numbers,
    kept_correct_tests,
    layer_rows,
    stored_bytes,
)
from rankrl.verify.runtimes import ComparedFiles, image_runtimes, runtime_numbers

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

    Channels between two layers can be removed without changing the rest of the network where one layer writes
    them, one reads them, and the two follow each other: inside a residual block, or along a plain chain.
    Channels that several layers share, of a residual stream for example, or that a layer norm normalises
    together, are removed by `task=prune`.
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
        """Every layer in forward order."""
        return tuple(inspect_layers(self.model, self.input_shape))

    @cached_property
    def costs(self) -> dict[str, int]:
        """`params`, `macs` and `bytes` of the dense network."""
        parameters = count_parameters(self.model)
        macs = count_macs(self.model, self.input_shape)
        return {"params": parameters, "macs": macs, "bytes": FLOAT_BYTES * parameters}

    @property
    def preparation(self) -> tuple[Rewrite, ...]:
        """Rewrites of the module before compression."""
        return rewrites_of(self.model)

    def fractions(self, kept: Mapping[str, float | None]) -> dict[str, float | None]:
        """Return the fractions unchanged: the module is the original."""
        return dict(kept)

    def lister(self, candidates: CandidateOptions) -> CandidateLister:
        """Return the lister of every layer's candidates; see `PricedNetwork`."""
        return CandidateLister.of_network(
            self.model,
            self.input_shape,
            candidates.formats,
            skip=candidates.skip,
            only=candidates.only,
            precisions=candidates.precisions,
            floating=self.floating(candidates),
            tensorised=candidates.tensorised,
            **self._removable(candidates),
        )

    def floating(self, candidates: CandidateOptions) -> Collection[str]:
        """Return the layers that cannot compute in integers; none where no file is written."""
        del candidates
        return ()

    def library(self, candidates: CandidateOptions, *, cache: Path | None, seed: int) -> FitLibrary:
        """Calibrate and return the library of fits; see `PricedNetwork`."""
        return FitLibrary.calibrated(
            self.model,
            self.inputs[0],
            candidates.formats,
            self.inputs,
            weigh_outputs=candidates.weigh_outputs,
            skip=candidates.skip,
            only=candidates.only,
            precisions=candidates.precisions,
            floating=self.floating(candidates),
            tensorised=candidates.tensorised,
            multiple=candidates.multiple,
            **self._removable(candidates),
            options=replace(CHOOSING, iterations=candidates.iterations),
            folder=cache,
            seed=seed,
        )

    def timer(self, options: LatencyOptions, _library: FitLibrary | None = None, /) -> NetworkTimer:
        """Return the timer of the exported module; no fits are needed."""
        preprocessing = self.preprocessing if options.preprocess else None
        files = ModuleFiles(self.model, self.input_shape, options.batch, options.channel_block, preprocessing)
        return NetworkTimer(files, self.specs, self.input_shape, options)

    def costs_after(self, plan: CompressionPlan, compressed: nn.Module) -> dict[str, int]:
        """Return the costs of a compressed network."""
        return {
            "params": count_parameters(compressed),
            "macs": count_macs(compressed, self.input_shape),
            "bytes": stored_bytes(plan, self.model, compressed),
        }

    def rows(self, plan: CompressionPlan, compressed: nn.Module) -> list[LayerRow]:
        """Return the report's row of every layer."""
        return layer_rows(plan, self.model, compressed)

    def _removable(self, candidates: CandidateOptions) -> dict[str, Any]:
        """Return the channels and blocks that may be removed, as arguments of `FitLibrary`."""
        removable: dict[str, Any] = {}
        if candidates.channels:
            removable["narrowings"] = channel_narrowings(
                self.model, self.input_shape, candidates.channels, candidates.multiple
            )
        if candidates.blocks:
            removable["removals"] = block_removals(self.model, self.input_shape)
        return removable


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


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageModule(ModuleNetwork):
    """A classifier of a data set's images; a `rankrl.networks.network.Network`.

    Plans are scored on images held out of the training set; test images choose nothing and are read for the
    report alone.
    """

    data: ImageData
    images: Tensor
    scores: EvaluatorOptions
    scored_images: int
    options: DecompositionOptions
    export: ExportOptions
    folder: Path
    seed: int = 0
    cache: Cache = NO_CACHE

    @property
    def scoring(self) -> ImageScoring:
        """Held-out images."""
        return ImageScoring(self.model, self.data, self.scores, self.scored_images)

    def applied(self, plan: CompressionPlan, _library: FitLibrary | None = None, /) -> nn.Module:
        """Return the compressed network, its layers refitted one after the other."""
        log.info("applying the plan, layer by layer")
        return apply_plan(
            self.model,
            plan,
            self.images,
            sequential=self.options.sequential,
            weigh_outputs=self.options.weigh_outputs,
            options=self.options.final_fit(),
            seed=self.seed,
            statistics=calibration_images(self.data, len(self.images), seed=self.seed, augmented=True),
        )

    @cached_property
    def baseline(self) -> Path:
        """ONNX file of the dense network."""
        path = export_dense(self.model, self.data, self.folder, self.export, cache=self.cache)
        check_names(path, self.export)
        return path

    def floating(self, candidates: CandidateOptions) -> Collection[str]:
        """Return the layers whose integers PyTorch does not simulate as the file has them (`unlike_file`)."""
        return self._unlike_file if computes_in_integers(candidates.precisions) else ()

    @cached_property
    def _unlike_file(self) -> list[str]:
        if self.export.skip:
            return []
        inputs = ImageInputs(self.data, self.export)
        return unlike_file(
            self.model, self.specs, self.input_shape, self.baseline, inputs, self.export.reduce_range
        )

    @cached_property
    def accuracy(self) -> float:
        """Accuracy of the dense network on the test images."""
        return share(self._correct(self.model))

    @cached_property
    def _correct(self) -> Callable[[nn.Module], Tensor]:
        """Mask of the test images that a network classifies right, computed once per network."""
        data, dense, cache = self.data, self.model, self.cache
        return once_per_network(
            lambda network: (
                kept_correct_tests(dense, data, cache) if network is dense else correct_tests(network, data)
            )
        )

    def dense_int8(self) -> dict[str, Any] | None:
        """Return the section `dense_int8` of metrics.json; None if it is not asked for or cannot be made."""
        if not self.export.int8 or self.export.skip:
            return None
        try:
            baseline = self.baseline
        except ExportError as error:  # of a comparison of plans, which exports nothing else
            log.warning("the dense network in 8-bit integers is not measured: %s", error)
            return None
        return int8_numbers(baseline, self.data, self.export, self.folder, cache=self.cache)

    def write(self, compressed: nn.Module, path: Path, metadata: Mapping[str, str]) -> WrittenFile:
        """Export a compressed network, verify the file on held-out images and time it; see `Network`.

        The file's metadata holds the description of its inputs under `preprocessing`.
        """
        options = self.export
        numbers, times = export_file(
            compressed,
            self.baseline,
            ImageInputs(self.data, options),
            path,
            opset=options.opset,
            channel_block=options.channel_block,
            reduce_range=options.reduce_range,
            timing=options.timing,
            metadata={"preprocessing": json.dumps(self.data.preprocessing.to_dict()), **metadata},
            scratch=self.folder,
        )
        runtimes = image_runtimes(
            compressed, self.baseline, path, self.data, options, known=numbers, scratch=self.folder
        )
        name_file(path, options)
        return WrittenFile(numbers["max_abs_difference"], times, numbers=numbers, runtimes=runtimes)

    @property
    def compared_inputs(self) -> int:
        """Number of inputs that `score` uses: the test images."""
        return len(self.data.test)

    def costs_before(self) -> dict[str, int]:
        """Return the costs of the dense network."""
        return self.costs if self.export.skip else {**self.costs, "file_bytes": self.baseline.stat().st_size}

    def score(self, compressed: nn.Module | None) -> float:
        """Return the accuracy on the test images, for the report."""
        return self.accuracy if compressed is None else share(self._correct(compressed))

    basis = Basis("accuracy", "test images")

    def values(self, compressed: nn.Module | None) -> np.ndarray:
        """Return the mask of the test images that are classified right; see `Network`."""
        correct = self._correct(self.model if compressed is None else compressed)
        return correct.numpy().astype(np.float64)

    def collapsed(self, compressed: nn.Module, score: float) -> str | None:
        """Return a message if accuracy on the test images is that of guessing; see `Network`."""
        del compressed
        share = guessing_share(self.data.heldout.y)
        return accuracy_collapse(score, self.accuracy, share, len(self.data.test))
