"""A PyTorch module as budgets see it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from decomposition import (
    CompressionPlan,
    FitLibrary,
    Inputs,
    LayerSpec,
    count_macs,
    count_parameters,
    inspect_layers,
)
from decomposition.choose.listing import CandidateLister
from decomposition.fit.fit_options import CHOOSING
from decomposition.network.inputs import InputShape
from decomposition.network.layers import FLOAT_BYTES
from decomposition.network.rewriting import Rewrite, rewrites_of
from rankrl.data import Preprocessing
from rankrl.networks.blocks import block_removals
from rankrl.networks.candidates import CandidateOptions
from rankrl.networks.channels import channel_narrowings
from rankrl.options.timing import LatencyOptions
from rankrl.report import LayerRow
from rankrl.timing.module_files import ModuleFiles
from rankrl.timing.network_timer import NetworkTimer
from rankrl.verify.layer_rows import layer_rows, stored_bytes


@dataclass(frozen=True, eq=False)
class ModuleNetwork:
    """A PyTorch module, and the inputs that it is calibrated on; a `rankrl.networks.base.PricedNetwork`."""

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
        """What was rewritten in the module before."""
        return rewrites_of(self.model)

    def fractions(self, kept: Mapping[str, float | None]) -> dict[str, float | None]:
        """Return the fractions as they are: the module is the original."""
        return dict(kept)

    def lister(self, candidates: CandidateOptions) -> CandidateLister:
        """Return what lists the candidates of every layer; see `PricedNetwork`."""
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
        """Return what measures times of the module, exported; no fits are needed."""
        preprocessing = self.preprocessing if options.preprocess else None
        files = ModuleFiles(self.model, self.input_shape, options.batch, options.channel_block, preprocessing)
        return NetworkTimer(files, self.specs, self.input_shape, options)

    def costs_after(self, plan: CompressionPlan, compressed: nn.Module) -> dict[str, int]:
        """Return what a compressed network costs."""
        return {
            "params": count_parameters(compressed),
            "macs": count_macs(compressed, self.input_shape),
            "bytes": stored_bytes(plan, self.model, compressed),
        }

    def rows(self, plan: CompressionPlan, compressed: nn.Module) -> list[LayerRow]:
        """Return the report's row of every layer."""
        return layer_rows(plan, self.model, compressed)

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
