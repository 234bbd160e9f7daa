"""Scoring plans on held-out images: the reward's raw numbers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div

from decomposition.cache import digest
from decomposition.candidates.library import FitLibrary
from rankrl.data import Augmentation, Images, augmented_copy, batches
from rankrl.device import Precision, inference_precision
from rankrl.errors import ConfigError, DataError, NonFiniteError
from rankrl.options.scores import ScoringOptions, Term
from rankrl.plan_search.scores.divergence import each_alone
from rankrl.plan_search.scores.refitting_network import RefittingNetwork
from rankrl.plan_search.scores.scoring_network import CACHE_BYTES, ScoringNetwork
from rankrl.plan_search.space.problem import Choices, SearchProblem

# Small batches keep the feature maps in the processor's cache; a GPU wants large ones.
_BATCH_SIZE = {"cpu": 125, "cuda": 1000}
_FOLDING_EXAMPLES = 32


def batch_size(device: str) -> int:
    """Return how many images at a time suit a type of device, such as `cuda`."""
    return _BATCH_SIZE.get(device, _BATCH_SIZE["cpu"])


@dataclass(frozen=True)
class Evaluation:
    """What is known of one scored plan.

    Attributes:
        score: The accuracy term that the reward uses, 0 to 1 (see `EvaluatorOptions.term`).
        accuracy: Fraction of the scored held-out images that are classified correctly.
        params: Parameters of the whole compressed network.
        macs: Multiply-accumulates of the whole compressed network for one input.
        params_kept: `params` / those of the dense network.
        macs_kept: `macs` / those of the dense network.
        seconds: Wall time of the scoring; 0 for a plan that had been scored before.
        cached: Whether an equal plan had been scored before.
    """

    score: float
    accuracy: float
    params: int
    macs: int
    params_kept: float
    macs_kept: float
    seconds: float
    cached: bool = False


@dataclass(frozen=True)
class EvaluatorOptions(ScoringOptions):
    """How plans are scored, and in how much memory.

    Attributes:
        seed: Seed of the augmented copy.
        cache_bytes: Memory for reconstructed weights.
    """

    seed: int = 0
    cache_bytes: int = CACHE_BYTES

    @classmethod
    def of(cls, options: ScoringOptions, seed: int) -> EvaluatorOptions:
        """Return the options with the seed of the augmented copy."""
        return cls(**{each.name: getattr(options, each.name) for each in fields(ScoringOptions)}, seed=seed)


class Evaluator(Protocol):
    """What a search needs of a scorer of plans, in this process or in many."""

    @property
    def fingerprint(self) -> str:
        """Hash of what scores depend on beside the plan."""

    def evaluate(self, plans: Sequence[Choices]) -> list[Evaluation]:
        """Score plans, each the candidate of every site, in order."""

    def restore(self, known: Mapping[Choices, Evaluation]) -> None:
        """Take over the evaluations of the plans scored so far."""


@runtime_checkable
class MeasuresDivergences(Protocol):
    """A scorer that can look at each site alone."""

    def divergences(self, batches: int) -> list[np.ndarray]:
        """Measure how far the network's answers move when one site alone is compressed.

        Args:
            batches: On how many of its batches, or on all where there are fewer.

        Returns:
            For every site the divergence under each of its candidates; shape (candidates,), 0 for the dense
            one.
        """


class PlanEvaluator:
    """Scores compression plans of one network on images held out of its training set.

    Images are normalised once; a plan costs the writing of the weights that differ from the last plan's and
    one forward pass. Equal plans are scored once.

    Args:
        model: The dense network; it is copied.
        library: The fits of its layers.
        problem: The search problem made of them.
        images: Held-out images; test images are refused by type and at run time.
        mean: Per-channel mean for pixels in [0, 1].
        std: Per-channel standard deviation for pixels in [0, 1].
        augmentation: Crops and flips for `options.augmented`.
        calibration: Normalised training images (N, C, H, W), float32, for `options.statistics` of `refitted`.
        options: How plans are scored.
        precision: Device and precision; the fastest safe one when omitted.

    Raises:
        TypeError: `images` is not `Images` (test images choose nothing).
        DataError: There are no images.
        ConfigError: `options.augmented` without an augmentation, `refitted` without calibration images, or
            with candidates that take channels or blocks away.
    """

    def __init__(
        self,
        model: nn.Module,
        library: FitLibrary,
        problem: SearchProblem,
        images: Images,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        augmentation: Augmentation | None = None,
        calibration: Tensor | None = None,
        options: EvaluatorOptions | None = None,
        precision: Precision | None = None,
    ) -> None:
        if not isinstance(images, Images):
            raise TypeError(
                f"plans are scored on held-out Images, got {type(images).__name__}; "
                "test images choose nothing"
            )
        if len(images) == 0:
            raise DataError("plans cannot be scored on no images; hold some out (dataset.heldout)")
        self.options = EvaluatorOptions() if options is None else options
        if self.options.augmented and augmentation is None:
            raise ConfigError("scoring on augmented images needs an augmentation; pass the dataset's own")
        self.problem = problem
        self.precision = inference_precision() if precision is None else precision
        if self.options.augmented and augmentation is not None:
            images = augmented_copy(images, augmentation, self.options.seed)
        self._digest = images.digest()
        example = next(iter(batches(images, _FOLDING_EXAMPLES, mean=mean, std=std)))[0]
        self.network: ScoringNetwork | RefittingNetwork
        if self.options.statistics == "refitted":
            if calibration is None:
                raise ConfigError("scoring refitted plans needs training images; pass calibration")
            self.network = RefittingNetwork(model, library, problem.sites, self.precision, calibration)
        else:
            self.network = ScoringNetwork(
                model,
                library,
                problem.sites,
                self.precision,
                example,
                cache_bytes=self.options.cache_bytes,
            )
        size = self.batch_size = self.options.batch_size or batch_size(self.precision.device.type)
        self._x, self._y = self._load(images, size, mean, std)
        self._known: dict[Choices, Evaluation] = {}
        self._written: Choices | None = None
        self._dense_logits = self.network.logits(self._x)
        self._check(self._dense_logits, "the dense network")
        self.dense_accuracy = float((self._dense_logits.argmax(1) == self._y).float().mean())

    @property
    def fingerprint(self) -> str:
        """Hash of the images and options, for telling whether two searches score alike."""
        return digest(self._digest, self.options, self.precision.dtype, self.precision.device.type)[:16]

    @property
    def scored(self) -> int:
        """Number of different plans scored so far."""
        return len(self._known)

    def evaluate(self, plans: Sequence[Choices]) -> list[Evaluation]:
        """Score plans, one after the other; see `__call__`."""
        return [self(choices) for choices in plans]

    def __call__(self, choices: Choices) -> Evaluation:
        """Score a plan, given as the candidate of every site.

        Raises:
            NonFiniteError: The network's class scores are NaN or infinite under this plan.
        """
        known = self.known(choices)
        if known is not None:
            return known
        start = time.perf_counter()
        logits = self.forward(choices, 0, self.batches)
        return self.record(choices, logits, time.perf_counter() - start)

    @property
    def batches(self) -> int:
        """Number of batches of held-out images."""
        return len(self._x)

    def known(self, choices: Choices) -> Evaluation | None:
        """Return the evaluation of a plan that was scored before, if it was."""
        found = self._known.get(tuple(choices))
        return None if found is None else replace(found, seconds=0.0, cached=True)

    def forward(self, choices: Choices, start: int, stop: int) -> Tensor:
        """Return the class scores of batches `start` to `stop` (excluded) under a plan, float32.

        A batch's scores do not depend on which others are asked for, so that several processes can share a
        plan.
        """
        if choices != self._written:
            self.network.write(choices)
            self._written = choices
        return self.network.logits(self._x[start:stop])

    def divergences(self, batches: int) -> list[np.ndarray]:
        """Measure how far the class probabilities move when one layer alone is compressed.

        Args:
            batches: On how many batches of held-out images, or on all where there are fewer.

        Returns:
            For every site the mean Kullback-Leibler divergence from the dense network's, in nats, under each
            of its candidates; shape (candidates,), 0 for the dense one.
        """
        sites, last = self.problem.sites, min(batches, self.batches)
        dense = self.forward(tuple(site.dense for site in sites), 0, last).log_softmax(1).double()

        def divergence(plan: Choices) -> float:
            answers = self.forward(plan, 0, last).log_softmax(1).double()
            return max(0.0, float(kl_div(answers, dense, log_target=True, reduction="batchmean")))

        return each_alone(sites, divergence)

    def record(self, choices: Choices, logits: Tensor, seconds: float) -> Evaluation:
        """Return and remember the evaluation of a plan with these class scores, which took so many seconds.

        Raises:
            NonFiniteError: A class score is NaN or infinite.
        """
        self._check(logits, choices)
        cost = self.problem.cost(choices)
        evaluation = Evaluation(
            score=self.term(logits),
            accuracy=self.term(logits, "accuracy"),
            params=cost.params,
            macs=cost.macs,
            params_kept=cost.params / self.problem.params,
            macs_kept=cost.macs / self.problem.macs,
            seconds=seconds,
        )
        self._known[tuple(choices)] = evaluation
        return evaluation

    def term(self, logits: Tensor, term: Term | None = None, start: int = 0) -> float:
        """Return an accuracy term, 0 to 1.

        Args:
            logits: Class scores of N held-out images, (N, classes).
            term: Which one; that of the options when omitted.
            start: Number of the batch that these images begin with.
        """
        first = sum(map(len, self._x[:start]))
        scored = slice(first, first + len(logits))
        return accuracy_term(
            self.options.term if term is None else term, logits, self._y[scored], self._dense_logits[scored]
        )

    def restore(self, known: Mapping[Choices, Evaluation]) -> None:
        """Take over the evaluations of the plans scored so far."""
        self._known = dict(known)

    def _load(
        self, images: Images, size: int, mean: Sequence[float], std: Sequence[float]
    ) -> tuple[list[Tensor], Tensor]:
        loaded = list(batches(images, size, mean=mean, std=std, device=self.precision.device))
        x = [batch.to(self.precision.dtype) for batch, _ in loaded]
        return x, torch.cat([labels for _, labels in loaded])

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
    """Return how good a network's answers are, 0 to 1; see `EvaluatorOptions.term`.

    Args:
        term: What counts as good.
        logits: Class scores of the compressed network, (N, classes).
        labels: True classes (N,).
        dense_logits: Class scores of the dense network, (N, classes).
    """
    if term == "soft_agreement":
        overlap = torch.minimum(logits.softmax(1), dense_logits.softmax(1)).sum(1)
        return float(overlap.mean(dtype=torch.float64))
    wanted = dense_logits.argmax(1) if term == "agreement" else labels
    return int((logits.argmax(1) == wanted).sum()) / len(logits)
