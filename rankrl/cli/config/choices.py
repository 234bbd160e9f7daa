"""The choices of every group: what is registered, and what has a file in `configs/GROUP/`.

A file of the name of a registered thing takes its place; one of another name may begin with it
(`defaults: [NAME]`) and holds what differs.
"""

from __future__ import annotations

from typing import Any

from hydra.core.config_store import ConfigStore

from rankrl.cli.config.folder import config_folder
from rankrl.cli.config.tables import TABLES

# What the schema types and gives defaults to, and a file may choose otherwise.
_UNTYPED = ("budget",)


class _Choices(dict[str, Any]):
    """The choices of a group in Hydra's store, which Hydra copies whole for each composition.

    It copies once more what it loads from there, and writes to nothing that is stored.
    """

    def __deepcopy__(self, memo: object) -> _Choices:
        return self


def store_groups() -> None:
    """Make what is registered by now, and nothing else, the choices of its group."""
    store = ConfigStore.instance()
    for name, group in TABLES.items():
        stored = {file.removesuffix(".yaml") for file in store.repo.get(name, {})} & set(group.ours)
        for choice in set(group.known()) - set(_files(name)) - stored:
            store.store(group=name, name=choice, node=group.node(choice), provider="rankrl")
    for name in _UNTYPED:
        store.store(group=name, name="default", node={}, provider="rankrl")
    for name in (*TABLES, *_UNTYPED):
        known = {f"{choice}.yaml" for choice in group_choices(name)}
        nodes: dict[str, Any] = store.repo.get(name, {})
        store.repo[name] = _Choices({file: nodes[file] for file in nodes if file in known})


def group_names() -> list[str]:
    """Return the names of all groups, those within others too, but for Hydra's own.

    Those have more choices than there are files here: plugins bring some.
    """
    folder = config_folder()
    files = {path.parent.relative_to(folder).as_posix() for path in folder.rglob("*/*.yaml")}
    return sorted(name for name in {*TABLES, *_UNTYPED, *files} if not name.startswith("hydra/"))


def group_choices(group: str) -> list[str]:
    """Return the choices of a group: what is registered, and what has a file."""
    stored = TABLES[group].known() if group in TABLES else ["default"] if group in _UNTYPED else []
    return sorted({*_files(group), *stored})


def _files(group: str) -> list[str]:
    return [path.stem for path in (config_folder() / group).glob("*.yaml")]
