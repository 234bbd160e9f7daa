"""The sentence at the end says what is lost, how sure that is, and what would make it surer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rankrl.report.run_tables import certificate_card, certificate_note
from rankrl.verify.certificate import OWN_SCORE, Basis, certify, uncertified

ON_IMAGES = Basis("accuracy", "test images")


def metrics(lost: int, inputs: int, drop: float | None, basis: Basis = ON_IMAGES) -> dict[str, Any]:
    found = certify(np.ones(inputs), np.arange(inputs) >= lost, drop, basis)
    assert found is not None
    return {"certificate": found.to_dict()}


@pytest.mark.parametrize(
    ("lost", "inputs", "drop", "expected"),
    [
        (10, 10_000, 0.005, "0.18): a loss of at most 0.50 points is certified."),
        (1, 500, 0.005, "at most 0.50 points is not certified, which would take about 2,"),
        (10, 1000, 0.005, "): more than the 0.50 points that may be lost."),
        (5, 1000, 0.005, "): no number of inputs certifies at most 0.50 points at this loss."),
        (
            3,
            1000,
            None,
            "On 1,000 test images it loses 0.30 points of accuracy (95 % interval of the loss: 0.06 to",
        ),
    ],
)
def test_what_is_certified(lost: int, inputs: int, drop: float | None, expected: str) -> None:
    assert expected in certificate_note(metrics(lost, inputs, drop))


def test_a_score_that_chose_the_plan_certifies_nothing() -> None:
    found = metrics(0, 10_000, 0.01, OWN_SCORE)
    assert not found["certificate"]["certified"]
    assert (
        ", by which the plan may have been chosen, too: at most 0.01 is not certified."
        in certificate_note(found)
    )
    assert certificate_note({"uncertified": uncertified(OWN_SCORE)}).startswith(
        "Nothing certifies its loss: your score"
    )
    assert certificate_note({}) == ""


def test_a_gain_is_told_as_one() -> None:
    before = np.arange(1000) >= 8
    found = certify(before, np.ones(1000), 0.01, ON_IMAGES)
    assert found is not None
    numbers = {"certificate": found.to_dict()}
    assert "it gains 0.80 points of accuracy (95 % interval of the loss: −1." in certificate_note(numbers)
    assert set(numbers["certificate"]) >= {
        "loss",
        "low",
        "high",
        "inputs",
        "drop",
        "certified",
        "needed",
        "unit",
    }
    assert "basis" not in numbers["certificate"]
    ((name, value, note),) = certificate_card(numbers)
    assert (name, value) == ("Loss of accuracy", "−0.80 points")
    assert note.startswith("95 % interval of the loss on 1,000 test images: −")
    assert note.endswith("at most 1.00 points is certified")
    assert certificate_card({}) == []
