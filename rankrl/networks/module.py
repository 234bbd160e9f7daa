"""A PyTorch module as searches see it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from decomposition import (
    CandidateSet,
    CompressionPlan,
    FitLibrary,
    Inputs,
    LatencyTable,
    LayerSpec,
    apply_plan,
    build_structure,
    count_macs,
    count_parameters,
    factorised_layers,
    inspect_layers,
)
from decomposition.candidates.listing import CandidateLister
from decomposition.fit.fitting import CHOOSING
from decomposition.network.inputs import InputShape, input_shape_of
from decomposition.network.rewriting import Rewrite, rewrites_of
from decomposition.operations.base import FLOAT_BYTES
from rankrl.data import Preprocessing
from rankrl.networks.blocks import block_removals
from rankrl.networks.channels import channel_narrowings
from rankrl.onnx.export import export_network
from rankrl.onnx.export.feeds import random_feed
from rankrl.onnx.runtimes import Batch
from rankrl.options.search import CandidateOptions
from rankrl.options.timing import LatencyOptions
from rankrl.progress import Progress, progress_bar
from rankrl.timing import compare_latency, measure_layer_latencies


@dataclass(frozen=True, eq=False)
class ModuleNetwork:
    """A PyTorch module, and the inputs that it is calibrated on; a `rankrl.networks.base.Network`.

    Attributes:
        model: The dense network.
        input_shape: Shape of one input without the batch axis, or what else is known of the inputs.
        inputs: Batches of calibration inputs; none where nothing is fitted.
        apply: From a plan to the compressed network.
        preprocessing: What the network's images go through, for files that do it themselves.
    """

    model: nn.Module
    input_shape: InputShape
    inputs: Sequence[Inputs] = field(default=(), repr=False)
    apply: Callable[[CompressionPlan], nn.Module] | None = None
    preprocessing: Preprocessing | None = None

    time_of_original = 1.0
    caveat = None

    @classmethod
    def on_inputs(
        cls,
        model: nn.Module,
        inputs: Sequence[Inputs],
        *,
        weigh_outputs: bool,
        seed: int,
        progress: Progress = None,
    ) -> ModuleNetwork:
        """Return a user's own network, which plans are applied to on the inputs that it is calibrated on.

        Args:
            model: The dense network.
            inputs: Batches of calibration inputs, at least one.
            weigh_outputs: Whether channels and layers count by what the network's output makes of them.
            seed: Seed of everything random.
            progress: As for `SearchSession`.
        """

        def applied(plan: CompressionPlan) -> nn.Module:
            return apply_plan(model, plan, inputs, weigh_outputs=weigh_outputs, seed=seed, progress=progress)

        return cls(model, input_shape_of(inputs[0]), inputs, applied)

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
        """What was rewritten in the module before."""
        return rewrites_of(self.model)

    def fractions(self, kept: Mapping[str, float | None]) -> dict[str, float | None]:
        """Return the fractions as they are: the module is the original."""
        return dict(kept)

    def lister(self, candidates: CandidateOptions) -> CandidateLister:
        """Return what lists the candidates of every layer; see `Network`.

        Raises:
            ConfigError: A fraction of `candidates.channels` is out of range, or no channel or block can be
                removed.
        """
        return CandidateLister.of_network(
            self.model,
            self.input_shape,
            candidates.formats,
            skip=candidates.skip,
            only=candidates.only,
            precisions=candidates.precisions,
            tensorised=candidates.tensorised,
            **self._removable(candidates),
        )

    def library(self, candidates: CandidateOptions, *, cache: Path | None, seed: int) -> FitLibrary:
        """Calibrate and return the library of fits; see `Network`.

        Raises:
            ConfigError: As for `lister`.
        """
        return FitLibrary.calibrated(
            self.model,
            self.inputs[0],
            candidates.formats,
            self.inputs,
            weigh_outputs=candidates.weigh_outputs,
            skip=candidates.skip,
            only=candidates.only,
            precisions=candidates.precisions,
            tensorised=candidates.tensorised,
            multiple=candidates.multiple,
            **self._removable(candidates),
            options=replace(CHOOSING, iterations=candidates.iterations),
            folder=cache,
            seed=seed,
        )

    def timer(self, options: LatencyOptions, _library: FitLibrary | None = None, /) -> ModuleTimer:
        """Return what measures times of the module, exported; no fits are needed."""
        return ModuleTimer(self, options)

    def applied(self, plan: CompressionPlan, _library: FitLibrary | None = None, /) -> nn.Module:
        """Return the compressed module; it is calibrated anew, layer by layer."""
        assert self.apply is not None
        return self.apply(plan)

    def _removable(self, candidates: CandidateOptions) -> dict[str, Any]:
        """Return which channels and blocks may go, as `FitLibrary` takes it."""
        removable: dict[str, Any] = {}
        if candidates.channels:
            removable["narrowings"] = channel_narrowings(
                self.model, self.input_shape, candidates.channels, candidates.multiple
            )
        if candidates.blocks:
            removable["removals"] = block_removals(self.model, self.input_shape)
        return removable


class ModuleTimer:
    """Measures a module's layers, and the module under a plan, exported to ONNX; a `Timer`.

    Args:
        network: The module.
        options: How time is measured.
    """

    def __init__(self, network: ModuleNetwork, options: LatencyOptions) -> None:
        self.network, self.options = network, options
        self._preprocessing = network.preprocessing if options.preprocess else None
        self._scratch = tempfile.TemporaryDirectory()

    @property
    def conditions(self) -> Preprocessing | None:
        """What the file does to images before the network."""
        return self._preprocessing

    def layers(self, sites: Sequence[CandidateSet]) -> LatencyTable:
        """Measure all candidates of all sites, or read what was measured before."""
        options = self.options
        with progress_bar("time layers", total=len(sites)) as bar:
            return measure_layer_latencies(
                self.network.model,
                sites,
                self.network.input_shape,
                batch=options.batch,
                threads=options.threads,
                runs=options.runs,
                channel_block=options.channel_block,
                folder=options.folder,
                progress=lambda _: bar.advance(),
            )

    def whole(self, plan: CompressionPlan) -> float:
        """Return the time of the module under a plan / that of the dense one, exported and timed in turns."""
        compressed = build_structure(self.network.model, plan)
        for layer in factorised_layers(compressed).values():
            for parameter in layer.parameters():
                nn.init.normal_(parameter, std=0.1)
        path = Path(self._scratch.name) / "compressed.onnx"
        self._export(compressed, path)
        times = compare_latency(
            self._dense_file,
            path,
            batch=self.options.batch,
            threads=self.options.threads,
            runs=self.options.runs,
            inputs=self._sample,
        )
        return 1 / times.ratio

    def _export(self, model: nn.Module, path: Path) -> None:
        block = self.options.channel_block
        shape = self.network.input_shape
        export_network(
            model, path, shape, [self._sample], preprocessing=self._preprocessing, channel_block=block
        )

    @cached_property
    def _sample(self) -> Batch:
        """The batch that files are timed on."""
        sizes = self._preprocessing
        if sizes is None:
            return random_feed(self.network.model, self.network.input_shape, self.options.batch)
        size = (self.options.batch, sizes.height, sizes.width, sizes.channels)
        return np.random.default_rng(0).integers(256, size=size, dtype=np.uint8)

    @cached_property
    def _dense_file(self) -> Path:
        """The dense network's file, which dozens of plans are timed beside."""
        path = Path(self._scratch.name) / "dense.onnx"
        self._export(self.network.model, path)
        return path
