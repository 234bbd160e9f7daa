"""Arguments of the wrong type are refused with what to write, before anything else is looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rankrl
from rankrl.errors import ConfigError
from rankrl.option_types import check_arguments


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        (
            "params",
            "half",
            "params must be a number or None, got 'half'; write a fraction, such as params=0.5.",
        ),
        ("params", True, "params must be a number or None, got True."),
        ("macs", [0.5], r"macs must be a number or None, got \[0.5\]."),
        (
            "timing",
            {},
            r"timing must be LatencyOptions or None, got {}; write timing=rankrl.LatencyOptions\(\).",
        ),
        ("timing", {"batch": 1}, r"got {'batch': 1}; write timing=rankrl.LatencyOptions\(batch=1\)."),
        ("decomposition", 3, "decomposition must be text or a list of names or DecompositionOptions or None"),
        ("selector_options", ["a"], r"selector_options must be a dict or None, got \['a'\]."),
        ("cache", 3, "cache must be text or a path or None, got 3."),
        ("progress", "bar", "progress must be .*a function.*, got 'bar'."),
        ("seed", None, "seed must be a whole number, got None."),
    ],
)
def test_other_types_are_refused_by_compress_and_search(argument: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rankrl.compress(nn.ReLU(), torch.zeros(4, 3), "never", **{"params": 0.5, argument: value})
    if argument != "cache":
        with pytest.raises(ConfigError, match=message):
            rankrl.search(nn.ReLU(), None, score=len, **{"params": 0.5, argument: value})  # type: ignore[arg-type]
    assert not Path("never").exists()


@pytest.mark.parametrize(("argument", "value"), [("target", 3), ("score", 0.5), ("loss", "mse")])
def test_other_types_are_refused_by_compress(argument: str, value: Any) -> None:
    arguments: dict[str, Any] = {"target": "never", argument: value}
    with pytest.raises(ConfigError, match=f"{argument} must be "):
        rankrl.compress(nn.ReLU(), torch.zeros(4, 3), **arguments)


def test_other_types_are_refused_of_files() -> None:
    with pytest.raises(ConfigError, match="latency must be a number or None"):
        rankrl.compress("never.onnx", [], "small.onnx", latency="fast")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "field", "value", "message"),
    [
        (
            rankrl.DecompositionOptions,
            "skip",
            "fc",
            r"must be a list of names, got 'fc'; write skip=\['fc'\].",
        ),
        (
            rankrl.DecompositionOptions,
            "channels",
            0.5,
            r"a list of numbers, got 0.5; write channels=\[0.5\].",
        ),
        (rankrl.DecompositionOptions, "precisions", "int8", r"got 'int8'; write precisions=\['int8'\]."),
        (rankrl.DecompositionOptions, "blocks", "yes", "must be True or False, got 'yes'."),
        (rankrl.DecompositionOptions, "rank_multiple", 1.5, "must be a whole number or None, got 1.5."),
        (rankrl.DecompositionOptions, "final_iterations", "many", "must be a whole number, got 'many'"),
        (rankrl.SearchOptions, "episodes", 10.5, r"must be a whole number, got 10\.5."),
        (rankrl.SearchOptions, "cluster", "rai", "one of 'local', 'ray', got 'rai'. Did you mean 'ray'"),
    ],
)
def test_fields_of_options_have_types_too(options: Any, field: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        options(**{field: value})
    assert str(refusal.value).startswith(f"{field} must be ")
    assert rankrl.DecompositionOptions(skip=["fc"]).skip == ("fc",)  # type: ignore[arg-type]


def test_what_is_as_good_is_accepted() -> None:
    def function(
        number: float, count: int, names: list[str] | None, path: str | Path, **others: Any
    ) -> None: ...

    def values(**changed: Any) -> dict[str, Any]:
        return {"number": 1, "count": 2, "names": None, "path": "a", "others": {}} | changed

    for changed in (
        {"number": np.float32(0.5)},
        {"count": np.int64(3)},
        {"path": Path("a")},
        {"names": ["a"]},
    ):
        check_arguments(function, values(**changed), without=("others",))
    with pytest.raises(ConfigError, match=r"count must be a whole number, got 2\.0"):
        check_arguments(function, values(count=2.0), without=("others",))
