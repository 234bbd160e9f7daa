"""Two scores are one when their code and what it reaches are: names, lines and addresses do not matter."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import math
import re
import shutil
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
from rankrl.plan_search.scores.installed import is_installed
from rankrl.plan_search.scores.score_fingerprint import ScoreFingerprint

MODULE = '''
"""{docstring}"""
import functools
import math
import torch
import helpers_of_score as helpers

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
    from helpers_of_score import measure
    return measure(network)

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
    *(
        "plain",
        "chosen",
        "through_module",
        "through_import",
        "with_default",
        "instance",
        "method",
        "partial",
        "lambda_",
        "cached",
    ),
    *("recursive", "closure"),
)
BEFORE = {"docstring": "Text.", "weight": 1.0, "constant": 0.5, "measured": 1.0}


@pytest.fixture
def fingerprints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The fingerprints of all scores of a module that is written with some values."""
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
        return {name: ScoreFingerprint.of(getattr(module, name)).digest for name in NAMES}

    written = sys.dont_write_bytecode
    yield write
    sys.dont_write_bytecode = written
    for name in ("scores_of_user", "helpers_of_score"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("change", "affected"),
    [
        (
            {"constant": 0.25},
            {
                "plain",
                "with_default",
                "instance",
                "method",
                "lambda_",
                "cached",
                "recursive",
                "partial",
                "closure",
            },
        ),
        ({"weight": 2.0}, {"plain", "instance", "partial", "lambda_", "closure"}),
        ({"measured": 2.0}, {"through_module", "through_import"}),
    ],
)
def test_an_edit_changes_the_scores_that_it_reaches_and_no_other(
    fingerprints: Any, change: dict[str, Any], affected: set[str]
) -> None:
    before, after = fingerprints(), fingerprints(**change)
    assert {name for name in NAMES if before[name] != after[name]} == affected


def test_lines_comments_and_docstrings_do_not_matter(fingerprints: Any) -> None:
    assert fingerprints() == fingerprints(head="# A comment.\n\n\n", docstring="Other words.")


@pytest.mark.parametrize("seed", ["0", *(pytest.param(seed, marks=pytest.mark.slow) for seed in ("1", "2"))])
def test_another_process_finds_the_same(fingerprints: Any, tmp_path: Path, seed: str) -> None:
    expected = fingerprints()
    code = (
        "import scores_of_user as module\n"
        "from rankrl.plan_search.scores.score_fingerprint import ScoreFingerprint\n"
        f"for name in {NAMES!r}: print(name, ScoreFingerprint.of(getattr(module, name)).digest)"
    )
    environment = {
        "PYTHONHASHSEED": seed,
        "PYTHONPATH": ":".join([str(tmp_path), *sys.path]),
        "OMP_NUM_THREADS": "1",
    }
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert dict(line.split() for line in found.stdout.splitlines()) == expected


def score_of(data: Any) -> ScoreFingerprint:
    def score(network: nn.Module) -> float:
        return float(len(data))

    return ScoreFingerprint.of(score)


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(3, 2)


@pytest.mark.parametrize(
    ("make", "other"),
    [
        (lambda: torch.arange(5), lambda: torch.arange(5.0)),
        (lambda: torch.zeros(2, 3, dtype=torch.bfloat16), lambda: torch.zeros(3, 2, dtype=torch.bfloat16)),
        (lambda: np.arange(4), lambda: np.arange(4) + 1),
        (lambda: network(0), lambda: network(1)),
        (lambda: TensorDataset(torch.ones(4, 1)), lambda: TensorDataset(torch.zeros(4, 1))),
        (
            lambda: DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=2),
            lambda: DataLoader(TensorDataset(torch.ones(4, 1) + 1), batch_size=2),
        ),
        (lambda: {"b": 1, "a": {3, 1, 2}}, lambda: {"b": 1, "a": {3, 1, 4}}),
        (lambda: Path("a"), lambda: Path("b")),
        (lambda: torch.float32, lambda: torch.float64),
        (lambda: functools.partial(max, 1), lambda: functools.partial(max, 2)),
        (lambda: True, lambda: 1),
    ],
)
def test_what_a_score_holds_is_compared_by_value(make: Any, other: Any) -> None:
    assert score_of(make()).digest == score_of(make()).digest != score_of(other()).digest


def test_what_holds_itself_comes_to_an_end() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    assert score_of(loop).digest == score_of(loop).digest


