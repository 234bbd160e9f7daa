"""List the tasks of `rankrl task=NAME`, and import the function of each."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from rankrl.cli.config.schema import AppConfig
from rankrl.errors import ConfigError
from rankrl.runs.run_folder import RunFolder

TaskFunction = Callable[[AppConfig, RunFolder], None]
_FILE = "onnx"
_FOLDER = "rankrl.cli.tasks"


@dataclass(frozen=True)
class Task:
    """A task of the command line: the function of its name in a module of `cli.tasks`."""

    name: str
    module: str
    description: str
    on_file: str | None = None

    def of(self, config: AppConfig) -> TaskFunction:
        """Import the function of the task for the kind of network in a configuration."""
        if config.model.get("architecture") != _FILE:
            return _function(self.module, self.name)
        if self.on_file is None:
            others = [name for name, task in TASKS.items() if task.on_file is not None]
            raise ConfigError(
                f"task={self.name} has no use for model={_FILE}, a network in a file that is not trained "
                f"here; choose task={' or task='.join(others)}"
            )
        return _function("onnx_file", self.on_file)


def _function(module: str, name: str) -> TaskFunction:
    function: TaskFunction = getattr(importlib.import_module(f"{_FOLDER}.{module}"), name)
    return function


_ALL = (
    Task(
        "apply",
        "compression",
        "rewrite the network under plan=PATH or that of run=FOLDER, without fine-tuning",
        on_file="apply",
    ),
    Task("compare", "overviews", "several selectors on the same evaluator, over several seeds"),
    Task(
        "evaluate",
        "compression",
        "test accuracy, parameters and MACs of model.checkpoint, weights=PATH or run=FOLDER",
    ),
    Task(
        "export",
        "compression",
        "write the compressed network weights=PATH or run=FOLDER as a verified ONNX file",
    ),
    Task(
        "finetune",
        "compression",
        "fine-tune the compressed network weights=PATH or run=FOLDER, the dense one as teacher",
    ),
    Task(
        "inspect",
        "overviews",
        "list the layers: shape, cost and feasible ranks, or why not; errors if asked",
        on_file="inspect",
    ),
    Task(
        "pipeline", "compression", "choose ranks, rewrite, fine-tune, export and report", on_file="compress"
    ),
    Task("pretrain", "pretrain", "train one policy on many tasks: networks, formats, budgets"),
    Task("prune", "prune", "remove channels or blocks to a target, fine-tune, export and report"),
    Task("report", "overviews", "gather all runs below runs=FOLDER in one page and one CSV file"),
    Task("search", "compression", "choose ranks and write plan.json"),
    Task(
        "timing_kit",
        "kits",
        "write what a budget in time needs to be timed on another device",
        on_file="timing_kit",
    ),
    Task(
        "verify_kit",
        "kits",
        "write the finished networks below runs=FOLDER to be timed and compared on another device",
        on_file="verify_kit",
    ),
    Task("train", "compression", "train a network, from scratch or from model.checkpoint"),
)
TASKS = {task.name: task for task in _ALL}
"""The tasks by name."""
