"""Results of a long script in a CSV file: written after every one, so that a killed script goes on."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rankrl.files import write_atomically


def epochs_of(metrics: Mapping[str, Any]) -> int:
    """Return how many epochs a finished run fine-tuned for: its own, a later call may ask for others."""
    return int(metrics.get("trainings", {}).get("finetune", {"epochs": 0})["epochs"])


class ResultRows:
    """Rows with the same columns, of which some, the key, say what was measured under which settings.

    Args:
        path: The CSV file; rows that it holds already are read.
        key: Columns that tell rows apart.
        values: The other columns.
    """

    def __init__(self, path: Path, key: Sequence[str], values: Sequence[str]) -> None:
        self.path, self.key, self.columns = path, tuple(key), (*key, *values)
        self.rows: list[dict[str, str]] = []
        if path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                self.rows = list(csv.DictReader(file))
            if self.rows and tuple(self.rows[0]) != self.columns:
                raise SystemExit(f"{path} has other columns; move it away or choose another folder")

    def find(self, key: Mapping[str, object]) -> dict[str, str] | None:
        """Return the row of this key, or None if it is yet to be measured."""
        wanted = [str(key[column]) for column in self.key]
        return next((row for row in self.rows if [row[column] for column in self.key] == wanted), None)

    def add(self, key: Mapping[str, object], values: Mapping[str, object]) -> None:
        """Add a row and write the file, atomically."""
        merged = {**key, **values}
        self.rows.append({column: str(merged[column]) for column in self.columns})
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        write_atomically(self.path, text.getvalue())
