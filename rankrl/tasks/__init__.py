"""What `rankrl task=NAME` can do; the only code that sees the configuration."""

from __future__ import annotations

from rankrl.tasks import apply, evaluate, export, finetune, inspect, pipeline, search, train
from rankrl.tasks.registry import Task, get_task, list_tasks, register_task

__all__ = [
    "Task",
    "apply",
    "evaluate",
    "export",
    "finetune",
    "get_task",
    "inspect",
    "list_tasks",
    "pipeline",
    "register_task",
    "search",
    "train",
]
