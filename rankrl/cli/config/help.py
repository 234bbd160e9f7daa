"""Import plugins, and write the help page and the version."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from omegaconf import ListConfig, OmegaConf

from rankrl.cli.config.choices import TASKS, config_folder, group_names
from rankrl.cli.config.composition import (
    composed_config,
    composing,
    first_values,
    offered_choices,
    parsed_flags,
    parsed_overrides,
)
from rankrl.errors import ConfigError

ENTRY_POINTS = "rankrl.plugins"
"""The group of entry points whose modules are imported at every start."""


def installed_plugins() -> dict[str, str]:
    """Return the plugin modules in the entry points of installed packages, and the package of each."""
    return {
        entry.module: entry.name if entry.dist is None else entry.dist.name
        for entry in entry_points(group=ENTRY_POINTS)
    }


def load_plugins(modules: Sequence[str] = ()) -> None:
    """Import the installed plugins and further modules, which register what they define."""
    installed = installed_plugins()
    for module in dict.fromkeys((*installed, *modules)):
        try:
            importlib.import_module(module)
        except Exception as error:  # a third party's module may raise anything
            reason = f"{type(error).__name__}: {error}"
            if module in installed:
                advice = f"mend or remove the package {installed[module]}, which has it in {ENTRY_POINTS}"
            else:
                advice = "plugins names modules in the current folder, or of installed packages"
            raise ConfigError(f"the plugin {module} cannot be imported ({reason}); {advice}") from error


def named_plugins(arguments: Sequence[str]) -> list[str]:
    """Return the plugins named on a command line, or in the experiment that it chooses."""
    flags = parsed_flags(arguments)
    values = {
        override.key_or_group: override.value()
        for override in parsed_overrides(flags.overrides)
        if not override.is_sweep_override()
    }
    modules: Any = values.get("plugins")
    if "plugins" not in values and isinstance(values.get("experiment"), str):
        folders = [flags.config_dir, flags.config_path, config_folder()]
        files = [Path(folder, "experiment", f"{values['experiment']}.yaml") for folder in folders if folder]
        file = next((each for each in files if each.is_file()), None)
        modules = [] if file is None else OmegaConf.select(OmegaConf.load(file), "plugins", default=[])
    return [str(each) for each in (modules if isinstance(modules, list | ListConfig) else [modules]) if each]


HELP_FLAGS = frozenset({"-h", "--help"})
VERSION_FLAGS = frozenset({"--version"})
_INDENT = "  "


def help_page(arguments: Sequence[str]) -> str:
    """Return the page: tasks, launchers, groups with their choices, and all options with their values."""
    flags = parsed_flags(arguments)
    with composing(flags):
        config = composed_config(first_values(flags.overrides), with_hydra=True)
        about = config.hydra.help
        launchers = GlobalHydra.instance().config_loader().get_group_options("hydra/launcher")
        groups = {name: ", ".join(offered_choices(name)) for name in group_names()}
        values: Any = {key: config._get_node(key) for key in config if key != "hydra"}
        plugins = {**installed_plugins(), **dict.fromkeys(config.plugins, "plugins=")}
    parts = [
        about.header,
        "Tasks (task=NAME)",
        "\n".join(_columns({name: task.description for name, task in TASKS.items()})),
        "Groups (GROUP=CHOICE)",
        "\n".join(_columns(groups)),
        *(["Plugins", "\n".join(_columns(plugins))] if plugins else []),
        "Launchers of a sweep (rankrl -m hydra/launcher=NAME ...)",
        _INDENT + ", ".join(sorted(launchers)),
        "Options and their values with these choices (OPTION=VALUE)",
        OmegaConf.to_yaml(OmegaConf.create(values)).rstrip(),
        about.footer,
    ]
    return "\n\n".join(parts)


def version_line() -> str:
    """Return the program's name and version."""
    try:
        return f"rankrl {version('rankrl')}"
    except PackageNotFoundError:
        return "rankrl, not installed: run from its source tree"


def _columns(rows: Mapping[str, str]) -> Iterator[str]:
    width = max(map(len, rows))
    for name, text in rows.items():
        yield f"{_INDENT}{name:{width}}  {text}"
