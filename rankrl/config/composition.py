"""The configuration of a command line, composed as Hydra will: from the files that its flags name."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra._internal.hydra import Hydra
from hydra._internal.utils import (  # Hydra has no public way to tell flags from overrides, or to add folders
    create_config_search_path,
    get_args_parser,
)
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from rankrl.config.choices import group_choices
from rankrl.config.folder import config_folder
from rankrl.errors import ConfigError

MAIN_FILE = "config"
_main_file = ContextVar("main file", default="")


def parsed_flags(arguments: Sequence[str]) -> Namespace:
    """Return Hydra's flags on a command line, its overrides in `overrides`."""
    return get_args_parser().parse_known_args(list(arguments))[0]


@contextmanager
def composing(flags: Namespace | None = None) -> Iterator[None]:
    """Let `composed_config` compose configurations within the block.

    Args:
        flags: Those of the command line (`parsed_flags`); None for none.

    Raises:
        ConfigError: There is no folder that a flag names.
    """
    own, added, name = config_folder(), None, MAIN_FILE
    if flags is not None:
        own = own if flags.config_path is None else _folder("--config-path", flags.config_path)
        added = None if flags.config_dir is None else _folder("--config-dir", flags.config_dir)
        name = flags.config_name or MAIN_FILE
    token = _main_file.set(name)
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(own)):
            if added is not None:
                GlobalHydra.instance().clear()
                path = create_config_search_path(str(own))
                path.prepend("command-line", f"file://{added}", SearchPathQuery(provider="schema"))
                Hydra.create_main_hydra2(task_name="app", config_search_path=path)
            yield
    finally:
        _main_file.reset(token)


def composed_config(overrides: Sequence[str] = (), *, with_hydra: bool = False) -> DictConfig:
    """Return the configuration with these overrides, within `composing` or a run of Hydra's.

    Args:
        overrides: The command line's.
        with_hydra: Whether Hydra's own options are wanted, too.
    """
    name = _main_file.get() or str(HydraConfig.get().job.config_name or MAIN_FILE)
    return compose(name, overrides=list(overrides), return_hydra_config=with_hydra)


def offered_choices(group: str) -> list[str]:
    """Return the choices of a group: where files are known to Hydra, those of folders that flags add, too."""
    if not GlobalHydra.instance().is_initialized():
        return group_choices(group)
    return sorted(GlobalHydra.instance().config_loader().get_group_options(group))


def _folder(flag: str, name: str) -> Path:
    path = Path(name)
    if flag == "--config-path" and not path.is_absolute():
        raise ConfigError(
            f"{flag}={name} would be looked for in rankrl's own code; give the whole path, "
            f"{flag}={path.absolute()}"
        )
    if not path.is_dir():
        raise ConfigError(f"{flag}={name}: there is no such folder; give one that holds GROUP/CHOICE.yaml")
    return path.absolute()
