"""Values that can be nothing but text reach the options as they were typed, within sweeps, too."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from rankrl.cli.config.composition import quoted, quoting_advice, readable_arguments
from rankrl.cli.config.overrides import check_overrides
from rankrl.errors import ConfigError

TEXTS = st.text(st.characters(categories=["L", "N", "P", "S", "Zs"]), min_size=1)
FILE_NAMES = st.text(st.sampled_from("abcü9=.-_#&;~/ éß@|"), min_size=1)


def values_of(argument: str) -> list[str]:
    """Return the values that Hydra reads in an override, each as a job of a sweep gets it."""
    parser = OverridesParser.create()
    override = parser.parse_override(argument)
    if not override.is_sweep_override():
        return [str(override.value())]
    values = override.sweep_string_iterator()
    return [str(parser.parse_override(f"{override.key_or_group}={value}").value()) for value in values]


@given(TEXTS)
def test_quoted_text_is_read_back_by_hydra_and_by_the_shell(text: str) -> None:
    assert values_of(quoted("a.b", text)) == [text]
    assert shlex.split(quoting_advice(f"a.b={text}")) == [quoted("a.b", text)]


@given(FILE_NAMES)
def test_file_names_are_read_as_they_are_typed(name: str) -> None:
    (argument,) = readable_arguments([f"model.checkpoint=runs/{name}x"])
    assert values_of(argument) == [f"runs/{name}x"]


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("model.checkpoint=epoch=3-val_loss=0.12.ckpt", ["epoch=3-val_loss=0.12.ckpt"]),
        ("model.checkpoint=a.pt,epoch=3.ckpt,jürgen.pt", ["a.pt", "epoch=3.ckpt", "jürgen.pt"]),
        ("hydra.run.dir=my runs/lr = 0.1", ["my runs/lr = 0.1"]),
        ("model.checkpoint=model (1).pt", ["model (1).pt"]),
        ("model.checkpoint=~/a.pt", [str(Path.home() / "a.pt")]),
        ("seed=1,2\r", ["1", "2"]),
        ("+model.note=a=b", ["a=b"]),
        (r"model.checkpoint=C:\runs\a.pt", [r"C:\runs\a.pt"]),
    ],
)
def test_what_is_typed_is_what_is_read(typed: str, read: list[str]) -> None:
    (argument,) = readable_arguments([typed])
    assert values_of(argument) == read


@pytest.mark.parametrize(
    "argument",
    [
        *("seed=1,2", "selector=glob(bayes*)", "seed=range(1,10)", "a={b: c=d}", "a=[b=c]", "a='b=c'"),
        *("a=choice(1,2", "a=[", "a=b=c,", "a=b=c,range(1,3)", "a=${b}=c", "~a=b=c", "nonsense"),
    ],
)
def test_what_has_a_meaning_of_its_own_is_left_to_hydra(argument: str) -> None:
    assert readable_arguments([argument]) == [argument]


def test_overrides_come_before_flags_whose_values_are_no_overrides() -> None:
    given_first = [
        "seed=1",
        "-m",
        "--config-dir",
        "runs/lr=0.1",
        "decomposition=cp",
        "--config-dir=a=b",
        "\r",
    ]
    assert readable_arguments(given_first) == [
        *("seed=1", "decomposition=cp"),
        *("-m", "--config-dir", "runs/lr=0.1", "--config-dir=a=b"),
    ]


def test_a_value_that_cannot_be_read_is_named_with_the_quotes_that_help() -> None:
    with pytest.raises(ConfigError, match=r"parsed at 'model\.checkpoint=a\[1\]=b\.pt'") as refused:
        check_overrides(["task=inspect", "model.checkpoint=a[1]=b.pt"])
    assert """ "model.checkpoint='a[1]=b.pt'",""" in str(refused.value)
    check_overrides(["task=inspect", *shlex.split("\"model.checkpoint='a[1]=b.pt'\"")])
