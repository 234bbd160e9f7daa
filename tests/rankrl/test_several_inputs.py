"""`rankrl.search` and `rankrl.export_onnx` for networks whose inputs are no images."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from call_options import grouped, layer_options
from several_inputs import LENGTH, WORDS, TextClassifier, TwoInputs
from torch import nn

import decomposition
import rankrl
from decomposition.network.inputs import input_shape_of
from rankrl.errors import ConfigError, ExportError
from rankrl.onnx.export import verify_onnx
from rankrl.onnx.export.tracing import random_feed
from rankrl.plan_search.latency_budget import LatencyBudget
from rankrl.timing import measure_latency
from rankrl.timing.latency import RelativeTime

TOKENS = torch.randint(1, WORDS, (40, LENGTH), generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(40, 3, 8, 8, generator=torch.Generator().manual_seed(1))
NUMBERS = torch.randn(40, 5, generator=torch.Generator().manual_seed(2))
CASES: dict[str, tuple[type[nn.Module], Any]] = {
    "tokens": (TextClassifier, TOKENS),
    "tuple": (TwoInputs, (IMAGES, NUMBERS)),
    "dict": (TwoInputs, {"numbers": NUMBERS, "image": IMAGES}),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    kind, inputs = CASES[request.param]
    return kind().eval(), inputs


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the file of a case's network, written once."""

    @functools.cache
    def file_of(name: str) -> Path:
        torch.manual_seed(0)
        kind, inputs = CASES[name]
        path = tmp_path_factory.mktemp(name) / "model.onnx"
        return rankrl.export_onnx(kind().eval(), path, inputs).path

    return file_of


