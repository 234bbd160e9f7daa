"""A network in an ONNX file made ready for compression: its inputs, its nodes and what they cost."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx_ir as ir

from decomposition.network.layers import skipping
from rankrl.onnx.graph.axis_suggestions import Axes
from rankrl.onnx.graph.capture import check_gaps
from rankrl.onnx.graph.costs import compression_costs, network_costs
from rankrl.onnx.graph.errors import OnnxGraphError
from rankrl.onnx.graph.foreign import foreign_reason, is_foreign
from rankrl.onnx.graph.image_files import ImagePreprocessing
from rankrl.onnx.graph.inputs import HELDOUT, Batches, SplitInputs, read_inputs, split_inputs
from rankrl.onnx.graph.integers import without_integers
from rankrl.onnx.graph.look_up import with_look_ups
from rankrl.onnx.graph.network import Feed, OnnxNetwork
from rankrl.onnx.graph.positions import PositionsByNode, with_several_positions
from rankrl.onnx.graph.site import Site
from rankrl.onnx.graph.sites import find_sites
from rankrl.wording import counted

log = logging.getLogger(__name__)

Inputs = Batches | str | Path


@dataclass(frozen=True)
class PreparedFile:
    """A network read from an ONNX file, with its inputs, its nodes and their costs."""

    original: OnnxNetwork
    network: OnnxNetwork
    split: SplitInputs
    sites: tuple[Site, ...]
    totals: Mapping[str, int]
    several: PositionsByNode = field(default_factory=dict)

    @classmethod
    def read(
        cls,
        path: str | Path,
        inputs: Inputs,
        *,
        images: ImagePreprocessing | None = None,
        batch_axes: Axes | None = None,
        heldout: float = HELDOUT,
        scored: float = 0.0,
        skip: Sequence[str] = (),
        only: Sequence[str] = (),
        look_ups: bool = True,
        seed: int = 0,
    ) -> PreparedFile:
        """Read the file, and the inputs where they are in a file, too."""
        original = OnnxNetwork.load(path).in_float32()
        held = read_inputs(inputs, original, images) if isinstance(inputs, str | Path) else inputs
        split = split_inputs(held, original, batch_axes=batch_axes, heldout=heldout, scored=scored, seed=seed)
        original = original.with_axes(split.axes)
        network = with_look_ups(original) if look_ups else original
        network = network.without_casts((ir.DataType.DOUBLE,))
        sites = find_sites(network, split.calibration[0])
        specs = skipping([site.spec for site in sites], skip, only)
        sites = [replace(site, spec=spec) for site, spec in zip(sites, specs, strict=True)]
        file = cls(original, network, split, tuple(sites), compression_costs(network, sites))
        if file.foreign is not None:
            log.warning("%s: %s", path, file.foreign)
        return file

    def with_several_positions(self, several: PositionsByNode) -> PreparedFile:
        """Return the same file with convolutions that compute several positions at once."""
        if not several:
            return self
        network = with_several_positions(self.network, self.sites, several)
        refusals = {site.name: site.spec.refusal for site in self.sites}
        sites = [
            replace(site, spec=replace(site.spec, refusal=refusals[site.name]))
            for site in find_sites(network, self.split.calibration[0])
        ]
        return replace(
            self,
            network=network,
            sites=tuple(sites),
            totals=compression_costs(network, sites),
            several=several,
        )

    @property
    def changing(self) -> list[Site]:
        """The nodes that can be compressed, at least one: those that formats replace, and LSTMs."""
        sites = [site for site in self.sites if site.spec.refusal is None]
        if not sites:
            reasons = "; ".join(f"{site.name}: {site.spec.refusal}" for site in self.sites[:5])
            raise OnnxGraphError(
                f"{self.network.source} has no node that can be compressed "
                f"({reasons or 'no Conv, Gemm or MatMul with a constant weight'})"
            )
        return sites

    @property
    def usable(self) -> list[Site]:
        """The nodes that formats can replace."""
        return [site for site in self.changing if not site.hidden]

    def check_gaps(self) -> None:
        """Refuse NaN and infinities in the inputs that a node to be fitted sees (`check_gaps`)."""
        split = self.split
        sites = [site for site in self.sites if site.spec.refusal is None]
        check_gaps(self.network, sites, [*split.calibration, *split.scored, *split.heldout])

    @cached_property
    def unrounded(self) -> list[str]:
        """Names of usable nodes that cannot compute in integers (`without_integers`)."""
        return without_integers(self.network, self.usable, self.split.calibration[0])

    @cached_property
    def foreign(self) -> str | None:
        """A warning of nodes that hold weights but are no operators of ONNX; None without any."""
        nodes = {node.name: node for node in self.network.graph_model().graph}
        names = [site.name for site in self.sites if is_foreign(nodes.get(site.name))]
        if not names:
            return None
        among = f", {names[0]!r} among them" if len(names) > 1 else f", {names[0]!r}"
        reason = foreign_reason(nodes[names[0]])
        return f"{counted(len(names), 'node')} with weights must stay{among}: {reason}"

    @cached_property
    def original_sites(self) -> list[Site]:
        """The nodes of the network as the file has it."""
        if self.original is self.network:
            return list(self.sites)
        return find_sites(self.original, self.split.calibration[0])

    @property
    def looked_up(self) -> list[Site]:
        """The nodes that became look-ups."""
        left = {site.name for site in self.sites}
        return [site for site in self.original_sites if site.name not in left]

    @property
    def rewritten(self) -> dict[str, str]:
        """How nodes were rewritten before anything was compressed, by their names."""
        changes = {site.name: "a look-up" for site in self.looked_up}
        return changes | {name: f"{way.positions} positions at once" for name, way in self.several.items()}

    @cached_property
    def original_totals(self) -> dict[str, int]:
        """What the network costs as the file has it."""
        return network_costs(self.original, self.original_sites)

    def fractions(self, kept: Mapping[str, float | None]) -> dict[str, float | None]:
        """Fractions of the original's costs as fractions of what the compressed network begins with."""
        ratios = {name: self.original_totals[name] / max(1, self.totals[name]) for name in self.totals}
        return {
            name: None if value is None else min(1.0, value * ratios[name]) for name, value in kept.items()
        }

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the first input for one input of the network, as plans record it."""
        first = self.network.inputs[0].name
        shape, axis = self.split.calibration[0][first].shape, self.network.axes.inputs[first]
        return (shape if axis is None else shape[:axis] + shape[axis + 1 :]) or (1,)

    def feed(self, batch: int) -> Feed:
        """Return a batch of real inputs of a size, or of the file's own where that is fixed."""
        split, axes = self.split, self.split.axes
        first = split.calibration[0]
        if axes.fixed is not None:
            return first
        every = (*split.calibration, *split.scored, *split.heldout)
        whole = axes.joined([feed for feed in every if axes.kind(feed) == axes.kind(first)])
        return axes.rows(whole, np.arange(batch) % axes.size(whole))
