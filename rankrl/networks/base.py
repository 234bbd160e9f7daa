"""What a search, a budget and a report know of a network, be it a PyTorch module or an ONNX graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from decomposition import CompressionPlan, FitLibrary, LayerSpec
from decomposition.candidates.listing import CandidateLister
from decomposition.network.input_specs import InputShape
from decomposition.network.rewriting import Rewrite
from rankrl.networks.candidates import CandidateOptions
from rankrl.options.timing import LatencyOptions
from rankrl.timing.network_timer import NetworkTimer


class Network(Protocol):
    """A network with the inputs that it is calibrated on."""

    @property
    def specs(self) -> Sequence[LayerSpec]:
        """Every layer in forward order, compressible or not."""

    @property
    def input_shape(self) -> InputShape:
        """Shape of one input without the batch axis, or what else is known of the inputs."""

    @property
    def costs(self) -> Mapping[str, int]:
        """`params`, `macs` (for one input) and `bytes` (of the parameters) of the dense network."""

    @property
    def preparation(self) -> tuple[Rewrite, ...]:
        """What was rewritten in the network before, for its plans."""

    @property
    def time_of_original(self) -> float:
        """Time of the network / that of what a user calls the original, where that is another one; else 1."""

    @property
    def caveat(self) -> str | None:
        """What a user must know when a budget cannot be reached, beside the budget; None for nothing."""

    def fractions(self, kept: Mapping[str, float | None]) -> dict[str, float | None]:
        """Return fractions of the original's costs as fractions of this network's.

        Args:
            kept: Fractions by `params`, `macs` and `bytes`; None sets no budget.
        """

    def lister(self, candidates: CandidateOptions) -> CandidateLister:
        """Return what lists the candidates of every layer, without any fit.

        Raises:
            DecompositionError: No layer can be compressed.
        """

    def library(self, candidates: CandidateOptions, *, cache: Path | None, seed: int) -> FitLibrary:
        """Calibrate and return the library of the layers' fits; nothing is fitted yet.

        Args:
            candidates: What may become of the layers.
            cache: Folder of fits that later runs reuse, or None.
            seed: Seed of everything random.

        Raises:
            DecompositionError: No layer can be compressed.
        """

    def timer(self, options: LatencyOptions, library: FitLibrary | None, /) -> NetworkTimer:
        """Return what measures times of this network.

        Args:
            options: How time is measured.
            library: The fits of its layers.
        """

    def applied(self, plan: CompressionPlan, library: FitLibrary, /) -> Any:
        """Return the compressed network, refit and all, as scores of this kind of network take it.

        Args:
            plan: What becomes of the layers.
            library: What the plan was chosen from.
        """
