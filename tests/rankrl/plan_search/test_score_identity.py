"""A score is known by its source text, or by the `identity` that it is given."""

import functools
import importlib
import linecache
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from rankrl.plan_search.scores.evaluators import score_identity

MODULE = """
import functools
import torch

def plain(network):
    return {constant}

class Callable:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, network):
        return self.factor * {constant}

instance = Callable(1.0)
method = instance.__call__
partial = functools.partial(plain)

def called(score, seconds):
    return score

lambda_ = called(lambda network: sum(
    value + {constant} for value in (1, 2)
), seconds={seconds})
beside = called(lambda network: 2.0, {constant})

@functools.lru_cache
def cached(network):
    return {constant}

@torch.no_grad()
def decorated(network):
    return {constant}

def closed(weight):
    def score(network):
        return weight * {constant}
    return score

closure = closed(1.0)
"""
EDITED = ("plain", "instance", "method", "partial", "lambda_", "cached", "decorated", "closure")


@pytest.fixture
def identities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., dict[str, str]]]:
    """The identities of all scores of a module that is written with some values."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(head: str = "", constant: float = 0.5, seconds: int = 1) -> dict[str, str]:
        text = head + MODULE.format(constant=constant, seconds=seconds)
        (tmp_path / "scores_of_user.py").write_text(text)
        sys.modules.pop("scores_of_user", None)
        importlib.invalidate_caches()
        linecache.clearcache()  # two versions of equal length may be written within one tick of the clock
        module = importlib.import_module("scores_of_user")
        return {name: score_identity(getattr(module, name)) for name in (*EDITED, "beside")}

    yield write
    sys.modules.pop("scores_of_user", None)


def test_an_edit_changes_the_scores_in_whose_text_it_is_and_no_other(identities: Any, caplog: Any) -> None:
    before, after = identities(), identities(constant=0.25)
    assert {name for name in before if before[name] != after[name]} == set(EDITED)
    assert not caplog.messages


def test_what_is_around_a_score_does_not_matter(identities: Any) -> None:
    assert identities() == identities(head="# A comment.\n\n\nOTHER = 1\n", seconds=600)


def test_another_process_finds_the_same(identities: Any, tmp_path: Path) -> None:
    expected = identities()
    code = (
        "import scores_of_user as module\n"
        "from rankrl.plan_search.scores.evaluators import score_identity\n"
        f"for name in {tuple(expected)!r}: print(name, score_identity(getattr(module, name)))"
    )
    environment = {"PYTHONPATH": ":".join([str(tmp_path), *sys.path]), "OMP_NUM_THREADS": "1"}
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    ).stdout
    assert dict(line.split() for line in printed.splitlines()) == expected


def test_a_given_identity_decides_alone(caplog: pytest.LogCaptureFixture) -> None:
    def first(network: nn.Module) -> float:
        return 1.0

    def second(network: nn.Module) -> float:
        return 2.0

    assert score_identity(first) != score_identity(second)
    first.identity = second.identity = "accuracy, 2nd version"  # type: ignore[attr-defined]
    assert score_identity(first) == score_identity(second)
    second.identity = "accuracy, 3rd version"  # type: ignore[attr-defined]
    assert score_identity(first) != score_identity(second)
    assert not caplog.messages


def test_scores_on_one_line_are_told_apart() -> None:
    one, two = (lambda network: 1.0), (lambda network: 2.0)  # fmt: skip
    assert score_identity(one) != score_identity(two)


def test_a_score_of_a_notebook_is_known_by_its_text() -> None:
    def cell(constant: float) -> str:
        source, name = f"score = lambda network: {constant}", f"<ipython-{constant}>"
        linecache.cache[name] = len(source), None, [source + "\n"], name
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(source, name, "exec"), names)
        return score_identity(names["score"])

    assert cell(1.0) == cell(1.0) != cell(2.0)


@pytest.mark.parametrize(
    "score",
    [open, np.ma.masked, np.add, torch.relu, torch.ops.aten.add, functools.partial(max, 1), Mock()],
    ids=lambda score: type(score).__name__,
)
def test_a_score_without_source_counts_by_its_name_and_says_what_to_do(
    score: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert score_identity(score) == score_identity(score)
    assert all("Give it an attribute `identity`" in message for message in caplog.messages)


def test_a_function_typed_at_the_prompt_is_named(caplog: pytest.LogCaptureFixture) -> None:
    names: dict[str, Any] = {"__name__": "nowhere"}
    exec("def score(network): return 1.0", names)
    score_identity(names["score"])
    (message,) = caplog.messages
    assert "the score nowhere.score has no source text" in message