def outputs(network: nn.Module, inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        if isinstance(inputs, dict):
            return network(**inputs)
        return network(*inputs) if isinstance(inputs, tuple) else network(inputs)


def test_network_is_searched_and_exported(case: tuple[nn.Module, Any], tmp_path: Path) -> None:
    model, inputs = case
    expected = outputs(model, inputs)

    def score(network: nn.Module) -> float:
        return -float((outputs(network, inputs) - expected).square().mean())

    found = rankrl.search(
        model,
        score=score,
        inputs=inputs,
        params=0.7,
        selector="random",
        decomposition=layer_options(candidates=3),
        search=rankrl.SearchOptions(episodes=3, finalists=2),
    )
    small = decomposition.apply_plan(model, found.plan, inputs)
    assert decomposition.count_parameters(small) <= 0.7 * decomposition.count_parameters(model)
    rankrl.export_onnx(small, tmp_path / "small.onnx", inputs)
    assert verify_onnx(small, tmp_path / "small.onnx", inputs) < 1e-4


def test_file_takes_its_inputs_by_the_names_of_the_parameters(
    case: tuple[nn.Module, Any], exported: Callable[[str], Path], request: pytest.FixtureRequest
) -> None:
    model, inputs = case
    path = exported(request.node.callspec.params["case"])
    session = onnxruntime.InferenceSession(path)
    feed = {"image": IMAGES, "numbers": NUMBERS} if isinstance(model, TwoInputs) else {"tokens": TOKENS}
    assert {each.name for each in session.get_inputs()} == set(feed)
    for count in (1, 5):  # the batch is free
        some = {name: value[:count].numpy() for name, value in feed.items()}
        (found,) = session.run(None, some)
        np.testing.assert_allclose(found, outputs(model, inputs)[:count], atol=1e-5)
    assert measure_latency(path, batch=4, runs=2, inputs=random_feed(model, inputs, 4)).ms > 0


def test_weights_of_layers_over_sequences_keep_their_names(tmp_path: Path) -> None:
    model = TextClassifier().eval()
    graph = onnx.load(rankrl.export_onnx(model, tmp_path / "model.onnx", TOKENS).path).graph
    weights = {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}
    for name, layer in model.head.named_children():
        weight = layer.get_parameter("weight").detach().numpy()
        product = name != "last"  # behind the mean over the words it is a Gemm
        np.testing.assert_array_equal(weights[f"head.{name}.weight"], weight.T if product else weight)


def test_what_is_known_of_the_inputs_will_do_for_an_export(tmp_path: Path) -> None:
    model = TextClassifier().eval()
    plan = decomposition.make_plan(model, TOKENS, "cp", 4)
    small = decomposition.apply_plan(model, plan)
    rankrl.export_onnx(small, tmp_path / "small.onnx", plan.input_shape, dynamic_batch=False)
    assert verify_onnx(small, tmp_path / "small.onnx", TOKENS) < 1e-4


def test_file_of_another_network_is_noticed(
    case: tuple[nn.Module, Any], exported: Callable[[str], Path], request: pytest.FixtureRequest
) -> None:
    model, inputs = case
    path = exported(request.node.callspec.params["case"])
    torch.manual_seed(1)
    with pytest.raises(ExportError, match="differs from the PyTorch model"):
        verify_onnx(type(model)().eval(), path, inputs)


def test_channels_of_a_network_with_several_inputs_stay() -> None:
    with pytest.raises(ConfigError, match="networks with one input alone"):
        rankrl.search(
            TwoInputs(),
            score=lambda _: 1.0,
            inputs=(IMAGES, NUMBERS),
            params=0.7,
            decomposition=layer_options(channels=(0.5,)),
        )


def test_file_has_the_names_and_the_opset_that_are_asked_for(tmp_path: Path) -> None:
    result = rankrl.compress(
        TwoInputs().eval(),
        {"image": IMAGES, "numbers": NUMBERS},
        tmp_path,
        params=0.7,
        timing=rankrl.LatencyOptions(
            batch=2, runs=2, input_names=("picture", "known"), output_names=("answer",), opset=20
        ),
        progress=False,
    )
    session = onnxruntime.InferenceSession(result.path)
    assert [each.name for each in session.get_inputs()] == ["picture", "known"]
    assert (
        [each.name for each in session.get_outputs()] == [each.name for each in result.outputs] == ["answer"]
    )
    assert [each.version for each in onnx.load(result.path).opset_import if not each.domain] == [20]


@pytest.mark.slow
def test_budget_in_time(case: tuple[nn.Module, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = case
    measured = LatencyBudget.measured
    plans = []

    def quick(self: LatencyBudget, plan: decomposition.CompressionPlan) -> RelativeTime:
        assert measured(self, plan).share > 0
        plans.append(plan)
        return RelativeTime(0.9)  # so small a network gets no faster

    monkeypatch.setattr(LatencyBudget, "measured", quick)
    found = rankrl.search(
        model,
        score=lambda _: 1.0,
        inputs=inputs,
        latency=1.0,
        timing=rankrl.LatencyOptions(batch=8, runs=3),
        selector="random",
        decomposition=layer_options(candidates=3),
        search=rankrl.SearchOptions(episodes=2),
    )
    assert plans
    assert found.missed is None
    assert found.plan.input_shape == input_shape_of(inputs)


@pytest.mark.slow
def test_plans_are_scored_by_several_processes() -> None:
    model, calibration = TwoInputs().eval(), {"image": IMAGES, "numbers": NUMBERS}
    options: Any = {"inputs": calibration, "params": 0.7, "selector": "random", "episodes": 4}
    options |= {"decomposition": "tucker", "candidates": 3, "score": first_bias}
    apart = rankrl.search(model, selector_options={"plans_per_step": 2}, **grouped(workers=2, **options))
    alone = rankrl.search(model, selector_options={"plans_per_step": 2}, **grouped(**options))
    assert apart.plan == alone.plan


def first_bias(network: nn.Module) -> float:
    """A score that other processes can import."""
    return float(network.get_submodule("mix").weight.sum())  # type: ignore[arg-type, union-attr]
