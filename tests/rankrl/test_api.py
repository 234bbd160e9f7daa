"""`rankrl.search`: any network, any score."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from call_options import grouped, layer_options
from torch import nn

import decomposition
import rankrl
from rankrl.errors import CheckpointError, ConfigError, NonFiniteError
from rankrl.options.timing import LatencyOptions
from rankrl.plan_search.scores.evaluators import Score, ScoreEvaluator


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(12, 16, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 4, 1),
    ).eval()


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(40, 3, 12, 12, generator=torch.Generator().manual_seed(1))


def fidelity(dense: nn.Module, images: torch.Tensor) -> Score:
    """A score for a network whose output is a map of numbers: minus its distance to the dense one."""
    expected = dense(images)

    def score(network: nn.Module) -> float:
        return -float((network(images) - expected).square().mean())

    return score


@pytest.mark.parametrize("selector", ["bayes", "ddpg", "greedy", "random"])
def test_network_that_is_no_classifier_is_searched(
    model: nn.Module, images: torch.Tensor, selector: str
) -> None:
    before = copy.deepcopy(model.state_dict())
    score = fidelity(copy.deepcopy(model), images)
    found = rankrl.search(
        model,
        score=score,
        inputs=images,
        params=0.5,
        selector=selector,
        decomposition=layer_options(candidates=4),
        search=rankrl.SearchOptions(episodes=4),
    )
    small = decomposition.apply_plan(model, found.plan, images)
    total = decomposition.count_parameters(model)
    assert decomposition.count_parameters(small) <= 0.5 * total
    assert found.best.reward == max(row.reward for row in found.rows)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_layers_choose_among_several_formats_within_bytes(model: nn.Module, images: torch.Tensor) -> None:
    score = fidelity(copy.deepcopy(model), images)
    formats = layer_options(("tucker", "cp"), candidates=4)
    search = partial(
        rankrl.search, model, score=score, inputs=images, bytes=0.5, selector="random", decomposition=formats
    )
    found = search(search=rankrl.SearchOptions(episodes=6, finalists=2))
    assert {each.format for each in found.plan.chosen(decomposition.Factorise).values()} <= {"tucker", "cp"}
    small = decomposition.apply_plan(model, found.plan, images)
    before, after = (sum(p.nbytes for p in each.parameters()) for each in (model, small))
    assert after <= 0.5 * before
    without_last_round = search(search=rankrl.SearchOptions(episodes=6)).plan
    other = decomposition.apply_plan(model, without_last_round, images)
    with torch.no_grad():
        assert score(small) >= score(other)


@pytest.mark.parametrize(("reduce_range", "bits"), [(True, 7), (False, 8)])
def test_integers_have_the_bits_that_timing_asks_for(
    reduce_range: bool, bits: int, model: nn.Module, images: torch.Tensor
) -> None:
    result = rankrl.search(
        model,
        inputs=images,
        score=lambda network: 0.0,
        bytes=0.3,
        timing=LatencyOptions(reduce_range=reduce_range),
        selector="greedy",
        decomposition=layer_options("cp", precisions=("int8",), candidates=2),
    )
    assert {each.weight_bits for each in result.plan.chosen(decomposition.Quantise).values()} == {bits}


def test_search_without_a_budget_is_refused(model: nn.Module, images: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match="give a budget"):
        rankrl.search(model, score=lambda _: 1.0, inputs=images)


def test_score_that_is_no_number_is_refused(model: nn.Module, images: torch.Tensor) -> None:
    quick = {"inputs": images, "params": 0.5, "selector": "greedy", "candidates": 2}
    for answer in ("good", "0.5", None, (0.5, 1.0), torch.ones(3, 2)):
        with pytest.raises(ConfigError, match="must return one number"):
            rankrl.search(model, score=lambda _: answer, **grouped(**quick))  # type: ignore[arg-type, return-value]  # noqa: B023
    with pytest.raises(NonFiniteError, match="must return a finite number"):
        rankrl.search(model, score=lambda _: float("nan"), **grouped(**quick))  # type: ignore[arg-type]


def test_killed_search_goes_on(
    model: nn.Module, images: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: Any = {
        "inputs": images,
        "params": 0.5,
        "selector": "random",
        "episodes": 6,
        "seed": 1,
        "candidates": 8,
    }
    options["score"] = fidelity(copy.deepcopy(model), images)
    whole = rankrl.search(model, folder=tmp_path / "whole", **grouped(**options))
    value, calls = ScoreEvaluator.value, []

    def failing(self: ScoreEvaluator, ranks: Any) -> float:
        calls.append(ranks)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return value(self, ranks)

    with monkeypatch.context() as patch:
        patch.setattr(ScoreEvaluator, "value", failing)
        with pytest.raises(KeyboardInterrupt):
            rankrl.search(model, folder=tmp_path / "broken", **grouped(**options))
    resumed = rankrl.search(model, folder=tmp_path / "broken", **grouped(**options))
    assert resumed.plan == whole.plan
    assert [row.reward for row in resumed.rows] == [row.reward for row in whole.rows]


def test_an_edited_score_begins_anew_and_says_so(
    model: nn.Module, images: torch.Tensor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: Any = {"inputs": images, "params": 0.5, "selector": "random", "episodes": 4, "candidates": 4}
    calls = []

    def scored(factor: float) -> Any:
        expected = model(images).detach()
        counted = calls.append

        def score(network: nn.Module) -> float:
            counted(factor)
            return -factor * float((network(images) - expected).square().mean())

        score.identity = f"{factor} times the square"  # type: ignore[attr-defined]
        return score

    def search(factor: float) -> Any:
        calls.clear()
        return rankrl.search(model, score=scored(factor), folder=tmp_path / "search", **grouped(**options))

    first = search(1.0)
    assert len(calls) > 1
    again = search(1.0)
    assert len(calls) == 1  # on the dense network alone, to see whether it works
    assert [row.reward for row in again.rows] == [row.reward for row in first.rows]
    assert "the score changed" not in caplog.text
    edited = search(2.0)
    assert "the score changed since" in caplog.text
    assert "old rewards are not reused" in caplog.text
    assert [row.reward for row in edited.rows] == [2 * row.reward for row in first.rows]
    assert {path.name for path in (tmp_path / "search").glob("old-*")} == {
        "old-search.json",
        "old-episodes.csv",
    }
    with pytest.raises(CheckpointError, match="episodes was 4, is now 5"):
        rankrl.search(
            model, score=scored(3.0), folder=tmp_path / "search", **grouped(**{**options, "episodes": 5})
        )


def test_environment_is_registered_by_importing_the_package() -> None:
    assert "rankrl/RankSelection-v0" in gymnasium.registry


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        (0, r"search\.workers must be a whole number >= 1"),
        pytest.param(2, "top level of a module", marks=pytest.mark.slow),  # known when its layers are fitted
    ],
)
def test_workers_that_cannot_be_are_refused(
    model: nn.Module, images: torch.Tensor, workers: int, message: str
) -> None:
    quick: Any = {"inputs": images, "params": 0.5, "selector": "greedy", "candidates": 2}
    with pytest.raises(ConfigError, match=message):
        rankrl.search(model, score=lambda _: 1.0, **grouped(workers=workers, **quick))


class Answer(nn.Module):
    """A network whose forward ends in a given function of a feature map."""

    def __init__(self, answer: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3))
        self.answer = answer

    def forward(self, x: torch.Tensor) -> Any:
        return self.answer(self.body(x))


@pytest.mark.parametrize(
    ("answer", "read", "dtype"),
    [
        (lambda y: {"out": y, "aux": None}, lambda outputs: outputs["out"], torch.float64),
        (lambda y: (y, [y.mean(1)]), lambda outputs: outputs[1][0], torch.float32),
        (lambda y: y.view(len(y), -1), lambda outputs: outputs, torch.float32),
        (lambda y: y, lambda outputs: outputs.view(len(outputs), -1), torch.float32),
    ],
    ids=["dict in float64", "nested", "view in the network", "view in the score"],
)
def test_what_a_network_returns_is_the_scores_affair(
    images: torch.Tensor, answer: Callable[..., Any], read: Callable[..., Any], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model, images = Answer(answer).eval().to(dtype), images.to(dtype)
    expected = read(model(images)).detach()

    def score(network: nn.Module) -> torch.Tensor:
        return -(read(network(images)) - expected).square().mean()

    found = rankrl.search(
        model,
        score=score,
        inputs=images,
        params=0.6,
        selector="greedy",
        decomposition=layer_options(candidates=3),
    )
    small = decomposition.apply_plan(model, found.plan, images)
    assert found.best.score < 0
    assert score(small) > 10 * found.best.score
    assert decomposition.count_parameters(small) <= 0.6 * decomposition.count_parameters(model)


def test_each_plan_is_scored_in_evaluation_mode(model: nn.Module, images: torch.Tensor) -> None:
    modes = []

    def score(network: nn.Module) -> float:
        modes.append(network.training)
        network.train()  # as many an evaluation loop leaves it
        return 0.5

    options: Any = {"inputs": images, "params": 0.5, "selector": "random", "candidates": 8}
    rankrl.search(model.train(), score=score, seed=1, **grouped(episodes=9, **options))
    assert len(modes) > 2
    assert not any(modes)
    assert model.training


def test_what_cannot_work_is_refused_before_layers_are_fitted(
    model: nn.Module, images: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit(*_: object) -> None:
        raise AssertionError("a layer was fitted")

    monkeypatch.setattr(decomposition.FitLibrary, "fit", fit)
    with pytest.raises(NonFiniteError):
        rankrl.search(model, score=lambda _: float("nan"), inputs=images, params=0.5)
    with pytest.raises(decomposition.DecompositionError, match="the least is"):
        rankrl.search(model, score=lambda _: 1.0, inputs=images, params=0.001)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"network": nn.Conv2d}, "takes a torch.nn.Module or the path of an ONNX file, got a type"),
        ({"score": 0.9}, "takes a score, a function from the network to a number; got a float"),
        ({"candidates": 0}, "candidates must be at least 1"),
        ({"inputs": [[[0.5], torch.zeros(4)]]}, "given as a list of float; pass a tensor"),
        ({"inputs": torch.zeros(4, 3, 12, 12, dtype=torch.uint8)}, r"in uint8; give .*float\(\) / 255"),
    ],
)
def test_arguments_of_another_kind_are_refused(
    model: nn.Module, images: torch.Tensor, change: dict[str, Any], message: str
) -> None:
    arguments = {"network": model, "score": lambda _: 1.0, "inputs": images, "params": 0.5} | change
    with pytest.raises((ConfigError, decomposition.DecompositionError), match=message):
        rankrl.search(**grouped(**arguments))
