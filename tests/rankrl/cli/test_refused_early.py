"""What can be refused is refused before work begins: before data are read, or before anything is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from call_options import grouped
from command_line import task_refusal, values
from torch import nn

import rankrl
from decomposition import DecompositionError
from rankrl.cli.config.overrides import check_values
from rankrl.errors import ConfigError, DataError

Refused = Callable[..., str]


def _begun(*_: object, **__: object) -> Any:
    raise AssertionError("work has begun")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("search.episodes=0",), "search.episodes must be positive, got 0"),
        (("search.seconds=0",), "search.seconds must be positive, got 0.0; null means no limit"),
        (("search.patience=-1",), "search.patience must be positive"),
        (("search.workers=0",), "search.workers"),
        (("decomposition.format=foo",), "there is no tensor format 'foo'; choose from cp, "),
        (("decomposition.format=tuker",), "Did you mean 'tucker'?"),
        (("decomposition=auto", "decomposition.formats=[cp,tt]"), "there is no tensor format 'tt'"),
        (("decomposition.candidates=0",), "decomposition.candidates must be at least 1"),
        (("calibration.images=0",), "calibration.images must be at least 1"),
        (("budget.params=0.5", "budget.macs=0.5", "budget.bytes=0.5"), "at most two budgets"),
        (
            ("budget.params=0.5", "budget.macs=0.5", "selector=ddpg", "selector.action=rank"),
            "selector.action=rank keeps one budget, and budget.params and budget.macs are set",
        ),
        (
            ("selector=bayes", "selector.action=rank", "decomposition.channels=[0.5]"),
            "with decomposition.channels or decomposition.blocks what a layer costs depends on the next one",
        ),
        (
            ("selector=ddpg", "selector.action=rank", "budget.latency=0.5"),
            "between integers and floating point takes of budget.latency depends on the next one",
        ),
        (("selector=tpe", "reward=weighted"), "spends a budget and there is none"),
        (("selector=local", "reward=weighted"), "spends a budget and there is none"),
        (("selector=bayes", "selector.action=importance", "reward=amc"), "spends a budget and there is none"),
        (
            ("task=compare", "compare.selectors=[local,random]", "reward=weighted"),
            "spends a budget and there is none",
        ),
        (
            ("task=compare", "compare.selectors=[local,divergence]", "search.workers=2"),
            "'divergence' measures on images in this process: it goes neither with search.workers",
        ),
    ],
)
def test_options_are_refused_before_data_are_read(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], expected: str
) -> None:
    monkeypatch.setattr("rankrl.cli.config.options.load_dataset", _begun)
    monkeypatch.setattr("rankrl.cli.config.options.suited_multiple", _begun)
    assert expected in task_refusal(*arguments)


def test_a_run_is_refused_before_data_are_read(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankrl.cli.config.options.load_dataset", _begun)
    assert "search.finalists must be at least 1" in refused("search.finalists=0")


@pytest.mark.parametrize(
    "arguments",
    [
        ("task=search", "finetune.epochs=0"),  # of a fine-tuning that it leaves out anyway
        ("task=train", "train.optim.name=onnx_adam"),  # for which the options of the default, sgd, are none
        ("task=train", "train.optim.name='onnx_adagrad'", "+train.optim.options.epsilon=1e-5"),
    ],
)
def test_what_is_fine_gets_as_far_as_the_data(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    def read(*_: object, **__: object) -> None:
        raise DataError("the data are read")

    monkeypatch.setattr("rankrl.cli.config.options.load_dataset", read)
    assert "the data are read" in task_refusal(*arguments)


def test_options_of_another_optimizer_are_refused_where_they_are_given() -> None:
    given = ("train.optim.name=onnx_adam", "+train.optim.options.momentum=0.9")
    with pytest.raises(ConfigError, match="'onnx_adam' has no option 'momentum'"):
        check_values(values("task=train", *given))


@pytest.mark.parametrize("budget", ["budget.params=0.0001", "budget.macs=0.0001", "budget.bytes=0.0001"])
def test_an_unreachable_budget_is_refused_before_the_network_is_trained(
    monkeypatch: pytest.MonkeyPatch, budget: str
) -> None:
    monkeypatch.setattr("rankrl.cli.tasks.steps.run_training", _begun)
    assert "the least is 0." in task_refusal("model=conv4", budget)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"selector": "ddgp"}, "Did you mean 'ddpg'?"),
        ({"episodes": 0}, "search.episodes must be positive"),
        ({"macs": 0.5, "selector": "ddpg", "selector_options": {"action": "rank"}}, "keeps one budget"),
        ({"decomposition": "tt"}, "there is no format 'tt'"),
        ({"params": 1e-5}, "the least is 0."),
        ({"skip": ["3"]}, "skip: no layer matches '3'; the layers are 0, 2."),
        ({"skip": ["0"], "params": 0.2}, "the least is 0."),
        ({"only": ["fc"]}, "only: no layer matches 'fc'; the layers are 0, 2."),
        ({"only": ["2"], "skip": ["2"]}, "the network has no layer that can be decomposed"),
        ({"selector": "bayes", "selector_options": {"candidats": 1}}, "Did you mean 'candidates'?"),
    ],
)
def test_a_search_from_python_is_refused_before_it_calibrates(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], expected: str
) -> None:
    monkeypatch.setattr("decomposition.choose.library.collect_moments", _begun)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    with pytest.raises((ConfigError, DecompositionError)) as refusal:
        rankrl.search(
            model,
            score=lambda network: 0.0,
            inputs=torch.zeros(4, 3, 8, 8),
            **grouped(**{"params": 0.5, **options}),
        )
    assert expected in str(refusal.value)
