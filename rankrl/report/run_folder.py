"""Read run folders as plain rows, gather the runs below a folder, and describe command and machine."""

from __future__ import annotations

import csv
import json
import platform
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch

from rankrl.device import processor_name, usable_cores
from rankrl.errors import counted
from rankrl.plan_search.scores.evaluation import EpisodeRow, parse_rows
from rankrl.report.run_tables import ReportError, Stage, latency_change, stages
from rankrl.training import EpochRow

WARM_UP_PHASE = "warm-up"
"""Phase of the episodes that explore at random before the agent learns."""

PRESET_PHASE = "preset"
"""Phase of the plan that a search starts from, the reference for all that follow."""

DETERMINISTIC_PHASE = "deterministic"
"""Phase of the episodes in which an agent's policy acts without noise."""


@dataclass(frozen=True)
class LayerRow:
    """One layer before and after."""

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
        """The fraction of the layer's parameters that is left."""
        return self.params_after / self.params_before

    @property
    def is_compressed(self) -> bool:
        """Whether the layer is smaller than it was; with channels removed, its inputs may be all it lost."""
        return not self.reason or self.params_after < self.params_before


def layer_formats(layers: Sequence[LayerRow]) -> list[str]:
    """Return the names of the tensor formats that layers have, sorted."""
    return sorted({row.format for row in layers} - {""})


@dataclass(frozen=True)
class RunReport:
    """Data of one run's page; empty parts are left out of the page."""

    metrics: Mapping[str, Any]
    layers: Sequence[LayerRow] = ()
    episodes: Sequence[EpisodeRow] = ()
    epochs: Sequence[EpochRow] = ()
    setup: Mapping[str, str] = field(default_factory=dict)
    files: Sequence[tuple[str, str]] = ()


def read_metrics(folder: str | Path) -> dict[str, Any]:
    """Read `metrics.json`."""
    path = Path(folder) / "metrics.json"
    try:
        metrics = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ReportError(
            f"there is no metrics.json in {folder}; only a finished run can be reported."
        ) from error
    except (OSError, ValueError) as error:
        raise ReportError(f"cannot read {path}: {error}. Run again, or restore the file.") from error
    if not isinstance(metrics, dict):
        raise ReportError(f"{path} holds a {type(metrics).__name__}; it must hold a JSON object.")
    return metrics


def read_episodes(folder: str | Path) -> list[EpisodeRow]:
    """Read `episodes.csv`."""
    path = Path(folder) / "episodes.csv"
    if not path.exists():
        return []
    try:
        return parse_rows(path.read_bytes().decode())
    except (OSError, csv.Error, ValueError) as error:
        raise ReportError(f"cannot read {path}: {error}. Run again, or restore the file.") from error


Status = Literal["finished", "failed", "unfinished"]

# Tasks without results to compare.
_NO_RUNS = ("report", "inspect")
_CONFIGURATION = Path("state", "configuration.json")


@dataclass(frozen=True)
class GatheredRun:
    """One run of many."""

    folder: Path
    status: Status
    error: str = ""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    stages: tuple[Stage, ...] = ()
    has_page: bool = False
    overrides: tuple[str, ...] = ()
    best_in: tuple[str, ...] = ()

    @property
    def baseline(self) -> Stage | None:
        """The dense network."""
        return self.stages[0] if self.stages and self.stages[0].name == "Baseline" else None

    @property
    def final(self) -> Stage | None:
        """The compressed network at the end of the run; None if the run compressed nothing."""
        last = self.stages[-1] if self.stages else None
        return None if last is None or last.name == "Baseline" else last

    @property
    def latency_change(self) -> str:
        """The ratio of times as text, such as `1.70× faster`."""
        before, after = (None if costs is None else costs.latency_ms for costs in (self.baseline, self.final))
        return latency_change(self.metrics, before, after)

    @property
    def method(self) -> str:
        """The tensor format, the pruner, or both."""
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
        """The budgets that are set, by measure."""
        budget = self.metrics.get("budget", self.config.get("budget"))
        if not isinstance(budget, Mapping):
            return {}
        unused = () if budget.get("drop") is not None else ("minimise",)
        return {name: value for name, value in budget.items() if value is not None and name not in unused}

    def named(self, key: str) -> str:
        """Return a value of the metrics (model, dataset, selector) as text; empty if it is missing."""
        value = self.metrics.get(key)
        return "" if value is None else str(value)


def gather_runs(folder: str | Path) -> list[GatheredRun]:
    """Read all runs below a folder."""
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
    folder = path.relative_to(above)
    record = _object(path / _CONFIGURATION)
    config, overrides = record.get("config"), record.get("overrides")
    known: dict[str, Any] = {
        "config": config if isinstance(config, dict) else {},
        "overrides": tuple(map(str, overrides)) if isinstance(overrides, list) else (),
    }
    page = (path / "report.html").is_file()
    if not (path / "metrics.json").is_file():
        failed = (path / "error.json").is_file()
        error = str(_object(path / "error.json").get("error", "")) if failed else ""
        return GatheredRun(folder, "failed" if failed else "unfinished", error, **known)
    try:
        metrics = read_metrics(path)
        return GatheredRun(
            folder, "finished", metrics=metrics, stages=tuple(stages(metrics)), has_page=page, **known
        )
    except ReportError as error:
        return GatheredRun(folder, "failed", str(error), **known)


def _object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty one if it cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


DATE = "Date"
"""Key of the time of writing in a setup."""

_PACKAGES = ("rankrl", "torch", "onnx", "onnxruntime", "stable-baselines3", "numpy")


def collect_setup(command: Sequence[str], seed: int) -> dict[str, str]:
    """Describe this run and this machine for the report."""
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
