"""Scores of outputs move with what is lost, where the place of the largest number does not."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import expit, rel_entr, softmax

from rankrl.onnx.output_scores import Array, expected_changes, output_score
from rankrl.verify.agreement import (
    OutputAgreement,
    Outputs,
    agreement,
    agreement_score,
    agreement_values,
    output_scores,
)

DRAWN = np.random.default_rng(1)


@pytest.fixture(autouse=True)
def _drawn_alike() -> None:
    """Every test draws the same numbers, in whatever order tests run."""
    DRAWN.bit_generator.state = np.random.default_rng(1).bit_generator.state


def compared(before: list[Array], after: list[Array]) -> list[OutputAgreement]:
    known, found = (
        [[each[start : start + 7] for each in answers] for start in range(0, len(before[0]), 7)]
        for answers in (before, after)
    )
    original = Outputs([f"y{number}" for number in range(len(before))], known)
    return agreement(original, found, output_scores(original))


def logits(count: int, classes: int) -> Array:
    rows = 3 * DRAWN.standard_normal((count, classes))
    return (rows - rows.mean(1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("form", ["logits", "probabilities", "log-probabilities"])
def test_classes_that_vary_are_counted(form: str) -> None:
    before = logits(50, 10)
    after = np.where(np.arange(50)[:, None] < 6, np.roll(before, 1, 1), before)
    if form != "logits":
        before, after = softmax(before, 1), softmax(after, 1)
    if form == "log-probabilities":
        before, after = np.log(before), np.log(after)
    (found,) = compared([before], [after])
    assert found.kind == "classes"
    assert found.score == found.top1 == 44 / 50
    assert list(found.values) == [0.0] * 6 + [1.0] * 44


@pytest.mark.parametrize("form", ["logits", "probabilities"])
def test_a_class_that_never_changes_hides_nothing(form: str) -> None:
    before = logits(40, 5)
    before[:, 0] += 15
    before -= before.mean(1, keepdims=True)
    noise = logits(40, 5) / 3
    scores = []
    for size in (0.0, 0.1, 0.3, 1.0):
        pair = (before, before + np.float32(size) * noise)
        first, second = pair if form == "logits" else (softmax(each, 1) for each in pair)
        (found,) = compared([first], [second])
        assert (found.kind, found.top1) == ("distribution", 1.0)
        scores.append(found.score)
    assert scores[0] == pytest.approx(1, abs=1e-5)
    assert scores == sorted(scores, reverse=True)
    assert scores[3] < 0.9
    known, answered = softmax(before.astype(float), 1), softmax(before + noise.astype(float), 1)
    constant = rel_entr(known, known.mean(0)).sum(1).sum() / 39
    expected = 1 - rel_entr(known, answered).sum(1).mean() / constant
    assert scores[3] == pytest.approx(expected, rel=1e-3)
    mean = np.broadcast_to(np.log(known.mean(0)), before.shape)
    (guess,) = compared([before], [mean - mean.mean(1, keepdims=True)])
    assert guess.score == pytest.approx(1 - 39 / 40, rel=1e-3)


def test_numbers_of_a_regression_are_judged_each_in_its_own_unit() -> None:
    angles = np.stack([DRAWN.normal(30, 10, 60), DRAWN.normal(25, 9, 60), DRAWN.normal(0.1, 0.01, 60)], 1)
    lost = np.stack([angles[:, 0], angles[:, 1], np.full(60, angles[:, 2].mean())], 1)
    (found,) = compared([angles], [lost])
    assert (found.kind, found.top1) == ("values", 1.0)
    assert [unit.channels for unit in found.units] == ["0:2", "2"]
    assert [unit.score for unit in found.units] == pytest.approx([1, 1 / 60])  # a constant's is 1 - 59 / 60
    assert found.score == found.units[1].score
    spread = angles + angles.std(0, ddof=1)
    assert compared([angles], [spread])[0].score == pytest.approx(0)


def test_boxes_that_are_lost_are_seen() -> None:
    boxes = np.zeros((20, 100, 5), np.float32)
    boxes[..., :4] = DRAWN.uniform(0, 640, (100, 4)) + DRAWN.normal(0, 2, (20, 100, 4))
    for image in boxes:
        image[DRAWN.choice(100, 10, replace=False), 4] = 0.9
    lost = boxes.copy()
    for image in lost:
        image[np.flatnonzero(image[:, 4])[:7], 4] = 0.05
    (found,) = compared([boxes], [lost])
    assert found.error < 0.04  # which says that 96 % agree
    assert found.score < 0.8
    assert compared([boxes[..., :4], boxes[..., 4]], [lost[..., :4], lost[..., 4]])[1].score < 0.4
    turned = compared([boxes.transpose(0, 2, 1)], [lost.transpose(0, 2, 1)])
    assert turned[0].score == pytest.approx(found.score)


@pytest.mark.parametrize("last", [False, True])
def test_the_worst_quantity_of_an_output_is_its_score(last: bool) -> None:
    pixels = DRAWN.uniform(0, 640, (1, 4, 16)) + DRAWN.normal(0, 30, (50, 4, 16))
    classes = expit(3 * DRAWN.standard_normal((50, 20, 16)))
    moved = classes + DRAWN.normal(0, 0.2, classes.shape)
    before, after = (np.concatenate([pixels, each], 1) for each in (classes, moved))
    if last:
        before, after = before.transpose(0, 2, 1), after.transpose(0, 2, 1)
    (found,) = compared([before], [after])
    expected = 1 - np.square(moved - classes).mean() / classes.var(0, ddof=1).mean()
    assert [unit.channels for unit in found.units] == ["0:4", "4:24"]
    assert [unit.score for unit in found.units] == pytest.approx([1, expected])
    assert found.worst == found.units[1]
    assert found.score == found.values.mean() == pytest.approx(expected)
    assert found.units[1].error == pytest.approx(np.linalg.norm(moved - classes) / np.linalg.norm(classes))
    assert found.error < 0.01 < found.largest_error == found.units[1].error
    score = output_score("y", [before])
    assert score.loss(before, after).mean() == pytest.approx((1 - expected) / 2)


@pytest.mark.parametrize("shape", [(), (1,), (30,), (4, 6), (3, 4, 4)])
def test_squared_errors_are_told_beside_the_variance(shape: tuple[int, ...]) -> None:
    before = DRAWN.normal(5, 2, (30, *shape))
    after = before + 0.5 * DRAWN.standard_normal(before.shape)
    (found,) = compared([before], [after])
    expected = 1 - np.square(after - before).mean() / before.var(0, ddof=1).mean()
    assert found.score == pytest.approx(expected)
    assert found.values.shape == (30,)


def test_what_hardly_varies_is_told_beside_its_size() -> None:
    before = np.full((10, 3, 2), 4.0)
    (found,) = compared([before], [before + 0.4])
    assert found.score == pytest.approx(0.99)
    assert compared([np.zeros((10, 3, 2))], [np.zeros((10, 3, 2))])[0].score == 1
    single = logits(1, 5)
    assert compared([single], [single * 1.001])[0].score > 0.99


def test_outputs_of_other_lengths_and_integers_have_scores() -> None:
    answers = [DRAWN.standard_normal((2, length)) for length in (3, 5)]
    score = output_score("y", answers)
    numbers = np.concatenate([each.reshape(-1) for each in answers])
    expected = 1 - np.square(answers[1]).mean(1) / numbers.var(ddof=1)
    assert score(answers[1], np.zeros_like(answers[1])) == pytest.approx(expected)
    (found,) = compared([np.arange(12)], [np.where(np.arange(12) < 3, 0, np.arange(12))])
    assert (found.kind, found.score) == ("labels", 10 / 12)


def test_outputs_are_averaged_input_by_input() -> None:
    before, after = (
        [logits(20, 10), DRAWN.standard_normal((20, 2, 3))],
        [logits(20, 10), np.zeros((20, 2, 3))],
    )
    outputs = compared(before, after)
    values = agreement_values(outputs, 20)
    assert values is not None
    assert values.mean() == pytest.approx(agreement_score(outputs))
    assert values == pytest.approx((outputs[0].values + outputs[1].values) / 2)
    assert agreement_values(outputs, 19) is None


def test_batches_of_one_input_are_counted_as_inputs() -> None:
    before = DRAWN.standard_normal((14, 3))
    outputs = compared([before], [np.where(np.arange(14)[:, None] < 7, 0, before)])
    assert agreement_values(outputs, 2) == pytest.approx([outputs[0].values[:7].mean(), 1.0])


@given(st.integers(0, 10_000), st.integers(2, 40), st.integers(2, 12), st.floats(0, 2))
def test_scores_are_one_for_the_original_and_one_at_most(
    seed: int, count: int, width: int, noise: float
) -> None:
    drawn = np.random.default_rng(seed)
    for shape in ((count, width), (count, width, 3), (count, 2, width, 2)):
        before = drawn.standard_normal(shape) * drawn.uniform(0.1, 10) + drawn.normal()
        kinds = [before, before - before.mean(1, keepdims=True)]
        if len(shape) == 2:
            kinds.append(softmax(before, 1))
        for each in kinds:
            (same,) = compared([each], [each.copy()])
            assert same.values == pytest.approx(np.ones(count))
            (found,) = compared([each], [each + noise * drawn.standard_normal(shape)])
            assert (found.values <= 1 + 1e-9).all()


def test_expected_changes_are_those_of_many_inputs() -> None:
    generator = np.random.default_rng(0)
    logits = generator.normal(0, 3, (20_000, 10))
    noisy = logits + generator.normal(0, 0.05, logits.shape)
    true = float((logits.argmax(1) != noisy.argmax(1)).mean())
    assert 0.005 < true < 0.05
    parts = [slice(start, start + 24) for start in range(0, 2400, 24)]
    counted = np.array([(logits[part].argmax(1) != noisy[part].argmax(1)).mean() for part in parts])
    known = np.array([expected_changes(logits[:120], logits[part], noisy[part]) for part in parts])
    assert np.abs(known - true).mean() < 0.5 * np.abs(counted - true).mean()
    fresh = [expected_changes(logits[part], logits[part], noisy[part]) for part in parts]
    assert float(np.mean(fresh)) == pytest.approx(true, rel=0.2)  # on average over the inputs


def test_expected_changes_follow_the_order_of_the_classes() -> None:
    before = np.array([[3.0, 1.0, 0.0], [0.0, 5.0, 1.0]])
    assert expected_changes(before, before, before) == 0
    after = before + np.array([[-3.0, 0.0, 0.0], [0.0, -3.0, 0.0]])  # the first of each loses three
    assert expected_changes(before, before, after) == 0.5  # 3 against 1 falls, 5 against 1 does not


@pytest.mark.parametrize("varies", [True, False])
def test_losses_of_classes_are_those_of_their_logits(varies: bool) -> None:
    before = logits(40, 6) / 2
    if not varies:
        before[:, 2] += 12  # probabilities near 1 hide everything else
    after = before + DRAWN.normal(0, 0.1, before.shape)
    centred = before - before.mean(1, keepdims=True)
    moved = after - after.mean(1, keepdims=True)
    spread = np.square(centred - centred.mean(0)).mean() * 40 / 39
    expected = np.square(moved - centred).mean(1) / spread
    for known, found in ((before, after), (softmax(before, 1), softmax(after, 1)), (before, after + 7)):
        score = output_score("y", [known.astype(np.float64)], classes=True)
        assert score.kind == ("classes" if varies else "distribution")
        np.testing.assert_allclose(score.loss(known, found), expected, rtol=1e-4)
