"""List the groups of options, their choices, and the tasks."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from decomposition.registry import registered
from optim.registry import registered_optimizers
from pruning.registry import registered_pruners
from rankrl.cli.config.schema import AppConfig
from rankrl.errors import ConfigError
from rankrl.option_types import OptionTypes
from rankrl.options.names import DATASETS, FORMATS, HAND_ON, MODELS, OPTIMIZERS, TRACKERS, option_fields
from rankrl.options.search import REWARDS
from rankrl.options.selectors import HEURISTICS, SELECTORS, NoOptions
from rankrl.options.training import PRUNERS
from rankrl.runs.run_folder import RunFolder


def config_folder() -> Path:
    """Return the folder `configs`: inside the installed package, or next to it in a checkout."""
    package = Path(__file__).resolve().parents[2]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


@dataclass(frozen=True)
class Group:
    """A group whose choices are registered."""

    noun: str
    known: Callable[[], Sequence[str]]
    about: Callable[[str], str]
    owners: Callable[[str], tuple[object, ...]]
    types: Callable[[str], tuple[OptionTypes, bool]]
    defaults: Callable[[str], dict[str, Any]]
    key: str = "name"
    nested: bool = False
    ours: Collection[str] = ()

    def options(self, name: str) -> dict[str, Any]:
        """Return the options of a choice with their defaults as the configuration holds them."""
        return {key: _plain(value) for key, value in self.defaults(name).items()}

    def node(self, name: str) -> dict[str, Any]:
        """Return the configuration node of a choice."""
        options = self.options(name)
        return {self.key: name, **({"options": options} if self.nested else options)}


def _plain(value: Any) -> Any:
    """Convert a default to YAML's types."""
    if value is inspect.Parameter.empty:
        return MISSING
    return list(value) if isinstance(value, tuple) else value


def _group(
    name: str,
    noun: str,
    table: Mapping[str, type | None],
    *,
    names: Callable[[], Collection[str]] | None = None,
    hand_on: Collection[str] = (),
    key: str = "name",
    nested: bool = False,
) -> Group:
    """Return a group of the configuration."""

    def types(choice: str) -> tuple[OptionTypes, bool]:
        options = table.get(choice)
        if options is None:
            return _registered(name).types(choice)
        hints = typing.get_type_hints(options)
        return {each.name: hints[each.name] for each in option_fields(options)}, choice in hand_on

    def defaults(choice: str) -> dict[str, Any]:
        if choice not in table:
            return _registered(name).defaults(choice)
        options = table[choice]
        return {} if options is None else _defaults(options)

    return Group(
        noun,
        lambda: sorted({*table, *(registered(noun) if names is None else names())}),
        lambda choice: _registered(name).about(choice),
        lambda choice: _registered(name).owners(choice),
        types,
        defaults,
        key,
        nested,
        table,
    )


def _defaults(options: Any) -> dict[str, Any]:
    """Return the defaults of a dataclass; `inspect.Parameter.empty` for none."""
    return {
        each.name: each.default_factory()
        if each.default_factory is not dataclasses.MISSING
        else inspect.Parameter.empty
        if each.default is dataclasses.MISSING
        else each.default
        for each in option_fields(options)
    }


def _registered(name: str) -> Group:
    """Return the `Group` of a name from its registry."""
    from rankrl.cli.config.groups import GROUPS

    return GROUPS[name]


TABLES = {
    "model": _group("model", "model", MODELS, hand_on=HAND_ON, key="architecture"),
    "dataset": _group("dataset", "dataset", DATASETS),
    "decomposition": _group("decomposition", "format", dict.fromkeys(FORMATS, NoOptions), key="format"),
    "selector": _group(
        "selector",
        "selector",
        SELECTORS,
        names=lambda: [*registered("selector"), *registered("heuristic")],
    ),
    "reward": _group("reward", "reward", REWARDS),
    "pruner": _group("pruner", "pruner", PRUNERS, names=registered_pruners),
    "optim": _group(
        "optim", "optimizer", dict.fromkeys(OPTIMIZERS), names=registered_optimizers, nested=True
    ),
    "tracking": _group("tracking", "tracker", TRACKERS, nested=True),
}


