"""Score plans: by the answers to held-out images, or by a user's function."""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, SupportsFloat, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div
from torch.utils._pytree import tree_map_only

from decomposition.cache import digest
from decomposition.choose.candidates import CandidateSet
from decomposition.choose.library import FitLibrary
from decomposition.network.inputs import Inputs
from decomposition.network.surgery import copied
from rankrl.data import Augmentation, Images, augmented_copy, batches
from rankrl.device import Precision, inference_precision, model_device
from rankrl.errors import ConfigError, DataError, NonFiniteError
from rankrl.options.search import ScoreMetric, ScoringOptions, SearchOptions, Statistics, check_choice
from rankrl.plan_search.scores.evaluation import RememberingEvaluator
from rankrl.plan_search.scores.scoring_network import RefittingNetwork, ScoringNetwork
from rankrl.plan_search.space.problem import Choices, SearchProblem

log = logging.getLogger(__name__)

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


def weighed(
    sites: Sequence[CandidateSet], only: Sequence[int], divergences: Sequence[float]
) -> list[CandidateSet]:
    """Combine the sites' predicted losses with one measured divergence each, by a weighted geometric mean.

    The measurement includes the effect of later layers on an error; the prediction has no noise of few
    images.
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
    metric: ScoreMetric = "accuracy"
    statistics: Statistics = "corrected"
    seed: int = 0

    @classmethod
    def of(cls, options: SearchOptions, seed: int) -> EvaluatorOptions:
        scores = options.scores()
        images = {field.name: getattr(options, field.name) for field in fields(ScoringOptions)}
        return cls(**images, metric=scores.metric, statistics=scores.statistics, seed=seed)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("search.metric", self.metric, ScoreMetric)
        check_choice("search.statistics", self.statistics, Statistics)


@dataclass(frozen=True)
class ScoredImages:
    """The held-out images that plans are scored on, their preprocessing, and training images for refits."""

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

    A plan costs one forward pass and the weights that differ from the last plan's; equal plans are scored
    once.
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
        return len(self._x)

    def value(self, choices: Choices) -> Tensor:
        """Return the class scores of all images under a plan, (N, classes) float32."""
        return self.forward(choices, 0, self.batches)

    def scores(self, choices: Choices, value: Tensor) -> tuple[float, float]:
        self._check(value, choices)
        known = {"logits": value, "labels": self._y, "dense_logits": self._dense_logits}
        return accuracy_metric(self.options.metric, **known), accuracy_metric("accuracy", **known)

    def forward(self, choices: Choices, start: int, stop: int) -> Tensor:
        """Return the class scores of batches `start` to `stop` (excluded) under a plan, float32.

        A batch's scores do not depend on the other batches, so that several processes can share a plan.
        """
        if choices != self._written:
            self.network.write(choices)
            self._written = choices
        return self.network.logits(self._x[start:stop])

    def part(self, choices: Choices, start: int, stop: int) -> np.ndarray:
        """Return `forward` as an array, for another process."""
        logits: np.ndarray = self.forward(choices, start, stop).cpu().numpy()
        return logits

    def divergences(self, batches: int, only: Sequence[int] | None = None) -> list[np.ndarray]:
        """Measure each site's divergences (candidates,), in nats, it alone compressed; 0 outside `only`."""
        sites, last = self.problem.sites, min(batches, self.batches)
        dense = self.forward(tuple(site.dense for site in sites), 0, last).log_softmax(1).double()

        def divergence(plan: Choices) -> float:
            answers = self.forward(plan, 0, last).log_softmax(1).double()
            # Rounding may make a divergence near 0 negative.
            return max(0.0, float(kl_div(answers, dense, log_target=True, reduction="batchmean")))

        return each_alone(sites, divergence, only)

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


def accuracy_metric(metric: ScoreMetric, logits: Tensor, labels: Tensor, dense_logits: Tensor) -> float:
    """Return the metric, 0 to 1, of logits (N, classes), labels (N,) and dense logits (N, classes)."""
    if metric == "soft_agreement":
        overlap = torch.minimum(logits.softmax(1), dense_logits.softmax(1)).sum(1)
        return float(overlap.mean(dtype=torch.float64))
    classes = dense_logits.argmax(1) if metric == "agreement" else labels
    return int((logits.argmax(1) == classes).sum()) / len(logits)


