"""Compress a classifier of a data set's images: score, export, verify and report (`ImageModule`)."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from decomposition import CompressionPlan, FitLibrary, apply_plan
from decomposition.cache import Cache
from decomposition.operations.quantise import computes_in_integers
from rankrl.data import ImageData
from rankrl.data.calibration import calibration_images
from rankrl.networks.module import ModuleNetwork
from rankrl.networks.network import CandidateOptions, WrittenFile, once_per_network
from rankrl.onnx.errors import ExportError
from rankrl.onnx.export.onnx_file import check_names, name_file
from rankrl.options.decomposition import DecompositionOptions
from rankrl.options.timing import ExportOptions
from rankrl.plan_search.scores.evaluator import EvaluatorOptions
from rankrl.plan_search.scores.scoring import ImageScoring
from rankrl.training.accuracy import guessing_share, share
from rankrl.verify.certificate import Basis, accuracy_collapse
from rankrl.verify.file_export import export_file
from rankrl.verify.measure import (
    NO_CACHE,
    ImageInputs,
    correct_tests,
    export_dense,
    int8_numbers,
    kept_correct_tests,
)
from rankrl.verify.runtimes import image_runtimes
from rankrl.verify.simulation import unlike_file

log = logging.getLogger(__name__)


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
