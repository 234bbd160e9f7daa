"""The groups whose choices are registered, from the tables of what is ours in `rankrl.options`.

To ask the registries would mean to import what they hold, and torch first. What a user registers adds itself
to the names, and is asked for its own options.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any

from decomposition.registry import registered
from optim.registry import registered_optimizers
from pruning.registry import registered_pruners
from rankrl.cli.config.group import Group
from rankrl.option_types import OptionTypes
from rankrl.options.datasets import DATASETS
from rankrl.options.fields import option_fields
from rankrl.options.formats import FORMATS
from rankrl.options.models import HAND_ON, MODELS
from rankrl.options.optimizers import OPTIMIZERS
from rankrl.options.pruners import PRUNERS
from rankrl.options.rewards import REWARDS
from rankrl.options.selectors import HEURISTICS, SELECTORS, NoOptions
from rankrl.options.trackers import TRACKERS


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
    """Return what the registries know of a group."""
    from rankrl.cli.config.groups import GROUPS  # imports torch

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


def formats() -> dict[str, bool]:
    """Return the tensor formats by name, and whether each can split channel counts."""
    names = [name for name in registered("format") if name not in FORMATS]
    if not names:
        return dict(FORMATS)
    from decomposition import get_format  # imports torch, as the user's own format did

    return dict(sorted({**FORMATS, **{name: get_format(name).tensorisable for name in names}}.items()))
