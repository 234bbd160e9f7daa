"""Modules that register what is not ours: those of installed packages, and those that `plugins` names."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from omegaconf import ListConfig, OmegaConf

from rankrl.cli.config.composition import parsed_flags
from rankrl.cli.config.folder import config_folder
from rankrl.cli.config.parsing import parsed_overrides
from rankrl.errors import ConfigError

ENTRY_POINTS = "rankrl.plugins"
"""The group of entry points whose modules are imported at every start."""


def installed_plugins() -> dict[str, str]:
    """Return the modules that installed packages name, and the package of each."""
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
        except Exception as error:  # whatever a module of somebody else raises
            reason = f"{type(error).__name__}: {error}"
            if module in installed:
                advice = f"mend or remove the package {installed[module]}, which has it in {ENTRY_POINTS}"
            else:
                advice = "plugins names modules in the current folder, or of installed packages"
            raise ConfigError(f"the plugin {module} cannot be imported ({reason}); {advice}") from error


def named_plugins(arguments: Sequence[str]) -> list[str]:
    """Return the modules that a command line names, or the experiment that it chooses."""
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
