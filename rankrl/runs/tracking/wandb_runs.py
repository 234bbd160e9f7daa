"""Tracking with Weights & Biases: one W&B run for one run folder."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankrl.runs.tracking.base import Tracker
from rankrl.runs.tracking.registry import import_optional, register_tracker


@register_tracker("wandb")
class WandbTracker(Tracker):
    """Logs to W&B (extra `wandb`), in addition to the CSV files; each stage has its own step.

    Args:
        folder: The run folder.
        project: W&B's project.
        mode: "online", "offline" (no network; `wandb sync` sends it later) or None for W&B's own default.
    """

    def __init__(self, folder: Path, project: str = "rankrl", mode: str | None = None) -> None:
        super().__init__(folder)
        wandb = import_optional("wandb", "wandb")
        identifier = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
        self._run: Any = wandb.init(
            project=project,
            mode=mode,
            dir=str(folder),
            id=identifier,
            name=folder.name,
            resume="allow",
        )

    def configuration(self, values: Mapping[str, str]) -> None:
        """Keep it as the run's configuration."""
        self._run.config.update(dict(values), allow_val_change=True)

    def point(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Log `STAGE/NAME` over `STAGE/step`."""
        self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
        self._run.log({f"{stage}/step": step, **{f"{stage}/{name}": value for name, value in values.items()}})

    def result(self, values: Mapping[str, float]) -> None:
        """Keep them in the run's summary."""
        self._run.summary.update(dict(values))

    def close(self) -> None:
        """End the run."""
        self._run.finish()
