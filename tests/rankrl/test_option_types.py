"""What an option may be is read from annotations, and said in words."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from command_line import values
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import rankrl
from rankrl.cli.config.checks import check_values
from rankrl.cli.config.schema import config_folder
from rankrl.errors import ConfigError
from rankrl.option_types import check_arguments, check_option, check_options, described, parameter_types

CHOICES = sorted(
    (path.parent.name, path.stem)
    for path in config_folder().glob("*/*.yaml")
    if path.parent.name not in ("experiment", "hydra")
)
NEEDED = {
    "custom": ("model._target_=a.b",),
    "torchvision": ("model.name=resnet18",),
    "imagefolder": ("dataset.path=folder",),
    "npz": ("dataset.path=file.npz",),
}


@pytest.mark.parametrize(("group", "choice"), CHOICES, ids=lambda each: str(each))
def test_the_files_of_the_configuration_hold_what_is_allowed(group: str, choice: str) -> None:
    check_values(values(f"{group}={choice}", *NEEDED.get(choice, ())))


@pytest.mark.parametrize(
    ("wanted", "words", "right", "wrong"),
    [
        (int, "a whole number", [3, -1], [True, 1.5, "3", None, [3]]),
        (float, "a number", [3, 1.5], [True, "1.5", None]),
        (bool, "true or false", [True], [1, "true", None]),
        (str, "text", ["a"], [1, True, None, ["a"]]),
        (str | Path, "text", ["a", Path("a")], [1]),
        (bool | None, "true, false or null", [None, True], [0]),
        (int | None, "a whole number or null", [None, 0], [0.5]),
        (tuple[int, ...], "a list of whole numbers", [[], [1], (1, 2)], [[1.5], "12", 3, {"a": 1}]),
        (tuple[float, float], "a list of 2 numbers", [[1, 2.5]], [[1], [1, 2, 3]]),
        (Sequence[float] | None, "a list of numbers or null", [[0.5], None], [0.5]),
        (Mapping[str, float], "a mapping from names to numbers", [{}, {"a": 1}], [{"a": "b"}, [1]]),
        (dict[str, Any], "a mapping", [{"a": [1]}], [[1]]),
        (Literal["a", "b"] | None, "one of a, b or null", ["a", None], ["c", 1]),
        (tuple[Literal["a", "b"], ...], "a list of one of a, b", [["a", "b"]], [["c"]]),
        (Any, "anything", [None, 1, [{}]], []),
    ],
)
def test_annotations_are_said_and_checked(
    wanted: Any, words: str, right: list[Any], wrong: list[Any]
) -> None:
    assert described(wanted) == words
    for value in right:
        check_option("group.option", value, wanted)
    for value in wrong:
        with pytest.raises(ConfigError, match=r"group\.option must be "):
            check_option("group.option", value, wanted)


@given(
    st.recursive(
        st.sampled_from([float("nan"), float("inf"), -float("inf")]),
        lambda inner: st.lists(inner, min_size=1) | st.dictionaries(st.sampled_from("ab"), inner, min_size=1),
    )
)
def test_nothing_that_is_not_finite_hides_anywhere(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"model\.width must be finite"):
        check_option("model.width", value, Any)


def test_text_that_looks_like_a_number_is_told_how_to_be_quoted() -> None:
    with pytest.raises(ConfigError, match=r"quote it twice: \"'7'\""):
        check_option("plan", 7, str | None)


def test_unknown_options_are_told_the_nearest() -> None:
    def function(first: int, *, second: str = "", **others: float) -> None: ...

    types = parameter_types(function, without=("first",))
    assert types == {"second": str}
    with pytest.raises(
        ConfigError, match=r"the owner has no option 'secnd'; it has second\. Did you mean 'second'"
    ):
        check_options("the owner", "group", {"secnd": "a"}, types)


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
