"""The contract that ships with the package, on formats that break it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from two_matrices import TwoMatrices

from decomposition import DecompositionError, TensorFormat, fit_weight, register_format
from decomposition.network.geometry import WeightModes
from decomposition.testing import FormatContract, normal, relative_error

MATRIX = WeightModes((6,), (5,), 1)


class OfOnes(TwoMatrices):
    """W = A Q, whose start has an A of ones."""

    name = "of_ones"

    def start(self, weight: Any, modes: Any, ranks: Any) -> Any:
        return [weight.new_ones(len(weight), ranks[0]), weight.flatten(1)[: ranks[0]]]


class Claimed(OfOnes):
    """A has zeros above its diagonal, though `set_output` says that it may be any matrix."""

    name = "claimed"

    def halves(self, cores: Any, modes: Any) -> Any:
        return cores[0].tril(), cores[1]

    def start(self, weight: Any, modes: Any, ranks: Any) -> Any:
        vectors = torch.linalg.svd(weight.flatten(1), full_matrices=False).U[:, : ranks[0]]
        return [vectors, vectors.T @ weight.flatten(1)]


class Structured(Claimed):
    """The same without that claim."""

    name = "structured"
    set_output = TensorFormat.set_output


def test_a_start_that_approximates_nothing_is_found() -> None:
    with pytest.raises(AssertionError):
        FormatContract().test_the_start_approximates_and_larger_ranks_approximate_better(OfOnes(), MATRIX)


@pytest.mark.parametrize("weigh_outputs", [False, True])
def test_a_wrong_claim_that_the_output_half_is_free_is_found(weigh_outputs: bool) -> None:
    contract = FormatContract()
    with pytest.raises(AssertionError):
        contract.test_a_fit_gains_on_the_start_and_reports_its_true_error(Claimed(), MATRIX, weigh_outputs)
    with pytest.raises(AssertionError):
        contract.test_the_output_half_can_be_set(Claimed(), MATRIX)
    contract.test_a_fit_gains_on_the_start_and_reports_its_true_error(Structured(), MATRIX, weigh_outputs)


@pytest.mark.parametrize("modes", [MATRIX, WeightModes((6,), (5,), 9)])
def test_the_error_of_a_structured_output_half_is_the_true_one(modes: WeightModes) -> None:
    weight = normal((6, 5, modes.kernel))
    fit = fit_weight(Structured(), weight, modes, (3,))
    assert fit.error == pytest.approx(relative_error(Structured(), fit.cores, weight, modes), rel=1e-6)


def test_a_format_that_does_not_say_what_its_cores_stand_for_is_refused() -> None:
    class Silent(OfOnes):
        name = "silent"
        halves = TensorFormat.halves

    with pytest.raises(DecompositionError, match=r"'silent'.*define halves or reconstruct"):
        register_format(Silent)
