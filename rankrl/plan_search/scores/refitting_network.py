"""One dense network that takes on plans as they will be applied, every layer refitted to its new inputs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from decomposition.choose.candidates import CandidateSet
from decomposition.choose.library import FitLibrary
from decomposition.choose.quick_refit import QuickRefit
from decomposition.network.surgery import copied
from rankrl.device import Precision, deterministic_kernels, in_layout, to_fastest_layout
from rankrl.errors import ConfigError
from rankrl.plan_search.scores.scoring_network import class_scores


class RefittingNetwork:
    """A copy of the dense network whose layers are refitted under every plan.

    Compared with `ScoringNetwork`, a plan costs one more pass over the calibration images and a small fit of
    every layer (`decomposition.choose.quick_refit`).

    Shapes: calibration (N, C, H, W).
    """

    def __init__(
        self,
        model: nn.Module,
        library: FitLibrary,
        sites: Sequence[CandidateSet],
        precision: Precision,
        calibration: Tensor,
    ) -> None:
        for site in sites:
            if any(one.reads is not None or one.removed is not None for one in site.candidates):
                raise ConfigError(
                    "search.statistics=refitted scores plans of ranks and roundings, and layer "
                    f"{site.name!r} may lose channels or leave; set search.statistics=corrected, or "
                    "decomposition.channels=[] and decomposition.blocks=false"
                )
        self.sites, self.precision = tuple(sites), precision
        self.model = copied(model).to(precision.device).eval().requires_grad_(False)
        images = calibration.to(precision.device)
        self.layout = to_fastest_layout(self.model, images[:2])
        with precision.autocast(), deterministic_kernels():
            self._refit = QuickRefit(self.model, library, in_layout(images, self.layout))

    def write(self, choices: Sequence[int]) -> None:
        """Take on a plan."""
        pairs = zip(self.sites, choices, strict=True)
        operations = {site.name: site.candidates[choice].operations for site, choice in pairs}
        with self.precision.autocast(), deterministic_kernels():
            self._refit.take(operations)

    def logits(self, batches: Sequence[Tensor]) -> Tensor:
        """Return the class scores of batches, concatenated, (N, classes) float32."""
        return class_scores(self.model, batches, self.precision, self.layout)
