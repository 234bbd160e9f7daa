"""Intervals of a loss cover what they say, and say how many inputs would certify more."""

import html
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from call_options import grouped
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from small_graphs import convolutions, images, sentences, tokens
from torch import nn

import rankrl
from rankrl.errors import ConfigError
from rankrl.onnx.graph import compressed
from rankrl.onnx.graph_edits import stored
from rankrl.verify.agreement import (
    Certificate,
    Outputs,
    accuracy_collapse,
    agreement,
    certify,
    collapse,
    constant_agreement,
    output_scores,
)
from rankrl.verify.measure import HeldoutScore, Sample


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


Array = np.ndarray[Any, Any]
DRAWN = np.random.default_rng(0)
LITTLE: dict[str, Any] = {"candidates": 4, "timing": rankrl.LatencyOptions(batch=2, runs=2)}


def outputs(function: Callable[[Array], Array], batches: Sequence[Array]) -> Outputs:
    return Outputs(["y"], [[function(batch)] for batch in batches])


def judged(original: Callable[[Array], Array], compressed: Callable[[Array], Array], x: Array) -> str | None:
    before, after = (outputs(function, np.array_split(x, 3)) for function in (original, compressed))
    found = agreement(before, after.batches, output_scores(before))
    return collapse(found, constant_agreement(before), len(x))


def classes(count: int) -> Array:
    """Draw scores of four classes that are equally common."""
    return DRAWN.standard_normal((count, 4)).astype(np.float32)


@pytest.mark.parametrize("count", [30, 3000])
def test_scores_that_keep_the_class_or_the_numbers_have_not_collapsed(count: int) -> None:
    x = classes(count)
    assert judged(lambda x: x, lambda x: x + 0.5 * np.roll(x, 1), x) is None
    assert judged(lambda x: x, lambda x: 40 * x, x) is None  # a fine-tuned network may be surer of itself
    shuffled = judged(lambda x: x, lambda x: 1.5 * np.roll(x, 1, 0), x)
    assert shuffled is not None
    assert "'y' has the original's class" in shuffled
    assert "ask for a larger budget" in shuffled
    assert judged(lambda x: x, np.negative, x) is not None


@pytest.mark.parametrize("shape", [(40, 1), (40, 3, 5)])
def test_numbers_are_compared_with_their_mean(shape: tuple[int, ...]) -> None:
    x = (3 + DRAWN.standard_normal(shape)).astype(np.float32)
    assert judged(lambda x: x, lambda x: x + 0.5 * np.roll(x, 1, 0) - 1.5, x) is None
    mean = judged(lambda x: x, lambda x: np.full_like(x, 5.0), x)
    assert mean is not None
    assert "the original's mean output one of 0.3" in mean
    assert judged(lambda x: x, lambda x: 3 + np.roll(x - 3, 1, 0), x) is not None


def test_one_quantity_of_an_output_that_is_lost_is_named() -> None:
    x = np.concatenate([DRAWN.normal(300, 40, (60, 4, 9)), DRAWN.uniform(size=(60, 20, 9))], 1)
    mean = np.concatenate([x[:, :4], np.full((60, 20, 9), 0.5)], 1)
    noisy = x + np.concatenate([np.zeros((60, 4, 9)), DRAWN.normal(0, 0.2, (60, 20, 9))], 1)
    both = np.concatenate([x, mean + 0.1], 2)
    assert "'y[4:24]' has a squared error of" in str(judged(lambda x: x[..., :9], lambda x: x[..., 9:], both))
    both = np.concatenate([x, noisy], 2)
    assert judged(lambda x: x[..., :9], lambda x: x[..., 9:], both) is None


def test_an_original_that_says_one_thing_has_nothing_to_lose() -> None:
    x = classes(200)
    assert judged(lambda x: np.ones_like(x), lambda x: x, x) is None
    one_class = np.array([50, 0, 0, 0], np.float32)
    assert judged(lambda x: x + one_class, lambda x: 2 * (x + one_class), x) is None
    assert judged(lambda x: x + one_class, lambda x: x, x) is not None