def heuristics() -> frozenset[str]:
    """Return the names of the selectors that are rules."""
    return frozenset((*HEURISTICS, *registered("heuristic")))


def formats() -> list[str]:
    """List the names of the tensor formats."""
    return sorted({*FORMATS, *registered("format")})


# Groups whose types and defaults are in the schema, and whose choices are files.
_UNTYPED = ("budget",)


class _Choices(dict[str, Any]):
    """The choices of a group in Hydra's store, which Hydra copies whole for each composition.

    Skipping that copy is safe: Hydra copies again on loading, and never writes to a stored choice.
    """

    def __deepcopy__(self, memo: object) -> _Choices:
        return self


def store_groups() -> None:
    """Store the choices registered so far, and no others, in Hydra's groups."""
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
    """Return the names of all groups, nested ones included, except Hydra's own.

    Hydra's groups have choices from plugins besides the files here.
    """
    folder = config_folder()
    files = {path.parent.relative_to(folder).as_posix() for path in folder.rglob("*/*.yaml")}
    return sorted(name for name in {*TABLES, *_UNTYPED, *files} if not name.startswith("hydra/"))


def group_choices(group: str) -> list[str]:
    """Return the choices of a group, registered ones and files."""
    stored = TABLES[group].known() if group in TABLES else ["default"] if group in _UNTYPED else []
    return sorted({*_files(group), *stored})


def _files(group: str) -> list[str]:
    return [path.stem for path in (config_folder() / group).glob("*.yaml")]


TaskFunction = Callable[[AppConfig, RunFolder], None]
_FILE = "onnx"
_FOLDER = "rankrl.cli.tasks"


@dataclass(frozen=True)
class Task:
    """A task of the command line: the function of its name in a module of `cli.tasks`."""

    name: str
    module: str
    description: str
    on_file: str | None = None

    def of(self, config: AppConfig) -> TaskFunction:
        """Import the function of the task for the kind of network in a configuration."""
        if config.model.get("architecture") != _FILE:
            return _function(self.module, self.name)
        if self.on_file is None:
            others = [name for name, task in TASKS.items() if task.on_file is not None]
            raise ConfigError(
                f"task={self.name} has no use for model={_FILE}, a network in a file that is not trained "
                f"here; choose task={' or task='.join(others)}"
            )
        return _function("onnx_file", self.on_file)


def _function(module: str, name: str) -> TaskFunction:
    function: TaskFunction = getattr(importlib.import_module(f"{_FOLDER}.{module}"), name)
    return function


_ALL = (
    Task(
        "apply",
        "compression",
        "rewrite the network under plan=PATH or that of run=FOLDER, without fine-tuning",
        on_file="apply",
    ),
    Task("compare", "overviews", "several selectors on the same evaluator, over several seeds"),
    Task(
        "evaluate",
        "compression",
        "test accuracy, parameters and MACs of model.checkpoint, weights=PATH or run=FOLDER",
    ),
    Task(
        "export",
        "compression",
        "write the compressed network weights=PATH or run=FOLDER as a verified ONNX file",
    ),
    Task(
        "finetune",
        "compression",
        "fine-tune the compressed network weights=PATH or run=FOLDER, the dense one as teacher",
    ),
    Task(
        "inspect",
        "overviews",
        "list the layers: shape, cost and feasible ranks, or why not; errors if asked",
        on_file="inspect",
    ),
    Task(
        "pipeline", "compression", "choose ranks, rewrite, fine-tune, export and report", on_file="compress"
    ),
    Task("pretrain", "pretrain", "train one policy on many tasks: networks, formats, budgets"),
    Task("prune", "prune", "remove channels or blocks to a target, fine-tune, export and report"),
    Task("report", "overviews", "gather all runs below runs=FOLDER in one page and one CSV file"),
    Task("search", "compression", "choose ranks and write plan.json"),
    Task(
        "timing_kit",
        "overviews",
        "write what a budget in time needs to be timed on another device",
        on_file="timing_kit",
    ),
    Task(
        "verify_kit",
        "overviews",
        "write the finished networks below runs=FOLDER to be timed and compared on another device",
        on_file="verify_kit",
    ),
    Task("train", "compression", "train a network, from scratch or from model.checkpoint"),
)
TASKS = {task.name: task for task in _ALL}
"""The tasks by name."""
