"""Whose turn it is, and how the strength follows the line."""

from __future__ import annotations

import pytest

from pruning import PruningError, PushPull, StrengthController
from pruning.training_options import linear


def test_linear_goes_from_start_to_end_and_stays_there() -> None:
    assert [linear(2.0, 1.0, progress) for progress in (-1.0, 0.0, 0.5, 1.0, 2.0)] == [
        2.0,
        2.0,
        1.5,
        1.0,
        1.0,
    ]


def test_push_pull_alternates() -> None:
    turns = [PushPull(2, 1).turns(step) for step in range(6)]
    assert turns == [(True, False), (True, False), (False, True)] * 2
    assert PushPull().turns(5) == (True, True)


@pytest.mark.parametrize(("network", "masks"), [(1, 0), (0, 1), (-1, 1), (-1, -1)])
def test_push_pull_needs_both_sides(network: int, masks: int) -> None:
    with pytest.raises(PruningError, match="at least one step for each side"):
        PushPull(network, masks)


def test_the_strength_grows_above_the_line_and_shrinks_below_it() -> None:
    behind, ahead = StrengthController(1.0), StrengthController(1.0)
    assert behind.update(0.9, 0.5) > 1.0 > ahead.update(0.1, 0.5)


@pytest.mark.parametrize("sensitivity", [1.0, 10.0, 100.0, 1000.0])
def test_the_controller_brings_gates_of_any_sensitivity_to_the_line(sensitivity: float) -> None:
    controller, openness, steps = StrengthController(0.01), 1.0, 400
    for step in range(steps):
        strength = controller.update(openness, step / steps)
        openness = max(openness - sensitivity * strength / steps, 0.0)
        if step > steps // 2:
            assert openness == pytest.approx(1 - step / steps, abs=0.12)


def test_the_strength_stays_within_bounds() -> None:
    controller = StrengthController(1.0)
    for step in range(1, 200):
        assert 0.99e-4 <= controller.update(5.0, step / 10) <= 1.01e4


@pytest.mark.parametrize("strength", [0.0, -1.0, float("nan"), float("inf")])
def test_the_strength_must_be_positive(strength: float) -> None:
    with pytest.raises(PruningError, match="positive and finite"):
        StrengthController(strength)
