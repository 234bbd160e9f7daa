"""Read the metrics, episodes and layers of a run folder as plain rows."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rankrl.plan_search.scores.history import EpisodeRow
from rankrl.report.stages import ReportError
from rankrl.training import EpochRow

WARM_UP_PHASE = "warm-up"
"""Phase of the episodes that explore at random before the agent learns."""

PRESET_PHASE = "preset"
"""Phase of the plan that a search starts from, the reference for all that follow."""


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


EPISODE_COLUMNS = tuple(column.name for column in dataclasses.fields(EpisodeRow))
"""The columns of `episodes.csv`, in order."""


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
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [column for column in EPISODE_COLUMNS if column not in (reader.fieldnames or ())]
            if missing:
                raise ReportError(
                    f"{path} lacks the columns {', '.join(missing)}; it must be a rankrl run's own."
                )
            return [_episode(row, f"{path}, line {reader.line_num}") for row in reader]
    except (OSError, csv.Error, UnicodeDecodeError) as error:
        raise ReportError(f"cannot read {path}: {error}. Run again, or restore the file.") from error


def _episode(row: dict[str, str | None], place: str) -> EpisodeRow:
    def number(column: str) -> float:
        try:
            value = float(row[column] or "")
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ReportError(f"{place}: {column} is {row[column]!r}; it must be a finite number.")
        return value

    return EpisodeRow(
        episode=int(number("episode")),
        reward=number("reward"),
        score=number("score"),
        accuracy=number("accuracy"),
        params_kept=number("params_kept"),
        macs_kept=number("macs_kept"),
        best_reward=number("best_reward"),
        cached=row["cached"] == str(True),
        seconds=number("seconds"),
        phase=row["phase"] or "",
        choices=row["choices"] or "",
    )
