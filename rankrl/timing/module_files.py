"""Files to time of a PyTorch module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from torch import nn

from decomposition import CompressionPlan, build_structure, factorised_layers
from decomposition.network.inputs import InputShape
from rankrl.data import Preprocessing
from rankrl.onnx.export import export_network
from rankrl.onnx.export.feeds import random_feed
from rankrl.onnx.runtimes import Batch


@dataclass(eq=False)
class ModuleFiles:
    """A PyTorch module as it is exported; a `TimedFiles`."""

    model: nn.Module
    input_shape: InputShape
    batch: int
    channel_block: int = 1
    preprocessing: Preprocessing | None = None

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """The dense layers by name, and all that holds them."""
        return dict(self.model.named_modules())

    @cached_property
    def feed(self) -> Batch:
        """Random inputs."""
        images = self.preprocessing
        if images is None:
            return random_feed(self.model, self.input_shape, self.batch)
        size = (self.batch, images.height, images.width, images.channels)
        return np.random.default_rng(0).integers(256, size=size, dtype=np.uint8)

    @property
    def conditions(self) -> object:
        """The preprocessing; computations of the module between its layers make no difference."""
        return self.preprocessing

    def write(self, path: Path, plan: CompressionPlan | None) -> None:
        """Export the network under a plan, its factors random, or as it is."""
        model = self.model if plan is None else build_structure(self.model, plan)
        if plan is not None:
            for layer in factorised_layers(model).values():
                for parameter in layer.parameters():
                    nn.init.normal_(parameter, std=0.1)
        export_network(
            model,
            path,
            self.input_shape,
            [self.feed],
            preprocessing=self.preprocessing,
            channel_block=self.channel_block,
        )
