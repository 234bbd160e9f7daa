"""Options in which runs differ: what a sweep varied."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rankrl.runs.run_folder import COMPRESS

BUDGET = "budget."
"""What names of budgets begin with."""

# What the table of runs has columns of its own for.
_HAVE_COLUMNS = (
    *("task", "seed", "model", "model.architecture", "dataset", "dataset.name", "decomposition"),
    *("decomposition.format", "selector", "selector.name", "pruner", "pruner.name"),
)
# The entries that say which choice of a group a configuration holds.
_NAMES = ("name", "format", "architecture")
Option = str | int | float | bool | None


class Configured(Protocol):
    """A run whose configuration is known."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration, nested."""

    @property
    def overrides(self) -> Sequence[str]:
        """What it was composed from, `optim.lr=0.001`."""

    @property
    def budgets(self) -> Mapping[str, Any]:
        """The budgets that are set, by measure."""


def option(run: Configured, name: str) -> Option:
    """Return the value of an option, lists as JSON."""
    if name.startswith(BUDGET):
        return _plain(run.budgets.get(name.removeprefix(BUDGET)))
    value: Any = run.config
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if value is None or isinstance(value, Mapping):
        texts = dict(_split(override) for override in run.overrides)
        choices = [value[key] for key in _NAMES if key in value] if isinstance(value, Mapping) else []
        value = texts.get(name, choices[0] if choices else None)
    return _plain(value)


def varied_options(runs: Sequence[Configured]) -> list[str]:
    """Return the names of the options in which runs differ, without those that the table names itself."""
    names = dict.fromkeys(name for run in runs for name in _asked(run))
    return [
        name
        for name in names
        if name not in _HAVE_COLUMNS and len({repr(option(run, name)) for run in runs}) > 1
    ]


def _asked(run: Configured) -> list[str]:
    budgets = [f"{BUDGET}{name}" for name in run.budgets]
    if run.overrides:
        return [*(_split(override)[0] for override in run.overrides), *budgets]
    return [*(_leaves(run.config) if run.config.get("task") == COMPRESS else ()), *budgets]


def _leaves(config: Mapping[str, Any], within: str = "") -> list[str]:
    names: list[str] = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            names += _leaves(value, f"{within}{key}.")
        elif within or key not in ("drop", "minimise", "params", "macs", "bytes", "latency"):
            names.append(f"{within}{key}")
    return names


def _split(override: str) -> tuple[str, str]:
    name, _, value = override.lstrip("+~").partition("=")
    return name, value


def _plain(value: Any) -> Option:
    return value if value is None or isinstance(value, str | int | float) else json.dumps(value)
