"""Track the numbers of a run for a dashboard while it goes on.

A tracker is a class with a few methods, registered by name (`tracker`); `trackers` has those that come with
rankrl. `Tracking` passes the numbers on to the trackers of a run, whose errors never stop the run.
"""

from __future__ import annotations

from rankrl.runs.tracking import trackers
from rankrl.runs.tracking.trackers import (
    NOT_TRACKED,
    Tracker,
    Tracking,
    create_tracker,
    list_trackers,
    register_tracker,
    start_tracking,
    tracker_class,
    tracker_option_types,
)

__all__ = [
    "NOT_TRACKED",
    "Tracker",
    "Tracking",
    "create_tracker",
    "list_trackers",
    "register_tracker",
    "start_tracking",
    "tracker_class",
    "tracker_option_types",
    "trackers",
]
