"""Two scores are one when their source and what it names are: comments, lines and addresses do not matter."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import inspect
import linecache
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rankrl.data import load_dataset
from rankrl.plan_search.scores.evaluators import score_identity

MODULE = '''
"""{docstring}"""
import functools
import math
import torch
import helpers_of_score as helpers
from helpers_of_score import measure

WEIGHT = {weight}

def inner(value):
    return value * WEIGHT

def plain(network):
    """{docstring}"""
    return inner(1.0) + {constant}

def chosen(network):
    return 1.0 if network in {{"alpha", "beta", "gamma", "delta"}} else 0.0

def through_module(network):
    return helpers.measure(network)

def through_import(network):
    return sum(measure(network) for _ in range(2))

def with_default(network, factor={constant}):
    return factor

class Callable:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, network):
        return self.value() * self.factor

    def value(self):
        return {constant}

instance = Callable({weight})
method = Callable(1.0).__call__
partial = functools.partial(with_default, factor={weight})
lambda_ = lambda network: inner(2.0) + {constant}

@functools.lru_cache
def cached(network):
    return {constant}

@torch.no_grad()
def decorated(network):
    return {constant}

def recursive(network, depth=3):
    return 0.0 if depth == 0 else recursive(network, depth - 1) + {constant}

def closed():
    data = torch.full((3,), {constant})
    expected = {{"a": [data, (None, {weight})]}}
    return lambda network: float(data.sum()) + len(expected)

closure = closed()
'''
HELPERS = "def measure(network):\n    return deeper(network)\n\ndef deeper(network):\n    return {measured}\n"
NAMES = (
    *("plain", "chosen", "through_module", "through_import", "with_default", "instance", "method"),
    *("partial", "lambda_", "cached", "decorated", "recursive", "closure"),
)
BEFORE = {"docstring": "Text.", "weight": 1.0, "constant": 0.5, "measured": 1.0}


@pytest.fixture
def identities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The identities of all scores of a module that is written with some values."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(head: str = "", **changes: Any) -> dict[str, str]:
        values = {**BEFORE, **changes}
        (tmp_path / "scores_of_user.py").write_text(head + MODULE.format(**values))
        (tmp_path / "helpers_of_score.py").write_text(HELPERS.format(**values))
        for name in ("scores_of_user", "helpers_of_score"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        sys.dont_write_bytecode = True
        module = importlib.import_module("scores_of_user")
        return {name: score_identity(getattr(module, name)) for name in NAMES}

    written = sys.dont_write_bytecode
    yield write
    sys.dont_write_bytecode = written
    for name in ("scores_of_user", "helpers_of_score"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("change", "affected"),
    [
        ({"constant": 0.25}, {*NAMES} - {"chosen", "through_module", "through_import"}),
        ({"weight": 2.0}, {"plain", "instance", "partial", "lambda_", "closure"}),
        ({"measured": 2.0}, {"through_module", "through_import"}),
    ],
)
def test_an_edit_changes_the_scores_that_it_reaches_and_no_other(
    identities: Any, change: dict[str, Any], affected: set[str]
) -> None:
    before, after = identities(), identities(**change)
    assert {name for name in NAMES if before[name] != after[name]} == affected


def test_lines_comments_and_docstrings_do_not_matter(identities: Any) -> None:
    assert identities() == identities(head="# A comment.\n\n\n", docstring="Other words.")


@pytest.mark.parametrize("seed", ["0", *(pytest.param(seed, marks=pytest.mark.slow) for seed in ("1", "2"))])
def test_another_process_finds_the_same(identities: Any, tmp_path: Path, seed: str) -> None:
    expected = identities()
    code = (
        "import scores_of_user as module\n"
        "from rankrl.plan_search.scores.evaluators import score_identity\n"
        f"for name in {NAMES!r}: print(name, score_identity(getattr(module, name)))"
    )
    environment = {
        "PYTHONHASHSEED": seed,
        "PYTHONPATH": ":".join([str(tmp_path), *sys.path]),
        "OMP_NUM_THREADS": "1",
    }
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    ).stdout
    assert dict(line.split() for line in printed.splitlines()) == expected


def identity_over(data: Any) -> str:
    def score(network: nn.Module) -> float:
        return float(len(data))

    return score_identity(score)


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(3, 2)


@dataclasses.dataclass
class Settings:
    """A user's own settings, with a default and a factory."""

    factor: float = 1.0
    weights: list[float] = dataclasses.field(default_factory=list)


