"""What an option may be is read from annotations, and said in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from command_line import values
from hypothesis import given
from hypothesis import strategies as st

from rankrl.cli.config.choices import config_folder
from rankrl.cli.config.overrides import check_values
from rankrl.errors import ConfigError
from rankrl.option_types import check_option, check_options, described, parameter_types

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
