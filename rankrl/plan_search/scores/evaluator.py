"""Score plans on held-out images, and measure the divergence of outputs when one layer is compressed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div

from decomposition.cache import digest
from decomposition.choose.candidates import CandidateSet
from decomposition.choose.library import FitLibrary
from rankrl.data import Augmentation, Images, augmented_copy, batches
from rankrl.device import Precision, inference_precision
from rankrl.errors import ConfigError, DataError, NonFiniteError
from rankrl.options.search import ScoringOptions, SearchOptions, Statistics, Term, check_choice
from rankrl.plan_search.scores.evaluation import RememberingEvaluator
from rankrl.plan_search.scores.scoring_network import RefittingNetwork, ScoringNetwork
from rankrl.plan_search.space.problem import Choices, SearchProblem

_MEASURED = 0.75
"""Share of the measured losses in the logarithm of `weighed` ones."""
_LARGEST_RATIO = 1e3
"""Of measured and predicted losses, and its inverse: a site that seems to lose nothing is not free."""


def each_alone(
    sites: Sequence[CandidateSet], measure: Callable[[Choices], float], only: Sequence[int] | None = None
) -> list[np.ndarray]:
    """Measure candidates with all other sites dense.

    Where sites leave the network together, only the last of them gets their common divergence.
    """
    dense = tuple(site.dense for site in sites)
    divergences = []
    for index, site in enumerate(sites):
        values = np.zeros(len(site))
        for choice in range(site.dense) if only is None else [only[index]]:
            if choice == site.dense or (
                site.candidates[choice].removed is not None and site.losses[choice] == 0
            ):
                continue
            values[choice] = measure((*dense[:index], choice, *dense[index + 1 :]))
        divergences.append(values)
    return divergences


def with_divergences(site: CandidateSet, divergences: np.ndarray) -> CandidateSet:
    """Replace the site's weighted squared errors by divergences (candidates,)."""
    pairs = zip(site.candidates, divergences, strict=True)
    candidates = tuple(replace(candidate, error=float(value) ** 0.5) for candidate, value in pairs)
    return replace(site, candidates=candidates, importance=1.0)


def probes(problem: SearchProblem) -> list[int]:
    """Return the candidate of every site whose divergence is measured to estimate the site's importance.

    It is the cheapest one with a loss: where little is lost, as by greedy's choice, a few images cannot
    distinguish the divergence from 0, and the site would seem free. The dense one if no candidate has a loss.
    """
    found = []
    for site in problem.sites:
        lossy = np.flatnonzero((site.losses > 0) & ~site.removed)
        cheapest = site.cost(problem.measure)[lossy].argmin() if len(lossy) else None
        found.append(site.dense if cheapest is None else int(lossy[cheapest]))
    return found


def scaled(site: CandidateSet, probe: int, divergence: float) -> CandidateSet:
    """Scale the site's losses so that the probed candidate's equals its measured divergence."""
    loss = float(site.losses[probe])
    return site if loss == 0 else replace(site, importance=site.importance * divergence / loss)


def weighed(
    sites: Sequence[CandidateSet], only: Sequence[int], divergences: Sequence[float]
) -> list[CandidateSet]:
    """Combine the sites' predicted losses with one measured divergence each, by a weighted geometric mean.

    A site's importance is multiplied by the `_MEASURED`-th power of one candidate's measured / predicted
    loss, relative to the median site. The measurement includes the effect of later layers on an error; the
    prediction has no noise of few images.
    """
    losses = np.array([site.losses[probe] for site, probe in zip(sites, only, strict=True)])
    measured, told = np.asarray(divergences, dtype=float), losses > 0
    if not measured[told].any():
        return list(sites)
    ratios = np.ones(len(sites))
    ratios[told] = measured[told] / losses[told]
    ratios[told] /= np.median(ratios[told & (measured > 0)])
    factors = ratios.clip(1 / _LARGEST_RATIO, _LARGEST_RATIO) ** _MEASURED
    pairs = zip(sites, factors.tolist(), strict=True)
    return [replace(site, importance=site.importance * factor) for site, factor in pairs]