def test_what_cannot_be_looked_into_is_named() -> None:
    assert score_of([1, 2]).opaque == ()
    assert score_of([math.sqrt, torch.relu]).opaque == ()  # nobody edits these between two runs
    assert ScoreFingerprint.of(math.sqrt).opaque == ("math.sqrt",)
    assert score_of(iter([1])).opaque == ("builtins.list_iterator",)
    compiled = ScoreFingerprint.of(importlib.import_module("operator").itemgetter(0))
    assert compiled.opaque == ("operator.itemgetter",)


def test_what_is_nested_without_end_is_named_and_no_error() -> None:
    chain: Any = None
    for _ in range(100_000):
        chain = [chain]
    found = score_of(chain)
    assert found.opaque == ("builtins.list (nested too deeply)",)
    assert found.digest == score_of(chain).digest
    short: Any = 1
    for _ in range(500):
        short = {"next": short}
    assert score_of(short).opaque == ()


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
        re.compile("a"),
    ],
    ids=lambda held: type(held).__name__,
)
def test_no_object_is_an_error(held: Any) -> None:
    assert score_of(held).digest == score_of(held).digest


def test_a_score_of_a_notebook_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    def cell(weight: float) -> Any:
        names: dict[str, Any] = {"__name__": "__main__", "WEIGHT": weight, "torch": torch}
        exec("score = lambda network: float(torch.ones(1)) * WEIGHT", names)
        return ScoreFingerprint.of(names["score"]).digest

    assert cell(1.0) == cell(1.0) != cell(2.0)


def test_a_partial_over_a_network_is_its_weights() -> None:
    def distance(other: nn.Module, network: nn.Module) -> float:
        return float((other(torch.ones(1, 3)) - network(torch.ones(1, 3))).square().mean())

    digests = [ScoreFingerprint.of(functools.partial(distance, network(seed))).digest for seed in (0, 0, 1)]
    assert digests[0] == digests[1] != digests[2]


PLACES = {
    "user": "home/.local/lib/python3.11/site-packages",
    "debian": "usr/lib/python3/dist-packages",
    "target": "vendored",
    "zipped": "packages.zip",
    "own": "project",
}


@pytest.mark.parametrize("place", PLACES)
def test_packages_count_by_version_wherever_they_are_installed(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest(constant: int, version: str) -> str:
        root = tmp_path / f"{constant}-{version}" / PLACES[place]
        files = {"measuring/__init__.py": f"__version__ = '{version}'\n\ndef measure(n): return {constant}\n"}
        if place in ("target", "zipped"):
            files["measuring-1.dist-info/METADATA"] = "Metadata-Version: 2.1\nName: measuring\nVersion: 1\n"
            files["measuring-1.dist-info/RECORD"] = "measuring/__init__.py,,\n"
        if place == "own":  # what an editable installation leaves beside the sources
            files["measuring.egg-info/PKG-INFO"] = "Metadata-Version: 2.1\nName: measuring\nVersion: 1\n"
            files["measuring.egg-info/SOURCES.txt"] = "measuring/__init__.py\n"
        for name, content in files.items():
            path = (root.with_suffix("") if place == "zipped" else root) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        if place == "zipped":
            shutil.make_archive(str(root.with_suffix("")), "zip", root.with_suffix(""))
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(root))
            patch.delitem(sys.modules, "measuring", raising=False)
            measuring = importlib.import_module("measuring")
            is_installed.cache_clear()
            return ScoreFingerprint.of(lambda network: measuring.measure(network)).digest

    before = digest(1, "1.0")
    assert digest(1, "1.0") == before
    assert digest(1, "2.0") != before or place == "own"
    assert (digest(2, "1.0") != before) == (place == "own")


def test_a_file_of_the_user_may_be_named_as_one_of_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "this.py").write_text("def measure(n): return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "this", raising=False)
    importlib.import_module("this")
    is_installed.cache_clear()
    assert not is_installed("this")
    assert is_installed("json.decoder")
    assert is_installed("torch._C._nn")
    is_installed.cache_clear()


@dataclasses.dataclass
class Settings:
    """A user's own settings, with a default and a factory."""

    factor: float = 1.0
    weights: list[float] = dataclasses.field(default_factory=list)


def test_datasets_and_settings_are_looked_into() -> None:
    def score_of(data: Any, options: Any) -> Any:
        return lambda network: float(len(data.test)) + options.factor

    data = load_dataset("digits")
    fingerprints = set()
    for held in (data, load_dataset("digits"), dataclasses.replace(data, mean=(0.25,))):
        for options in (
            argparse.Namespace(factor=1.0),
            argparse.Namespace(factor=2.0),
            Settings(),
            Settings(3.0),
        ):
            found = ScoreFingerprint.of(score_of(held, options))
            assert found.opaque == ()
            fingerprints.add(found.digest)
    assert len(fingerprints) == 8, "two equal datasets, four different settings"
