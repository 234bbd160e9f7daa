"""Read run folders as plain rows, gather the runs below a folder, and describe command and machine."""

from __future__ import annotations

import csv
import json
import platform
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch

from rankrl.device import processor_name, usable_cores
from rankrl.errors import counted
from rankrl.files import read_object
from rankrl.plan_search.scores.evaluation import EpisodeRow, parse_rows
from rankrl.report.run_tables import BASELINE, Measure, ReportError, costs, qualities, stages
from rankrl.runs.run_folder import COMPRESS
from rankrl.training import EpochRow

WARM_UP_PHASE = "warm-up"
"""Phase of the episodes that explore at random before the agent learns."""

PRESET_PHASE = "preset"
"""Phase of the plan that a search starts from, the reference for all that follow."""

DETERMINISTIC_PHASE = "deterministic"
"""Phase of the episodes in which an agent's policy acts without noise."""


@dataclass(frozen=True)
class LayerRow:
    name: str
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    params_before: int
    params_after: int
    macs_before: int
    macs_after: int
    error: float | None = None
    reason: str = ""
    channels: tuple[int, int] | None = None
    format: str = ""
    precision: str = ""

    @property
    def kept(self) -> float:
        return self.params_after / self.params_before

    @property
    def is_compressed(self) -> bool:
        """Whether the layer is smaller than it was; with channels removed, its inputs may be all it lost."""
        return not self.reason or self.params_after < self.params_before


def layer_formats(layers: Sequence[LayerRow]) -> list[str]:
    return sorted({row.format for row in layers} - {""})


@dataclass(frozen=True)
class RunReport:
    """Data of one run's page; empty parts are left out of the page."""

    metrics: Mapping[str, Any]
    layers: Sequence[LayerRow] = ()
    episodes: Sequence[EpisodeRow] = ()
    epochs: Sequence[EpochRow] = ()
    setup: Mapping[str, str] = field(default_factory=dict)


def read_metrics(folder: str | Path) -> dict[str, Any]:
    path = Path(folder) / "metrics.json"
    if not path.is_file():
        raise ReportError(f"there is no metrics.json in {folder}; only a finished run can be reported.")
    metrics = read_object(path)
    if not metrics:
        raise ReportError(f"{path} is damaged: it holds no JSON object. Run again, or restore the file.")
    return metrics


def read_episodes(folder: str | Path) -> list[EpisodeRow]:
    path = Path(folder) / "episodes.csv"
    if not path.exists():
        return []
    try:
        return parse_rows(path.read_bytes().decode())
    except (OSError, csv.Error, ValueError) as error:
        raise ReportError(f"cannot read {path}: {error}. Run again, or restore the file.") from error


Option = str | int | float | None
Status = Literal["finished", "failed", "unfinished"]

# Tasks without results to compare.
_NO_RUNS = ("report", "inspect")
_CONFIGURATION = Path("state", "configuration.json")
_CHOICES = ("name", "format", "architecture")  # keys of the choice of a group in a configuration
BUDGET = "budget."  # prefix of the names of budgets


@dataclass(frozen=True)
class GatheredRun:
    folder: Path
    status: Status
    error: str = ""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    has_page: bool = False
    overrides: tuple[str, ...] = ()
    best_in: tuple[str, ...] = ()

    @cached_property
    def measures(self) -> Mapping[str, Measure]:
        return {each.key: each for each in (*qualities(self.metrics), *costs(self.metrics))}

    @cached_property
    def options(self) -> Mapping[str, Option]:
        """Its options by name, a group's is its choice; lists as JSON."""
        budgets = {f"{BUDGET}{name}": value for name, value in self.budgets.items()}
        return {**dict(map(_split, self.overrides)), **dict(_flat(self.config)), **budgets}

    @property
    def asked(self) -> list[str]:
        budgets = [f"{BUDGET}{name}" for name in self.budgets]
        if self.overrides:
            return [*(_split(override)[0] for override in self.overrides), *budgets]
        return [*(self.options if self.config.get("task") == COMPRESS else ()), *budgets]

    @cached_property
    def is_compressed(self) -> bool:
        """Whether it ended with another network than the dense one."""
        return any(stage.name != BASELINE for stage in stages(self.metrics))

    def before(self, key: str) -> float | None:
        known = key in self.measures and self.metrics.get("baseline")
        return self.measures[key].before if known else None

    def after(self, key: str) -> float | None:
        """Return a measure of the last network; None if the run compressed nothing."""
        return self.measures[key].after if key in self.measures and self.is_compressed else None

    @property
    def method(self) -> str:
        names = [str(self.metrics[key]) for key in ("pruner", "decomposition") if self.metrics.get(key)]
        if not self.metrics:  # an unfinished run has only its configuration
            pruned = self.config.get("task") == "prune"
            group, key = ("pruner", "name") if pruned else ("decomposition", "format")
            content = self.config.get(group)
            names = [str(content.get(key) or "") if isinstance(content, Mapping) else ""]
        return " + ".join(names)

    @property
    def budget(self) -> str:
        """The budget as text: `params 0.5`."""
        return ", ".join(
            f"{name} {value:g}" for name, value in self.budgets.items() if isinstance(value, float)
        )

    @property
    def budgets(self) -> Mapping[str, Any]:
        budget = self.metrics.get("budget", self.config.get("budget"))
        if not isinstance(budget, Mapping):
            return {}
        unused = () if budget.get("drop") is not None else ("minimise",)
        return {name: value for name, value in budget.items() if value is not None and name not in unused}

    def named(self, key: str) -> str:
        """Return a value of the metrics (model, dataset, selector) as text; empty if it is missing."""
        value = self.metrics.get(key)
        return "" if value is None else str(value)