def test_the_best_constant_is_the_mean_and_the_commonest_class() -> None:
    x = DRAWN.standard_normal((30, 4)).astype(np.float32)
    (found,) = constant_agreement(outputs(lambda x: x, np.array_split(x, 4)))
    spread = np.square(x - x.mean(0)).sum() * 30 / 29
    assert found.error == pytest.approx(np.sqrt(spread / np.square(x).sum()), rel=1e-5)
    assert found.top1 == np.bincount(x.argmax(1)).max() / 30


def test_outputs_of_other_lengths_are_compared_with_one_number() -> None:
    batches = [DRAWN.standard_normal((2, length)).astype(np.float32) + 1 for length in (3, 5)]
    (found,) = constant_agreement(outputs(lambda x: x[..., None], batches))
    numbers = np.concatenate([each.reshape(-1) for each in batches])
    assert found.error**2 == pytest.approx(numbers.var(ddof=1) * 16 / np.square(numbers).sum(), rel=1e-5)


def test_accuracies() -> None:
    assert accuracy_collapse(0.1, 0.9, 0.1, 10_000) is not None
    assert accuracy_collapse(0.2, 0.9, 0.1, 10_000) is None
    assert accuracy_collapse(0.1, 0.11, 0.1, 10_000) is None  # it guessed before
    assert accuracy_collapse(0.8, 1.0, 0.5, 12) is None  # by chance
    assert "the original 100.0%, one answer to all of them 50.0%" in str(accuracy_collapse(0.4, 1.0, 0.5, 12))


@pytest.mark.parametrize("network", ["convolutions", "tokens"])
def test_a_file_that_is_written_wrongly_is_never_returned_in_silence(
    network: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    onnx.save(convolutions() if network == "convolutions" else tokens(), tmp_path / "net.onnx")
    given: Any = {"x": images(100)} if network == "convolutions" else sentences(100)

    def ruin(model: ir.Model, bits: Any) -> None:
        for value in model.graph.initializers.values():
            array = stored(value)
            if array is not None and array.dtype == np.float32 and array.ndim > 1:
                value.const_value = ir.tensor(-2 * array[::-1].copy(), name=value.name)

    monkeypatch.setattr(compressed, "store_integers", ruin)
    options: dict[str, Any] = {"iterations": 5, "final_iterations": 5}
    net, small = tmp_path / "net.onnx", tmp_path / "small.onnx"
    ruined = rankrl.compress(
        net, given, small, params=0.75, **grouped(decomposition="tucker", **options, **LITTLE)
    )
    assert ruined.collapsed is not None
    assert ruined.collapsed in [each.message for each in caplog.records if each.levelname == "ERROR"]


@pytest.mark.usefixtures("staged_files")
def test_a_module_that_a_training_ruins_is_told_as_collapsed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
    x = torch.randn(400, 12)

    def ruin(network: nn.Module) -> None:
        with torch.no_grad():
            list(network.parameters())[-1][0] += 100

    found = rankrl.compress(
        model, x, tmp_path, params=0.9, finetune=ruin, progress=False, **grouped(**LITTLE)
    )
    assert found.collapsed is not None
    assert found.collapsed in [each.message for each in caplog.records if each.levelname == "ERROR"]
    assert found.collapsed in html.unescape((tmp_path / "report.html").read_text())


def test_a_module_with_labels_is_judged_by_its_accuracy() -> None:
    torch.manual_seed(0)
    model = nn.Linear(12, 4)
    x = torch.randn(400, 12)
    score = HeldoutScore(model, Sample(x, model(x).argmax(1)))
    assert score.collapsed(model) is None
    with torch.no_grad():
        model.weight.mul_(0)
    assert "right, the original 100.0%, one answer to all of them" in str(score.collapsed(model))
