"""Scoring plans with a user's own function, for tasks other than classification."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, SupportsFloat, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from decomposition import FitLibrary
from decomposition.inputs import Inputs, count_inputs
from decomposition.surgery import copied
from rankrl.device import Precision, model_device
from rankrl.errors import ConfigError, NonFiniteError
from rankrl.plan_search.evaluator import Evaluation
from rankrl.plan_search.problem import Choices, SearchProblem
from rankrl.plan_search.score_fingerprint import ScoreFingerprint
from rankrl.plan_search.scoring_network import ScoringNetwork

log = logging.getLogger(__name__)

Score = Callable[[nn.Module], float]


class ScoreEvaluator:
    """Scores plans by a function from a network to a number; equal plans are scored once.

    The function is handed one static network with the plan's weights written into it, in evaluation mode; it
    must not change or keep it.

    Args:
        model: The dense network; it is copied and stays on its device.
        library: The fits of its layers.
        problem: The search problem made of them.
        score: Higher is better; rewards that combine it with size expect 0 to 1.
        example: A few model inputs, on any device.
    """

    def __init__(
        self, model: nn.Module, library: FitLibrary, problem: SearchProblem, score: Score, example: Inputs
    ) -> None:
        self.problem = problem
        self.score = score
        self.network = ScoringNetwork(
            model, library, problem.sites, Precision(model_device(model), torch.float32), example
        )
        self.network.model.register_forward_hook(_contiguous)
        self._known: dict[Choices, Evaluation] = {}
        self._count = count_inputs(example)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the function's code and what it reaches, for telling whether two searches score alike."""
        found = ScoreFingerprint.of(self.score)
        if found.opaque:
            log.warning(
                "the score holds what cannot be looked into and counts by its name alone: %s. A search that "
                "goes on in its folder does not notice an edit of that",
                ", ".join(found.opaque),
            )
        return found.digest

    def evaluate(self, plans: Sequence[Choices]) -> list[Evaluation]:
        """Score plans one after the other.

        Raises:
            ConfigError: The function returned no number.
            NonFiniteError: It returned NaN or an infinity.
        """
        return [self._evaluate(choices) for choices in plans]

    def state(self) -> dict[str, Any]:
        """Return nothing: a score depends on its plan alone."""
        return {}

    def restore(self, state: Mapping[str, Any], known: Mapping[Choices, Evaluation]) -> None:
        """Take over the evaluations of the plans scored so far."""
        self._known = dict(known)

    def known(self, choices: Choices) -> Evaluation | None:
        """Return the evaluation of a plan that was scored before, if it was."""
        found = self._known.get(tuple(choices))
        return None if found is None else replace(found, seconds=0.0, cached=True)

    def value(self, choices: Choices) -> float:
        """Return the score of the network under a plan; see `evaluate` for the errors."""
        self.network.write(choices)
        return scored(self.score, self.network.model, f"the plan with candidates {list(choices)}")

    def record(self, choices: Choices, score: float, seconds: float) -> Evaluation:
        """Return and remember the evaluation of a plan with this score, which took so many seconds."""
        cost = self.problem.cost(choices)
        evaluation = Evaluation(
            score=score,
            accuracy=score,
            params=cost.params,
            macs=cost.macs,
            params_kept=cost.params / self.problem.params,
            macs_kept=cost.macs / self.problem.macs,
            images=self._count,
            seconds=seconds,
        )
        self._known[tuple(choices)] = evaluation
        return evaluation

    def _evaluate(self, choices: Choices) -> Evaluation:
        known = self.known(choices)
        if known is not None:
            return known
        start = time.perf_counter()
        score = self.value(choices)
        return self.record(choices, score, time.perf_counter() - start)


def check_score(score: Score, model: nn.Module) -> None:
    """Call a score on a copy of the dense network, so that one that fails does so before layers are fitted.

    Raises:
        ConfigError: It returned no number.
        NonFiniteError: It returned NaN or an infinity.
    """
    scored(score, copied(model).requires_grad_(False), "the dense network")


def scored(score: Score, network: nn.Module, what: str) -> float:
    """Return a score of a network.

    Args:
        score: The user's function.
        network: What it is handed, in evaluation mode.
        what: What the network is, for messages.

    Raises:
        ConfigError: It returned no number.
        NonFiniteError: It returned NaN or an infinity.
    """
    network.eval()  # a score may have left it in training mode
    with torch.no_grad():
        value: object = score(network)
    refusal = f"score returned a {type(value).__name__} for {what}; it must return one number"
    if isinstance(value, str):  # float() would read "0.5"
        raise ConfigError(refusal)
    try:
        number = float(cast(SupportsFloat, value))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(refusal) from error
    if not math.isfinite(number):
        raise NonFiniteError(f"score returned {number} for {what}; it must return a finite number")
    return number


def _contiguous(_: nn.Module, __: object, output: object) -> object:
    """Hand a score outputs in the memory order of the dense network's, on which `view` works."""
    return tree_map_only(Tensor, Tensor.contiguous, output)
