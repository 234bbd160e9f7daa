"""Options of the trackers."""

from __future__ import annotations

from dataclasses import dataclass

NONE = "none"
"""The choice of `tracking` that keeps nothing."""


@dataclass(frozen=True)
class FileOptions:
    """Options of what writes files of its own: none."""


@dataclass(frozen=True)
class MLflowOptions:
    """Options of `mlflow`."""

    uri: str | None = None
    experiment: str = "rankrl"


@dataclass(frozen=True)
class WandbOptions:
    """Options of `wandb`."""

    project: str = "rankrl"
    mode: str | None = None


TRACKERS: dict[str, type] = {
    "csv": FileOptions,
    "mlflow": MLflowOptions,
    "tensorboard": FileOptions,
    "wandb": WandbOptions,
    NONE: FileOptions,
}
"""Options by the tracker's name."""
