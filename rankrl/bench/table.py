"""Read and write RankBench's file: a zip with an index, and per task its problem and its scored plans."""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from decomposition.registry import did_you_mean
from rankrl.bench.surrogate import Surrogate
from rankrl.errors import ConfigError
from rankrl.files import write_atomically
from rankrl.plan_search.space.problem import Choices, SearchProblem
from rankrl.plan_search.space.problem_file import problem_from_json, problem_to_json

BENCH_FILE = "rankbench.zip"
BENCH_VERSION = 1
_INDEX = "index.json"


@dataclass(frozen=True)
class Table:
    """The plans of one task that were applied and scored.

    Attributes:
        name: The task: network, what its layers choose from, measure and fraction of the budget.
        family: Kind of the network, by which tasks are left out of training.
        network: Name of the network.
        problem: Layers, candidates, costs and budget; it holds no weights.
        choices: The plans, (plans, layers) of candidates' indices; greedy's is the first.
        sources: Where each plan is from: `greedy`, `importance WIDTH`, `random` or the name of a selector.
        scores: What searches see, (plans,): agreement with the original after the quick refit.
        judged: The same on inputs that no search sees, after the refit, (plans,).
        about: How the table was made.
    """

    name: str
    family: str
    network: str
    problem: SearchProblem
    choices: np.ndarray
    sources: tuple[str, ...]
    scores: np.ndarray
    judged: np.ndarray
    about: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.choices)

    @cached_property
    def rows(self) -> dict[Choices, int]:
        """The row of each plan."""
        return {tuple(map(int, plan)): row for row, plan in enumerate(self.choices)}

    @cached_property
    def surrogates(self) -> dict[str, Surrogate]:
        """Predict `scores` and `judged` of plans that the table lacks: a surrogate for each."""
        known = {"scores": self.scores, "judged": self.judged}
        return {name: Surrogate(self.problem, self.choices, values) for name, values in known.items()}

    @property
    def prize(self) -> float:
        """Judged score of the best known plan less that of greedy's."""
        return float(self.judged.max() - self.judged[0])


def write_tables(tables: Iterable[Table], path: str | Path) -> None:
    """Write tables as one file."""
    index: dict[str, Any] = {}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for number, table in enumerate(tables):
            content = _to_json(table).encode()
            member = f"{number}.json"
            archive.writestr(_entry(member), content)
            index[table.name] = {
                "file": member,
                "sha256": hashlib.sha256(content).hexdigest(),
                "family": table.family,
                "network": table.network,
            }
        written = {"version": BENCH_VERSION, "tasks": index}
        archive.writestr(_entry(_INDEX), json.dumps(written, indent=1))
    write_atomically(path, packed.getvalue())


def _entry(name: str) -> zipfile.ZipInfo:
    """Return an entry whose bytes depend on its content alone."""
    entry = zipfile.ZipInfo(name)
    entry.compress_type = zipfile.ZIP_DEFLATED
    return entry


def bench_path() -> Path:
    """Find the file: that of the folder RANKRL_DATA, else the one that comes with rankrl."""
    folder = os.environ.get("RANKRL_DATA")
    own = Path(folder) / BENCH_FILE if folder else None
    return own if own is not None and own.is_file() else Path(__file__).with_name(BENCH_FILE)


class BenchFile:
    """RankBench's file; tables are read one by one, when they are asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with zipfile.ZipFile(self.path) as archive:
                self._index: dict[str, Any] = json.loads(archive.read(_INDEX))
            tasks, version = self._index["tasks"], self._index["version"]
        except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
            raise ConfigError(f"{self.path} is no file of RankBench: {error}") from error
        if version != BENCH_VERSION:
            raise ConfigError(f"{self.path} has version {version!r}; this rankrl reads {BENCH_VERSION}")
        self.tasks: dict[str, dict[str, str]] = tasks
        self._tables: dict[str, Table] = {}

    def table(self, name: str) -> Table:
        """Read a task's table; an unknown name or a damaged table raise a `ConfigError`."""
        if name not in self.tasks:
            raise ConfigError(
                f"RankBench has no task {name!r}; rankrl.bench.bench_tasks() lists its {len(self.tasks)}."
                f"{did_you_mean(name, self.tasks)}"
            )
        if name not in self._tables:
            self._tables[name] = self._read(name)
        return self._tables[name]

    def _read(self, name: str) -> Table:
        entry = self.tasks[name]
        try:
            with zipfile.ZipFile(self.path) as archive:
                content = archive.read(entry["file"])
        except (OSError, KeyError, zipfile.BadZipFile) as error:
            raise ConfigError(f"{self.path}: the table of {name!r} cannot be read: {error}") from error
        if hashlib.sha256(content).hexdigest() != entry["sha256"]:
            raise ConfigError(f"{self.path}: the table of {name!r} is damaged: its hash is another one")
        return _from_json(json.loads(content), f"{self.path}, {name}")


def read_tables(path: str | Path | None = None) -> BenchFile:
    """Open RankBench's file, once: `path`, or what is found without it."""
    return _opened(bench_path() if path is None else Path(path))


@cache
def _opened(path: Path) -> BenchFile:
    return BenchFile(path)


def _to_json(table: Table) -> str:
    content = {
        "name": table.name,
        "family": table.family,
        "network": table.network,
        "about": dict(table.about),
        "problem": problem_to_json(table.problem),
        "sources": table.sources,
        "choices": table.choices.tolist(),
        "scores": table.scores.round(6).tolist(),
        "judged": table.judged.round(6).tolist(),
    }
    return json.dumps(content, separators=(",", ":"))


def _from_json(content: Mapping[str, Any], source: str) -> Table:
    return Table(
        content["name"],
        content["family"],
        content["network"],
        problem_from_json(content["problem"], source),
        np.array(content["choices"]),
        tuple(content["sources"]),
        np.array(content["scores"]),
        np.array(content["judged"]),
        content["about"],
    )
