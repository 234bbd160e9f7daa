"""Searching selectors on ONNX files, and plans of an earlier run."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from call_options import grouped
from small_graphs import convolutions, images, sentences, tokens

import rankrl
from decomposition import CompressionPlan, Factorise, PlanError
from rankrl.errors import ConfigError
from rankrl.networks.graph import GraphNetwork
from rankrl.networks.graph_scoring import OnnxPlanEvaluator
from rankrl.onnx.graph import OnnxNetwork, PreparedFile
from rankrl.operations import KeepChannels
from rankrl.options.timing import LatencyOptions
from rankrl.result import Compression

FITS: dict[str, Any] = {"final_iterations": 10, "timing": LatencyOptions(batch=2, runs=2)}
LITTLE: dict[str, Any] = {
    **FITS,
    "decomposition": "tucker",
    "candidates": 6,
    "iterations": 5,
    "params": 0.15,
    "selector": "random",
    "episodes": 6,
}


def run(folder: Path, /, target: str = "small.onnx", **options: Any) -> Compression:
    onnx.save(convolutions(), folder / "net.onnx")
    return rankrl.compress(
        folder / "net.onnx",
        images(100),
        folder / target,
        **grouped(**{**LITTLE, "finalists": 1, **options}),
    )


@pytest.fixture
def searched(tmp_path: Path) -> Callable[..., Compression]:
    return partial(run, tmp_path)


@pytest.fixture(scope="module")
def at_random(tmp_path_factory: pytest.TempPathFactory) -> Compression:
    return run(tmp_path_factory.mktemp("random"))


def test_divergences_are_measured_on_the_file(searched: Callable[..., Compression]) -> None:
    for score in (None, lambda _: 1.0):
        result = searched(selector="divergence", score=score)
        assert result.plan.chosen_by == "divergence"
        assert result.search is not None
        assert len(result.search.rows) == 1
        assert result.after["params"] <= 0.15 * result.before["params"]


@pytest.mark.parametrize("selector", ["random", "bayes", "ddpg"])
def test_the_best_of_the_scored_plans_is_carried_out(
    selector: str, searched: Callable[..., Compression], at_random: Compression
) -> None:
    result = at_random if selector == "random" else searched(selector=selector)
    assert result.search is not None
    rows = result.search.rows
    assert len(rows) == 6
    assert result.search.row.reward == max(row.reward for row in rows)
    assert result.plan == result.search.plan
    assert result.plan.chosen_by == selector
    assert result.after["params"] <= 0.15 * result.before["params"]
    assert all(row.params_kept <= 0.15 for row in rows)


def test_the_inputs_that_results_are_compared_on_choose_nothing(tmp_path: Path) -> None:
    onnx.save(convolutions(), tmp_path / "net.onnx")
    split = PreparedFile.read(tmp_path / "net.onnx", images(100), scored=0.2).split
    parts = [
        np.concatenate([feed["x"] for feed in each])
        for each in (split.calibration, split.scored, split.heldout)
    ]
    assert [len(each) for each in parts] == [60, 20, 20]
    assert len(np.unique(np.concatenate(parts), axis=0)) == 100


def test_plans_are_scored_on_inputs_of_their_own(at_random: Compression) -> None:
    assert at_random.search is not None
    assert at_random.search.best.score != 1 - at_random.outputs[0].error


def test_a_users_score_decides(searched: Callable[..., Compression]) -> None:
    given = {"x": images(20)}
    seen: list[float] = []

    def score(session: onnxruntime.InferenceSession) -> float:
        seen.append(float(session.run(None, given)[0][:, 0].mean()))
        return seen[-1]

    result = searched(score=score)
    assert result.search is not None
    assert {row.reward for row in result.search.rows} <= set(seen)
    assert result.search.best.reward == max(row.reward for row in result.search.rows)
    lowest = searched(score=lambda session: -score(session), target="lowest.onnx")
    assert lowest.search is not None
    assert -lowest.search.best.reward < result.search.best.reward


def test_a_search_that_was_killed_goes_on(
    searched: Callable[..., Compression],
    at_random: Compression,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    value, calls = OnnxPlanEvaluator.value, []

    def killed(self: OnnxPlanEvaluator, choices: Any) -> float:
        calls.append(choices)
        if len(calls) == 3:
            raise RuntimeError("killed")
        return value(self, choices)

    options: dict[str, Any] = {"folder": tmp_path / "run", "target": "again.onnx"}
    with monkeypatch.context() as patch:
        patch.setattr(OnnxPlanEvaluator, "value", killed)
        with pytest.raises(RuntimeError, match="killed"):
            searched(**options)
    monkeypatch.setattr(OnnxPlanEvaluator, "value", killed)
    resumed = searched(**options)
    assert resumed.path.read_bytes() == at_random.path.read_bytes()
    assert at_random.search is not None
    # None was scored twice but the one that was cut off.
    assert len(calls) <= 1 + at_random.search.evaluations
    assert (tmp_path / "run" / "episodes.csv").exists()


def test_finalists_are_carried_out_and_scored_again(
    searched: Callable[..., Compression], monkeypatch: pytest.MonkeyPatch
) -> None:
    applied: list[CompressionPlan] = []
    apply = GraphNetwork.applied

    def noted(network: GraphNetwork, plan: CompressionPlan, *rest: Any) -> OnnxNetwork:
        applied.append(plan)
        return apply(network, plan, *rest)

    monkeypatch.setattr(GraphNetwork, "applied", noted)
    result = searched(finalists=2, precisions=("float32", "int8"))
    assert result.search is not None
    assert 2 <= len(applied) <= 3  # the two best, and the first one beside them
    assert result.search.row in result.search.rows


@pytest.mark.parametrize("network", ["convolutions", "tokens"])
def test_a_plan_is_carried_out_as_in_the_run_that_made_it(network: str, tmp_path: Path) -> None:
    onnx.save(convolutions() if network == "convolutions" else tokens(), tmp_path / "net.onnx")
    inputs: Any = images(100) if network == "convolutions" else sentences(100)
    arguments = (tmp_path / "net.onnx", inputs)
    made = rankrl.compress(
        *arguments, tmp_path / "a.onnx", **grouped(**{**LITTLE, "params": 0.5, "selector": "greedy"})
    )
    made.plan.save(tmp_path / "plan.json")
    plan = CompressionPlan.load(tmp_path / "plan.json")
    applied = rankrl.apply_plan(arguments[0], plan, arguments[1], tmp_path / "b.onnx", **grouped(**FITS))
    assert applied.path.read_bytes() == made.path.read_bytes()
    assert applied.after == made.after
    assert applied.search is None


def test_plans_that_do_not_fit_are_refused(at_random: Compression, tmp_path: Path) -> None:
    onnx.save(convolutions(), tmp_path / "net.onnx")
    onnx.save(tokens(), tmp_path / "other.onnx")
    plan = at_random.plan

    def refused(plan: CompressionPlan, name: str = "net.onnx", inputs: Any = None) -> str:
        given = images(100) if inputs is None else inputs
        with pytest.raises((PlanError, ConfigError)) as error:
            rankrl.apply_plan(tmp_path / name, plan, given, tmp_path / "b.onnx", **grouped(**FITS))
        assert not (tmp_path / "b.onnx").exists()
        return str(error.value)

    def first(*operations: Any) -> CompressionPlan:
        return replace(plan, layers=(replace(plan["first"], operations=operations), *plan.layers[1:]))

    assert "made for another model" in refused(plan, "other.onnx", sentences(100))
    assert "says nothing of last" in refused(replace(plan, layers=plan.layers[:-1]))
    assert "'keep_channels' with 'first'" in refused(first(KeepChannels((0, 1))))
    assert "tensor_ring cannot be written" in refused(first(Factorise("tensor_ring", (1, 1, 1))))


def test_nodes_can_be_left_out(searched: Callable[..., Compression]) -> None:
    result = searched(skip=("first",), selector="greedy")
    assert "as asked" in result.untouched["first"]
    result = searched(only=("second",), selector="greedy", params=0.8)
    assert {layer.name for layer in result.plan if layer.operations} == {"second"}


@pytest.mark.parametrize("measure", ["bytes", "macs"])
def test_two_budgets_are_kept_at_once(measure: str, searched: Callable[..., Compression]) -> None:
    one = searched(params=0.8, selector="greedy")
    fraction = 0.8 * one.after[measure] / one.before[measure]
    both = searched(params=0.8, selector="greedy", **{measure: fraction})
    assert both.after["params"] <= 0.8 * both.before["params"]
    assert both.after[measure] <= fraction * both.before[measure]
    assert one.after[measure] > fraction * one.before[measure]
