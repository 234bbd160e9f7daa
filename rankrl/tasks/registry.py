"""The registry of tasks: what `rankrl task=NAME` can do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from decomposition.registry import Registry
from rankrl.config.schema import AppConfig
from rankrl.errors import ConfigError
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


_TASKS: Registry[Task] = Registry("task", ConfigError)


def register_task(name: str, description: str) -> Callable[[TaskFunction], TaskFunction]:
    """Register the decorated function as the task `name`.

    Raises:
        ConfigError: The name is taken.
    """

    def register(run: TaskFunction) -> TaskFunction:
        _TASKS.add(name, Task(name, description, run), description)
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
