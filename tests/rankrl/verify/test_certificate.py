"""Intervals of a loss cover what they say, and say how many inputs would certify more."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from rankrl.errors import ConfigError
from rankrl.verify.certificate import Certificate, certify


def certified(before: object, after: object, drop: float | None = None) -> Certificate:
    found = certify(np.asarray(before), np.asarray(after), drop)
    assert found is not None
    return found


@given(st.lists(st.booleans(), min_size=1, max_size=300))
def test_agreement_has_the_exact_interval(same: list[bool]) -> None:
    found = certified(np.ones(len(same)), same)
    oracle = stats.binomtest(same.count(False), len(same)).proportion_ci(0.95, method="exact")
    assert (found.low, found.high) == pytest.approx((oracle.low, oracle.high), abs=1e-9)
    assert found.loss == pytest.approx(1 - np.mean(same))


@given(st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9)), min_size=2, max_size=60))
def test_real_scores_have_students_interval_of_their_differences(pairs: list[tuple[float, float]]) -> None:
    before, after = np.array([*pairs, (0.5, 0.2)]).T
    found = certified(before, after)
    oracle = stats.ttest_1samp(before - after, 0).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((oracle.low, oracle.high), abs=1e-9)


@pytest.mark.parametrize("inputs", [60, 400])
@pytest.mark.parametrize("chances", [(0.9, 0.03, 0.01, 0.06), (0.6, 0.1, 0.1, 0.2), (0.7, 0.005, 0.0, 0.295)])
def test_paired_proportions_are_covered(inputs: int, chances: tuple[float, ...]) -> None:
    drawn = np.random.default_rng(3)
    inside = 0
    for _ in range(1000):
        cells = drawn.choice(4, inputs, p=chances)  # both right, lost, gained, both wrong
        found = certified(cells <= 1, cells % 2 == 0)
        inside += found.low <= chances[1] - chances[2] <= found.high
    assert inside >= 935  # two standard errors below 950


@given(st.integers(0, 10**6), st.integers(5, 200))
def test_who_gains_and_who_loses_may_change_places(seed: int, inputs: int) -> None:
    drawn = np.random.default_rng(seed)
    before, after = drawn.random(inputs) < 0.7, drawn.random(inputs) < 0.6
    before[0] = after[1] = False
    there, back = certified(before, after), certified(after, before)
    assert (there.low, there.high) == pytest.approx((-back.high, -back.low))
    assert there.low <= there.loss <= there.high


@given(st.integers(0, 10**6), st.sampled_from(["agreement", "paired", "real"]), st.floats(0.001, 0.3))
def test_as_many_inputs_as_are_needed_certify(seed: int, kind: str, drop: float) -> None:
    drawn = np.random.default_rng(seed)
    before = np.ones(200) if kind == "agreement" else (drawn.random(200) < 0.9).astype(float)
    after = np.where(drawn.random(200) < 0.03, 0, before)
    if kind == "real":
        before, after = before + drawn.random(200), after + drawn.random(200)
    found = certified(before, after, drop)
    assert found.certified == (found.high <= drop)
    if found.needed is None:
        assert found.loss >= drop
        return
    assert found.certified == (found.needed <= 200)
    if found.needed < 40_000:
        copies = math.ceil(found.needed / 200)
        assert (
            certified(np.tile(before, copies), np.tile(after, copies), drop).high <= drop * (1 + 1e-9) + 1e-4
        )


def test_nothing_lost_on_few_inputs_certifies_little() -> None:
    found = certified(np.ones(20), np.ones(20), 0.005)
    assert (found.loss, found.low, found.certified) == (0, 0, False)
    assert found.needed == math.ceil(math.log(0.025) / math.log(0.995))
    assert certified(np.ones(found.needed), np.ones(found.needed), 0.005).certified
    assert certified(np.ones(20), np.arange(20) > 1, 0.05).needed is None  # a tenth is lost


def test_what_cannot_be_told_is_not() -> None:
    assert certify(np.ones(0), np.ones(0)) is None
    assert certify(np.array([0.5]), np.array([0.4])) is None
    assert certified([1.0], [0.0]).high == 1
    with pytest.raises(ConfigError, match=r"shapes \(3,\) and \(2,\).*the same order"):
        certify(np.ones(3), np.ones(2))
    with pytest.raises(ConfigError, match="not finite"):
        certify(np.ones(2), np.array([1, np.nan]))
