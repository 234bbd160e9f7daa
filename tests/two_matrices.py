"""A tensor format of a user: two matrices in a layer that contracts its cores."""

from typing import Any

import torch

from decomposition import TensorFormat
from decomposition.formats.layers import ContractedLayer


class TwoMatrices(TensorFormat):
    """W = U V in a layer that contracts its cores."""

    name = "two_matrices"
    description = "the weight's matrix as a product of two"

    def max_ranks(self, modes: Any) -> Any:
        return (min(modes.out_channels, modes.columns),)

    def core_shapes(self, modes: Any, ranks: Any) -> Any:
        return [(modes.out_channels, ranks[0]), (ranks[0], modes.columns)]

    def halves(self, cores: Any, modes: Any) -> Any:
        return cores[0], cores[1]

    def set_output(self, cores: Any, modes: Any, output: Any) -> Any:
        return [output, cores[1]]

    def start(self, weight: Any, modes: Any, ranks: Any) -> Any:
        u, s, v = torch.linalg.svd(weight.flatten(1), full_matrices=False)
        return [u[:, : ranks[0]] * s[: ranks[0]], v[: ranks[0]]]

    def stage_macs(self, spec: Any, modes: Any, ranks: Any) -> Any:
        return {"half": spec.output_positions * ranks[0] * (modes.columns + modes.out_channels)}

    def build(self, dense: Any, spec: Any, modes: Any, ranks: Any) -> Any:
        return ContractedLayer(dense, self, modes, ranks, self.execution(spec, modes, ranks))