@pytest.mark.parametrize(
    ("make", "other"),
    [
        (lambda: torch.arange(5), lambda: torch.arange(5.0)),
        (lambda: torch.zeros(2, 3, dtype=torch.bfloat16), lambda: torch.zeros(3, 2, dtype=torch.bfloat16)),
        (lambda: np.arange(4), lambda: np.arange(4) + 1),
        (lambda: np.random.default_rng(0), lambda: np.random.default_rng(1)),
        (lambda: network(0), lambda: network(1)),
        (lambda: network(0).train(), lambda: network(0).double().eval()),
        (lambda: TensorDataset(torch.ones(4, 1)), lambda: TensorDataset(torch.zeros(4, 1))),
        (
            lambda: DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=2),
            lambda: DataLoader(TensorDataset(torch.ones(4, 1) + 1), batch_size=2),
        ),
        (lambda: {"b": 1, "a": {3, 1, 2}}, lambda: {"b": 1, "a": {3, 1, 4}}),
        (lambda: [[1], 2], lambda: [[1, 2]]),
        (lambda: Path("a"), lambda: Path("b")),
        (lambda: re.compile("a"), lambda: re.compile("b")),
        (lambda: torch.float32, lambda: torch.float64),
        (lambda: functools.partial(max, 1), lambda: functools.partial(max, 2)),
        (lambda: argparse.Namespace(factor=1.0), lambda: argparse.Namespace(factor=2.0)),
        (lambda: Settings(), lambda: Settings(3.0)),
        (lambda: True, lambda: 1),
    ],
)
def test_what_a_score_holds_is_compared_by_value(make: Any, other: Any, caplog: Any) -> None:
    assert identity_over(make()) == identity_over(make()) != identity_over(other())
    assert not caplog.messages


def test_datasets_are_compared_by_value(caplog: Any) -> None:
    data = load_dataset("digits")
    other = dataclasses.replace(data, mean=(0.25,))
    assert identity_over(data) == identity_over(load_dataset("digits")) != identity_over(other)
    assert not caplog.messages


def test_a_loader_that_was_read_is_the_same() -> None:
    loader = DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=2)
    before = identity_over(loader)
    assert len(list(loader)) == 2
    assert identity_over(loader) == before


def test_what_holds_itself_comes_to_an_end() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    assert identity_over(loop) == identity_over(loop)


def test_scores_on_one_line_are_told_apart() -> None:
    one, two = (lambda network: 1.0), (lambda network: 2.0)  # fmt: skip
    assert score_identity(one) != score_identity(two)


def test_what_cannot_be_read_is_named_with_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    identity_over([1, torch.relu, np.linalg.norm])  # nobody edits what is installed between two runs
    assert not caplog.messages
    identity_over(item for item in "ab")
    namespace: dict[str, Any] = {"__name__": "nowhere"}
    exec("def score(network): return 1.0", namespace)
    score_identity(namespace["score"])
    assert [re.search(r"alone: (\S+)\. .*attribute `identity`", each)[1] for each in caplog.messages] == [  # type: ignore[index]
        "builtins.generator",
        "nowhere.score",
    ]


def test_a_given_identity_decides_alone(caplog: pytest.LogCaptureFixture) -> None:
    def make(value: Any, identity: str) -> Any:
        def score(network: nn.Module) -> Any:
            return value

        score.identity = identity  # type: ignore[attr-defined]
        return score

    first = score_identity(make(1.0, "accuracy, 2nd version"))
    assert score_identity(make(iter([2.0]), "accuracy, 2nd version")) == first
    assert score_identity(make(1.0, "accuracy, 3rd version")) != first
    assert not caplog.messages


def test_functions_that_name_one_another_in_a_long_chain_are_followed(caplog: Any) -> None:
    def chain(last: str) -> Any:
        names = {"__name__": "nowhere"}
        source = "".join(f"def f{i}(network): return f{i + 1}(network)\n" for i in range(600))
        source += f"def f600(network): return {last}\n"
        linecache.cache[last] = len(source), None, source.splitlines(keepends=True), last
        exec(compile(source, last, "exec"), names)
        return score_identity(names["f0"])  # type: ignore[arg-type]

    assert chain("1.0") == chain("1.0") != chain("2.0")
    assert not caplog.messages


class Refusing:
    """A user's object whose attributes cannot be read."""

    __slots__ = ("data",)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name} before it is connected")


@pytest.mark.parametrize(
    "held",
    [
        Refusing(),
        np.ma.masked,
        torch.eye(3).to_sparse(),
        torch.empty(2, device="meta"),
        torch.ops.aten,
        torch.nn.functional.conv2d,
        sys.modules["torch._C"],
        Mock(),
        open,
    ],
    ids=lambda held: type(held).__name__,
)
def test_no_object_is_an_error(held: Any) -> None:
    assert identity_over(held) == identity_over(held)


def test_a_score_of_a_notebook_is_followed() -> None:
    def cell(weight: float) -> Any:
        source, name = "score = lambda network: float(torch.ones(1)) * WEIGHT", f"<ipython-{weight}>"
        linecache.cache[name] = len(source), None, [source + "\n"], name
        names: dict[str, Any] = {"__name__": "__main__", "WEIGHT": weight, "torch": torch}
        exec(compile(source, name, "exec"), names)
        assert inspect.getsource(names["score"])
        return score_identity(names["score"])

    assert cell(1.0) == cell(1.0) != cell(2.0)


def test_a_partial_over_a_network_is_its_weights() -> None:
    def distance(other: nn.Module, network: nn.Module) -> float:
        return float((other(torch.ones(1, 3)) - network(torch.ones(1, 3))).square().mean())

    identities = [score_identity(functools.partial(distance, network(seed))) for seed in (0, 0, 1)]
    assert identities[0] == identities[1] != identities[2]
