"""What tests of the command line share: options of a quick run, and the JSON files of a run folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

QUICK = (
    "model=conv4",
    "train.epochs=2",
    "train.optim.lr=0.02",
    "search.episodes=3",
    "search.images=100",
    "calibration.images=64",
    "decomposition.candidates=4",
    "decomposition.iterations=5",
    "decomposition.final_iterations=10",
    "decomposition.final_starts=1",
    "finetune.epochs=1",
    "export.runs=3",
)


BUDGET = "budget.params=0.5"
"""What `whole_run` was given beside `QUICK`."""


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content
