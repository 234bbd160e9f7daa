"""Tracking: the numbers of a run, written for a dashboard while it goes on.

A tracker is a small class with three methods (`base`), registered by name (`registry`); `tracking` passes
everything on to the trackers of a run, none of which can disturb it.
"""

from __future__ import annotations

from rankrl.runs.tracking import csv_files, mlflow_runs, tensorboard_files, wandb_runs
from rankrl.runs.tracking.base import Tracker
from rankrl.runs.tracking.registry import (
    create_tracker,
    list_trackers,
    register_tracker,
    tracker_class,
    tracker_option_types,
)
from rankrl.runs.tracking.tracking import NOT_TRACKED, Tracking, start_tracking

__all__ = [
    "NOT_TRACKED",
    "Tracker",
    "Tracking",
    "create_tracker",
    "csv_files",
    "list_trackers",
    "mlflow_runs",
    "register_tracker",
    "start_tracking",
    "tensorboard_files",
    "tracker_class",
    "tracker_option_types",
    "wandb_runs",
]