def score_identity(score: Callable[..., Any]) -> str:
    """Return 16 hexadecimal digits that are equal for equal scores, in other processes too.

    An attribute `identity`, a string, identifies a score by itself. Any other score is identified by its
    source text, an object by that of its class; what the text names is not followed.
    """
    identity = getattr(score, "identity", None)
    if not isinstance(identity, str):
        identity = _source(score)
    return digest(identity)[:16]


def _source(score: Any) -> str:
    """Return the source text of a score, its name where there is none."""
    while isinstance(score, functools.partial):
        score = score.func
    score = inspect.unwrap(score)  # what torch.no_grad and the like wrap
    if not inspect.isroutine(score):
        score = type(score)
    try:
        return _body(score) if score.__name__ == "<lambda>" else inspect.cleandoc(inspect.getsource(score))
    except (OSError, TypeError):
        log.warning(
            "the score %s has no source text and counts by its name: a search that goes on in its folder "
            "does not notice an edit. Give it an attribute `identity`, a string that you change with it",
            _name(score),
        )
        return _name(score)


def _body(function: Any) -> str:
    """Return the text of a lambda alone: its lines hold other arguments of a call too."""
    places = [place for place in function.__code__.co_positions() if None not in place and any(place[2:])]
    first, start = min((line, column) for line, _, column, _ in places)
    last, end = max((line, column) for _, line, _, column in places)
    lines = [line.encode() for line in inspect.findsource(function)[0][first - 1 : last]]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    return b"".join(lines).decode()


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


Score = Callable[[nn.Module], Any]
"""From a network to a number, higher is better, or to one for each input, whose mean is the score."""


class ScoreEvaluator(RememberingEvaluator):
    """Scores plans by a function from a network to a number; equal plans are scored once.

    The function gets one static network with the plan's weights written into it, in evaluation mode; it must
    neither change nor keep the network.
    """

    def __init__(
        self, model: nn.Module, library: FitLibrary, problem: SearchProblem, score: Score, example: Inputs
    ) -> None:
        super().__init__(problem)
        self.score = score
        self.network = ScoringNetwork(
            model, library, problem.sites, Precision(model_device(model), torch.float32), example
        )
        self.network.model.register_forward_hook(_contiguous)

    @cached_property
    def fingerprint(self) -> str:
        """The function's identity; equal for searches that score alike."""
        return score_identity(self.score)

    def value(self, choices: Choices) -> float:
        """Return the score of the network under a plan; see `evaluate` for the errors."""
        self.network.write(choices)
        return scored(self.score, self.network.model, f"the plan with candidates {list(choices)}")


def check_score(score: Score, model: nn.Module) -> None:
    """Call a score on a copy of the dense network, so that it fails before layers are fitted."""
    scored(score, copied(model).requires_grad_(False), "the dense network")


def scored(score: Score, network: nn.Module, what: str) -> float:
    return checked_score(answer(score, network), what)


def answer(score: Score, network: nn.Module) -> Any:
    """Call a score on a network; return its answer, a number or one for each input."""
    network.eval()  # a score may have left it in training mode
    handle = network.register_forward_pre_hook(_copied, with_kwargs=True)
    try:
        with torch.no_grad():
            return score(network)
    finally:
        handle.remove()


def values_of_inputs(value: object) -> np.ndarray | None:
    """Return the scores of single inputs, shape (N,) float64; None where a score is one number."""
    values = value.detach().cpu().numpy() if isinstance(value, Tensor) else value
    if not isinstance(values, np.ndarray) or values.ndim != 1 or len(values) < 2:
        return None
    return values.astype(np.float64) if values.dtype.kind in "fiub" else None


def checked_score(value: object, what: str) -> float:
    """Return a score as a finite float; `what` names the network in errors."""
    refusal = (
        f"score returned a {type(value).__name__} for {what}; it must return one number, or an array of "
        "one for each input"
    )
    values = values_of_inputs(value)
    if values is not None:
        value = float(values.mean())
    if isinstance(value, str):  # float() would read "0.5"
        raise ConfigError(refusal)
    try:
        number = float(cast(SupportsFloat, value))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(refusal) from error
    if not math.isfinite(number):
        raise NonFiniteError(f"score returned {number} for {what}; it must return a finite number")
    return number


def _copied(_: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Copy a network's inputs, since it may change them in place and the next plan needs the same ones."""
    return tree_map_only(Tensor, torch.clone, (inputs, keywords))


def _contiguous(_: nn.Module, __: object, output: object) -> object:
    """Return outputs in the memory order of the dense network's, on which `view` works."""
    return tree_map_only(Tensor, Tensor.contiguous, output)
