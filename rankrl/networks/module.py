"""Compress a PyTorch module: list its layers, removable blocks and channels, calibrate and count it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from decomposition import (
    CompressionPlan,
    DecompositionError,
    FitLibrary,
    Inputs,
    LayerSpec,
    compressible_layers,
    count_macs,
    count_parameters,
    inspect_layers,
)
from decomposition.calibration.metric import WIDEST, Narrowing
from decomposition.choose.listing import CandidateLister, Removal
from decomposition.fit.fit_options import CHOOSING
from decomposition.network.inputs import InputShape, example_tensor
from decomposition.network.layers import FLOAT_BYTES
from decomposition.network.rewriting import Rewrite, rewrites_of
from pruning import PruningError, channel_groups, residual_blocks
from rankrl.data import Preprocessing
from rankrl.errors import ConfigError
from rankrl.networks.network import CandidateOptions
from rankrl.operations import RemoveBlock
from rankrl.options.timing import LatencyOptions
from rankrl.report import LayerRow
from rankrl.timing.network_timer import NetworkTimer
from rankrl.timing.whole_files import ModuleFiles
from rankrl.verify.measure import layer_rows, stored_bytes


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