# Small batches keep the feature maps in the processor's cache; a GPU needs large ones to be busy.
_BATCH_SIZE = {"cpu": 125, "cuda": 1000}
_FOLDING_EXAMPLES = 32


def batch_size(device: str) -> int:
    """Return the batch size that suits a type of device, such as `cuda`."""
    return _BATCH_SIZE.get(device, _BATCH_SIZE["cpu"])


@dataclass(frozen=True)
class EvaluatorOptions(ScoringOptions):
    """The options of scoring, with a seed."""

    term: Term = "accuracy"
    statistics: Statistics = "corrected"
    seed: int = 0

    @classmethod
    def of(cls, options: SearchOptions, seed: int) -> EvaluatorOptions:
        """Return the options of a search with the seed of the augmented copy."""
        scores = options.scores()
        images = {field.name: getattr(options, field.name) for field in fields(ScoringOptions)}
        return cls(**images, term=scores.term, statistics=scores.statistics, seed=seed)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("search.term", self.term, Term)
        check_choice("search.statistics", self.statistics, Statistics)


@dataclass(frozen=True)
class ScoredImages:
    """The images that plans are scored on, and their preprocessing.

    Attributes:
        images: Held-out images; test images are refused by type and at run time.
        mean: Per-channel mean for pixels in [0, 1].
        std: Per-channel standard deviation for pixels in [0, 1].
        augmentation: Crops and flips for `ScoringOptions.augmented`.
        calibration: Normalised training images (N, C, H, W), float32, for `refitted` statistics.

    Raises:
        TypeError: `images` is not `Images` (test images choose nothing).
        DataError: There are no images.
    """

    images: Images
    mean: Sequence[float]
    std: Sequence[float]
    augmentation: Augmentation | None = None
    calibration: Tensor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.images, Images):
            raise TypeError(
                f"plans are scored on held-out Images, got {type(self.images).__name__}; "
                "test images choose nothing"
            )
        if len(self.images) == 0:
            raise DataError("plans cannot be scored on no images; hold some out (dataset.heldout)")

    def batches(self, size: int, device: torch.device | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield normalised images (n, C, H, W), float32, with their classes (n,)."""
        return batches(self.images, size, mean=self.mean, std=self.std, device=device)


class PlanEvaluator(RememberingEvaluator):
    """Scores compression plans of one network on images held out of its training set.

    Images are normalised once; a plan costs one forward pass and the writing of the weights that differ from
    the last plan's. Equal plans are scored once.

    Args:
        model: The dense network; it is copied.
        library: The fits of its layers.
        problem: The search problem made of them.
        data: The images.
        options: How plans are scored.
        precision: Device and precision; the fastest safe one when omitted.

    Raises:
        ConfigError: `options.augmented` without an augmentation, `refitted` without calibration images, or
            with candidates that take channels or blocks away.
    """

    def __init__(
        self,
        model: nn.Module,
        library: FitLibrary,
        problem: SearchProblem,
        data: ScoredImages,
        *,
        options: EvaluatorOptions | None = None,
        precision: Precision | None = None,
    ) -> None:
        super().__init__(problem)
        self.options = EvaluatorOptions() if options is None else options
        if self.options.augmented:
            if data.augmentation is None:
                raise ConfigError("scoring on augmented images needs an augmentation; pass the dataset's own")
            data = replace(data, images=augmented_copy(data.images, data.augmentation, self.options.seed))
        self.precision = inference_precision() if precision is None else precision
        self._digest = data.images.digest()
        self.network = self._network(model, library, data)
        self.batch_size = self.options.batch_size or batch_size(self.precision.device.type)
        loaded = list(data.batches(self.batch_size, self.precision.device))
        self._x = [images.to(self.precision.dtype) for images, _ in loaded]
        self._y = torch.cat([labels for _, labels in loaded])
        self._written: Choices | None = None
        self._dense_logits = self.network.logits(self._x)
        self._check(self._dense_logits, "the dense network")
        self.dense_accuracy = float((self._dense_logits.argmax(1) == self._y).float().mean())

    def _network(
        self, model: nn.Module, library: FitLibrary, data: ScoredImages
    ) -> ScoringNetwork | RefittingNetwork:
        sites = self.problem.sites
        if self.options.statistics == "refitted":
            if data.calibration is None:
                raise ConfigError("scoring refitted plans needs training images; pass calibration")
            return RefittingNetwork(model, library, sites, self.precision, data.calibration)
        example, _ = next(data.batches(_FOLDING_EXAMPLES))
        return ScoringNetwork(model, library, sites, self.precision, example)

    @property
    def fingerprint(self) -> str:
        """Hash of the images and options; equal for searches that score alike."""
        return digest(self._digest, self.options, self.precision.dtype, self.precision.device.type)[:16]

    @property
    def batches(self) -> int:
        """Number of batches of held-out images."""
        return len(self._x)

    def value(self, choices: Choices) -> Tensor:
        """Return the class scores of all images under a plan, (N, classes) float32."""
        return self.forward(choices, 0, self.batches)

    def scores(self, choices: Choices, value: Tensor) -> tuple[float, float]:
        """Return the accuracy term and the accuracy of a plan with these class scores.

        Raises:
            NonFiniteError: A class score is NaN or infinite.
        """
        self._check(value, choices)
        return self.term(value), self.term(value, "accuracy")

    def forward(self, choices: Choices, start: int, stop: int) -> Tensor:
        """Return the class scores of batches `start` to `stop` (excluded) under a plan, float32.

        A batch's scores do not depend on the other batches, so that several processes can share a plan.
        """
        if choices != self._written:
            self.network.write(choices)
            self._written = choices
        return self.network.logits(self._x[start:stop])

    def divergences(self, batches: int, only: Sequence[int] | None = None) -> list[np.ndarray]:
        """Measure the divergence of the class probabilities when one layer alone is compressed.

        Args:
            batches: On how many batches of held-out images, or on all where there are fewer.
            only: The candidate of every site that is measured alone; None for all candidates.

        Returns:
            For every site the mean Kullback-Leibler divergence from the dense network's, in nats, under each
            of its candidates; shape (candidates,), 0 for the dense one and for those that are not measured.
        """
        sites, last = self.problem.sites, min(batches, self.batches)
        dense = self.forward(tuple(site.dense for site in sites), 0, last).log_softmax(1).double()

        def divergence(plan: Choices) -> float:
            answers = self.forward(plan, 0, last).log_softmax(1).double()
            # Rounding may make a divergence near 0 negative.
            return max(0.0, float(kl_div(answers, dense, log_target=True, reduction="batchmean")))

        return each_alone(sites, divergence, only)

    def term(self, logits: Tensor, term: Term | None = None, start: int = 0) -> float:
        """Return an accuracy term, 0 to 1.

        Args:
            logits: Class scores of N held-out images, (N, classes).
            term: The term; that of the options when omitted.
            start: Number of the first batch among these images.
        """
        first = sum(map(len, self._x[:start]))
        scored = slice(first, first + len(logits))
        return accuracy_term(
            self.options.term if term is None else term, logits, self._y[scored], self._dense_logits[scored]
        )

    def _check(self, logits: Tensor, plan: Choices | str) -> None:
        if bool(torch.isfinite(logits).all()):
            return
        name = plan
        if not isinstance(plan, str):
            pairs = zip(self.problem.sites, plan, strict=True)
            name = f"the plan { ({site.name: str(site.candidates[choice]) for site, choice in pairs}) }"
        raise NonFiniteError(
            f"class scores are NaN or infinite for {name}; check the checkpoint and the calibration images"
        )


def accuracy_term(term: Term, logits: Tensor, labels: Tensor, dense_logits: Tensor) -> float:
    """Return the accuracy term of class scores, 0 to 1; see `ScoringOptions.term`.

    Shapes: logits (N, classes), labels (N,), dense_logits (N, classes).
    """
    if term == "soft_agreement":
        overlap = torch.minimum(logits.softmax(1), dense_logits.softmax(1)).sum(1)
        return float(overlap.mean(dtype=torch.float64))
    classes = dense_logits.argmax(1) if term == "agreement" else labels
    return int((logits.argmax(1) == classes).sum()) / len(logits)
