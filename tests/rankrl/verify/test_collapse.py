"""A compressed network that answers no better than a constant is told from one that lost a little."""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from call_options import grouped
from small_graphs import convolutions, images, sentences, tokens
from torch import nn

import rankrl
from rankrl.onnx.graph import file
from rankrl.onnx.graph_edits import stored
from rankrl.verify.agreement import agreement, constant_agreement
from rankrl.verify.certificate import accuracy_collapse, collapse
from rankrl.verify.measure import HeldoutScore, Sample

Array = np.ndarray[Any, Any]
DRAWN = np.random.default_rng(0)
LITTLE: dict[str, Any] = {"candidates": 4, "timing": rankrl.LatencyOptions(batch=2, runs=2)}


@dataclass(frozen=True)
class Function:
    answer: Callable[[Array], Array]

    @property
    def output_names(self) -> list[str]:
        return ["y"]

    def run(self, feed: Array, /) -> list[Array]:
        return [self.answer(feed)]


def judged(original: Callable[[Array], Array], compressed: Callable[[Array], Array], x: Array) -> str | None:
    before, after, batches = Function(original), Function(compressed), np.array_split(x, 3)
    return collapse(agreement(before, after, batches), constant_agreement(before, batches), len(x))


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
    (found,) = constant_agreement(Function(lambda x: x), np.array_split(x, 4))
    spread = np.square(x - x.mean(0)).sum() * 30 / 29
    assert found.error == pytest.approx(np.sqrt(spread / np.square(x).sum()), rel=1e-5)
    assert found.top1 == np.bincount(x.argmax(1)).max() / 30


def test_outputs_of_other_lengths_are_compared_with_one_number() -> None:
    batches = [DRAWN.standard_normal((2, length)).astype(np.float32) + 1 for length in (3, 5)]
    (found,) = constant_agreement(Function(lambda x: x[..., None]), batches)
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

    monkeypatch.setattr(file, "store_integers", ruin)
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
