"""What `rankrl task=NAME` can do; the only code that sees the configuration."""

from __future__ import annotations

from rankrl.cli.config.tasks import Task, get_task, list_tasks, register_task
from rankrl.cli.tasks import (
    apply,
    compare,
    evaluate,
    export,
    finetune,
    inspect,
    pipeline,
    pretrain,
    prune,
    report,
    search,
    train,
)

__all__ = [
    "Task",
    "apply",
    "compare",
    "evaluate",
    "export",
    "finetune",
    "get_task",
    "inspect",
    "list_tasks",
    "pipeline",
    "pretrain",
    "prune",
    "register_task",
    "report",
    "search",
    "train",
]
