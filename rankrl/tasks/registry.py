"""The registry of tasks: what `rankrl task=NAME` can do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rankrl.config.schema import AppConfig
from rankrl.errors import ConfigError, did_you_mean
from rankrl.workflow.run_folder import RunFolder

TaskFunction = Callable[[AppConfig, RunFolder], None]


@dataclass(frozen=True)
class Task:
    """A task of the command line.

    Attributes:
        name: Its name, `task=NAME`.
        description: One line for listings.
        run: Carries it out.
    """

    name: str
    description: str
    run: TaskFunction


_TASKS: dict[str, Task] = {}


def register_task(name: str, description: str) -> Callable[[TaskFunction], TaskFunction]:
    """Register the decorated function as the task `name`.

    Raises:
        ValueError: The name is taken.
    """

    def register(run: TaskFunction) -> TaskFunction:
        if name in _TASKS:
            raise ValueError(f"a task named {name!r} is registered already")
        _TASKS[name] = Task(name, description, run)
        return run

    return register


def list_tasks() -> list[str]:
    """Return the names of the tasks, sorted."""
    return sorted(_TASKS)


def get_task(name: str) -> Task:
    """Return the task `name`.

    Raises:
        ConfigError: There is none; the message gives the nearest name.
    """
    if name not in _TASKS:
        raise ConfigError(
            f"there is no task {name!r}; choose from {', '.join(list_tasks())}.{did_you_mean(name, _TASKS)}"
        )
    return _TASKS[name]
