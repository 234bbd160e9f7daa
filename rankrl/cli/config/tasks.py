"""The registry of tasks: what `rankrl task=NAME` can do."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from decomposition.registry import Registry
from rankrl.cli.config.schema import AppConfig
from rankrl.errors import ConfigError
from rankrl.runs.run_folder import RunFolder

TaskFunction = Callable[[AppConfig, RunFolder], None]
_FILE = "onnx"


@dataclass(frozen=True)
class Task:
    """A task of the command line.

    Attributes:
        name: Its name, `task=NAME`.
        description: One line for listings.
        run: Carries it out.
        run_on_file: The function of `cli.tasks.onnx_file`, imported when it is needed, that carries it out
            for a network in an ONNX file (`model=onnx`), which nobody here trained; None where the task has
            no use for one.
    """

    name: str
    description: str
    run: TaskFunction
    run_on_file: str | None = None

    def of(self, config: AppConfig) -> TaskFunction:
        """Return what carries the task out for the network that a configuration names.

        Raises:
            ConfigError: The task has no use for such a network.
        """
        if config.model.get("architecture") != _FILE:
            return self.run
        if self.run_on_file is None:
            others = [name for name in _TASKS.names() if _TASKS[name].run_on_file is not None]
            raise ConfigError(
                f"task={self.name} has no use for model={_FILE}, a network in a file that is not trained "
                f"here; choose task={' or task='.join(others)}"
            )
        run: TaskFunction = getattr(importlib.import_module("rankrl.cli.tasks.onnx_file"), self.run_on_file)
        return run


_TASKS: Registry[Task] = Registry("task", ConfigError)


def register_task(
    name: str, description: str, *, on_file: str | None = None
) -> Callable[[TaskFunction], TaskFunction]:
    """Register the decorated function as the task `name`.

    Args:
        name: Its name.
        description: One line for listings.
        on_file: The function of `cli.tasks.onnx_file` that carries it out for a network in an ONNX file,
            if the task has a use for one.

    Raises:
        ConfigError: The name is taken.
    """

    def register(run: TaskFunction) -> TaskFunction:
        _TASKS.add(name, Task(name, description, run, on_file), description)
        return run

    return register


def list_tasks() -> list[str]:
    """Return the names of the tasks, sorted."""
    return _TASKS.names()


def get_task(name: str) -> Task:
    """Return the task `name`.

    Raises:
        ConfigError: There is none; the message gives the nearest name.
    """
    return _TASKS[name]
