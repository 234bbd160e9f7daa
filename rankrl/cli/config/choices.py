"""The choices of every group: what is registered, and what has a file in `configs/GROUP/`.

A file of the name of a registered thing takes its place; one of another name may begin with it
(`defaults: [NAME]`) and holds what differs.

To ask the registries means to import all that is registered, and torch first. The command line asks the
catalogue instead, which `scripts/make_config_reference.py` writes from the registries; where torch is loaded
already, as in a program that registers something of its own, they are asked themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from hydra.core.config_store import ConfigStore

from rankrl.cli.config import catalogue
from rankrl.cli.config.folder import config_folder
from rankrl.cli.config.group import Group
from rankrl.errors import ConfigError

# What the schema types and gives defaults to, and a file may choose otherwise.
_UNTYPED = ("budget",)


class _Choices(dict[str, Any]):
    """The choices of a group in Hydra's store, which Hydra copies whole for each composition.

    It copies once more what it loads from there, and writes to nothing that is stored.
    """

    def __deepcopy__(self, memo: object) -> _Choices:
        return self


def groups() -> Mapping[str, Group]:
    """Return the groups whose choices are registered, by name."""
    if not _loaded():
        return catalogue.GROUPS
    from rankrl.cli.config.groups import GROUPS

    return GROUPS


def formats() -> dict[str, bool]:
    """Return the tensor formats by name, and whether each can split channel counts."""
    if not _loaded():
        return dict(catalogue.FORMATS)
    from decomposition import get_format, list_formats

    return {name: get_format(name).tensorisable for name in list_formats()}


def tasks() -> dict[str, str]:
    """Return the tasks by name, each with one line about it."""
    if not _loaded():
        return dict(catalogue.TASKS)
    from rankrl.cli.tasks import get_task, list_tasks

    return {name: get_task(name).description for name in list_tasks()}


def store_groups() -> None:
    """Make every registered thing a choice of its group; what was registered meanwhile too."""
    store = ConfigStore.instance()
    for name, group in groups().items():
        for choice in set(group.known()) - set(_files(name)):
            store.store(group=name, name=choice, node=group.node(choice), provider="rankrl")
    for name in _UNTYPED:
        store.store(group=name, name="default", node={}, provider="rankrl")
    for name in (*groups(), *_UNTYPED):
        store.repo[name] = _Choices(store.repo.get(name, {}))


def group_names() -> list[str]:
    """Return the names of all groups, those within others too, but for Hydra's own.

    Those have more choices than there are files here: plugins bring some.
    """
    folder = config_folder()
    files = {path.parent.relative_to(folder).as_posix() for path in folder.rglob("*/*.yaml")}
    return sorted(name for name in {*groups(), *_UNTYPED, *files} if not name.startswith("hydra/"))


def group_choices(group: str) -> list[str]:
    """Return the choices of a group: what is registered, and what has a file."""
    known = groups()
    stored = known[group].known() if group in known else ["default"] if group in _UNTYPED else []
    return sorted({*_files(group), *stored})


def check_catalogue() -> None:
    """Refuse to go on with a catalogue that says otherwise than the code: defaults would be those of before.

    Raises:
        ConfigError: It is not current; the message says how to write it anew.
    """
    found = next(_outdated(), None)
    if found is not None:
        raise ConfigError(
            f"rankrl/cli/config/catalogue.py is not current ({found}); the code has changed since: run "
            "`python scripts/make_config_reference.py`"
        )


def _outdated() -> Iterator[str]:
    """Yield the names of what the catalogue knows otherwise than the code."""
    from rankrl.cli.config.groups import GROUPS

    for name, group in catalogue.GROUPS.items():
        live = GROUPS[name]
        for choice in group.known():
            if (
                choice not in live.known()
                or group.types(choice) != live.types(choice)
                or group.options(choice) != live.options(choice)
            ):
                yield f"{name}={choice}"


def _loaded() -> bool:
    return "torch" in sys.modules


def _files(group: str) -> list[str]:
    return [path.stem for path in (config_folder() / group).glob("*.yaml")]
