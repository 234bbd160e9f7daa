"""What `rankrl --help` and `rankrl --version` print, without importing anything that computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from rankrl.cli.config.choices import group_names
from rankrl.cli.config.composition import composed_config, composing, offered_choices, parsed_flags
from rankrl.cli.config.parsing import first_values
from rankrl.cli.config.plugins import installed_plugins
from rankrl.cli.config.tasks import TASKS

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
