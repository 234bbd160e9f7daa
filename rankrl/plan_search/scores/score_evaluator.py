"""Scoring plans with a user's own function, for tasks other than classification."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any, SupportsFloat, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from decomposition import FitLibrary
from decomposition.network.inputs import Inputs
from decomposition.network.surgery import copied
from rankrl.device import Precision, model_device
from rankrl.errors import ConfigError, NonFiniteError
from rankrl.plan_search.scores.remembering import RememberingEvaluator
from rankrl.plan_search.scores.score_identity import score_identity
from rankrl.plan_search.scores.scoring_network import ScoringNetwork
from rankrl.plan_search.space.problem import Choices, SearchProblem

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
        """The function's identity, for telling whether two searches score alike."""
        return score_identity(self.score)

    def value(self, choices: Choices) -> float:
        """Return the score of the network under a plan; see `evaluate` for the errors."""
        self.network.write(choices)
        return scored(self.score, self.network.model, f"the plan with candidates {list(choices)}")


def check_score(score: Score, model: nn.Module) -> None:
    """Call a score on a copy of the dense network, so that a failure shows before layers are fitted."""
    scored(score, copied(model).requires_grad_(False), "the dense network")


def scored(score: Score, network: nn.Module, what: str) -> float:
    """Return a score of a network."""
    return checked_score(answer(score, network), what)


def answer(score: Score, network: nn.Module) -> Any:
    """Return what a score says of a network: a number, or one for each input."""
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
    """Return a score as a number."""
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
    """Copy a score's inputs, since a network may change them and the next plan needs the same ones."""
    return tree_map_only(Tensor, torch.clone, (inputs, keywords))


def _contiguous(_: nn.Module, __: object, output: object) -> object:
    """Return outputs in the memory order of the dense network's, on which `view` works."""
    return tree_map_only(Tensor, Tensor.contiguous, output)