def _flat(config: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Option]]:
    for key, value in config.items():
        name = f"{within}{key}"
        if isinstance(value, Mapping):
            yield from ((name, value[choice]) for choice in reversed(_CHOICES) if choice in value)
            yield from _flat(value, f"{name}.")
        elif value is not None:
            yield name, value if isinstance(value, str | int | float) else json.dumps(value)


def _split(override: str) -> tuple[str, str]:
    name, _, value = override.lstrip("+~").partition("=")
    return name, value


def gather_runs(folder: str | Path) -> list[GatheredRun]:
    folder = Path(folder)
    if not folder.is_dir():
        raise ReportError(f"there is no folder {folder}; give the folder of a sweep with runs=FOLDER")
    if _is_run(folder):
        raise ReportError(
            f"{folder} is one run, whose page is {folder / 'report.html'}; give the folder above it with "
            "runs=FOLDER"
        )
    runs = [_read(path, folder) for path in _run_folders(folder)]
    gathered = [run for run in runs if run.config.get("task") not in _NO_RUNS]
    if not gathered:
        raise ReportError(f"there is no run below {folder}; give the folder of a sweep with runs=FOLDER")
    return gathered


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("metrics.json", "error.json", str(_CONFIGURATION)))


def _run_folders(folder: Path) -> Iterator[Path]:
    """Yield the topmost run folders below a folder, sorted."""
    for path in sorted(subfolder for subfolder in folder.iterdir() if subfolder.is_dir()):
        if _is_run(path):
            yield path
        else:
            yield from _run_folders(path)


def _read(path: Path, above: Path) -> GatheredRun:
    record = read_object(path / _CONFIGURATION)
    config, overrides = record.get("config"), record.get("overrides")
    run = GatheredRun(
        path.relative_to(above),
        "unfinished",
        config=config if isinstance(config, dict) else {},
        overrides=tuple(map(str, overrides)) if isinstance(overrides, list) else (),
        has_page=(path / "report.html").is_file(),
    )
    if (path / "metrics.json").is_file():
        try:
            finished = replace(run, status="finished", metrics=read_metrics(path))
            _ = finished.measures  # refuses numbers that are none
        except ReportError as error:
            return replace(run, status="failed", error=str(error))
        return finished
    if (path / "error.json").is_file():
        return replace(run, status="failed", error=str(read_object(path / "error.json").get("error", "")))
    return run


DATE = "Date"

_PACKAGES = ("rankrl", "torch", "onnx", "onnxruntime", "stable-baselines3", "numpy")


def collect_setup(command: Sequence[str], seed: int) -> dict[str, str]:
    setup = {DATE: date_line(), "Command": shlex.join(command), "Seed": str(seed)}
    versions = [f"Python {platform.python_version()}"]
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:  # run from a checkout that is not installed
            continue
    setup["Versions"] = ", ".join(versions)
    setup["System"] = f"{platform.system()} {platform.machine()}"
    setup["Processor"] = f"{processor_name()}, {counted(usable_cores(), 'core')}"
    if torch.cuda.is_available():
        setup["GPU"] = torch.cuda.get_device_name()
    return setup


def date_line() -> str:
    """Return the time now, to the minute: `2026-11-22 14:30 UTC`."""
    return datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
