"""The configuration of a command line, composed as Hydra will: from the files that its flags name."""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
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
from omegaconf import DictConfig, OmegaConf, open_dict

from rankrl.cli.config.choices import group_choices
from rankrl.cli.config.folder import config_folder
from rankrl.errors import ConfigError

MAIN_FILE = "config"
_KEPT = 8  # of a sweep's many configurations only the first is asked for again


@dataclass(frozen=True)
class _Files:
    """What configurations are composed from: the folder of ours, that which a flag adds, the main file."""

    own: Path
    added: Path | None
    main: str


@dataclass(frozen=True)
class _Composing:
    """What a `composing` block composes from, and what it has composed, by overrides and Hydra's part."""

    files: _Files
    known: dict[tuple[tuple[str, ...], bool], DictConfig] = field(default_factory=dict)

    def config(self, overrides: tuple[str, ...], *, with_hydra: bool) -> DictConfig:
        key = overrides, with_hydra
        if key not in self.known:
            if with_hydra:
                config = compose(self.files.main, overrides=list(overrides), return_hydra_config=True)
            else:  # a copy takes a tenth of the time
                config = copy.deepcopy(self.config(overrides, with_hydra=True))
                OmegaConf.set_readonly(config, None)
                with open_dict(config):
                    del config["hydra"]
            OmegaConf.set_readonly(config, True)
            self.known[key] = config
            while len(self.known) > _KEPT:
                del self.known[next(iter(self.known))]
        return self.known[key]


_composing: ContextVar[_Composing | None] = ContextVar("composing", default=None)


def parsed_flags(arguments: Sequence[str]) -> Namespace:
    """Return Hydra's flags on a command line, its overrides in `overrides`."""
    return get_args_parser().parse_known_args(list(arguments))[0]


@contextmanager
def composing(flags: Namespace | None = None) -> Iterator[None]:
    """Let `composed_config` compose configurations within the block, each of them once.

    A block within another, for the same flags, goes on with what that one has composed.
    """
    files, outer = _files(flags), _composing.get()
    if outer is not None and outer.files == files:
        yield
        return
    token = _composing.set(_Composing(files))
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(files.own)):
            if files.added is not None:
                GlobalHydra.instance().clear()
                path = create_config_search_path(str(files.own))
                path.prepend("command-line", f"file://{files.added}", SearchPathQuery(provider="schema"))
                Hydra.create_main_hydra2(task_name="app", config_search_path=path)
            yield
    finally:
        _composing.reset(token)


def composed_config(overrides: Sequence[str] = (), *, with_hydra: bool = False) -> DictConfig:
    """Return the configuration with these overrides, within `composing` or a run of Hydra's.

    Within `composing` it is read-only, since others get the same one.
    """
    composing_now = _composing.get()
    if composing_now is not None:
        return composing_now.config(tuple(overrides), with_hydra=with_hydra)
    name = str(HydraConfig.get().job.config_name or MAIN_FILE)
    return compose(name, overrides=list(overrides), return_hydra_config=with_hydra)


def offered_choices(group: str) -> list[str]:
    """Return the choices of a group: where files are known to Hydra, those of folders that flags add, too."""
    if not GlobalHydra.instance().is_initialized():
        return group_choices(group)
    return sorted(GlobalHydra.instance().config_loader().get_group_options(group))


def _files(flags: Namespace | None) -> _Files:
    """Return what a command line with these flags is composed from."""
    own, added = config_folder(), None
    if flags is None:
        return _Files(own, added, MAIN_FILE)
    if flags.config_path is not None:
        own = _folder("--config-path", flags.config_path)
    if flags.config_dir is not None:
        added = _folder("--config-dir", flags.config_dir)
    return _Files(own, added, flags.config_name or MAIN_FILE)


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
