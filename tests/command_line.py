"""What tests of the command line share: options of a quick run, and the JSON files of a run folder."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from rankrl.config.overrides import check_overrides
from rankrl.errors import ConfigError

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


def with_effect(*arguments: str, removable: Collection[str] = QUICK) -> tuple[str, ...]:
    """Return the arguments without those of `removable` that the task has no use for, and would refuse."""
    left = list(arguments)
    while True:
        try:
            check_overrides(left)
        except ConfigError as error:
            idle = [
                each for each in left if each in removable and str(error).startswith(f"{each} has no effect")
            ]
            if idle:
                left.remove(idle[0])
                continue
        return tuple(left)


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content
