"""Tracking as CSV files: `tracking/search.csv`, `tracking/finetune.csv`, ... in the run folder."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from typing import Any

from decomposition.files import announce_write
from rankrl.runs.tracking.base import Tracker
from rankrl.runs.tracking.registry import register_tracker


@register_tracker("csv")
class CsvTracker(Tracker):
    """Writes `tracking/*.csv`: a file a stage, a line a step; `result.csv` has a line a final number."""

    def point(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Add a line to the stage's file."""
        self._append(stage, ["step", *values], [[step, *values.values()]])

    def result(self, values: Mapping[str, float]) -> None:
        """Write `result.csv` anew."""
        announce_write(self.folder / "tracking" / "result.csv")
        (self.folder / "tracking" / "result.csv").unlink(missing_ok=True)
        self._append("result", ["name", "value"], list(values.items()))

    def _append(self, name: str, columns: list[str], rows: list[Any]) -> None:
        path = self.folder / "tracking" / f"{name}.csv"
        announce_write(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            if file.tell() == 0:
                writer.writerow(columns)
            writer.writerows(rows)
