"""Register pruners by name: learned masks and criteria."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from pruning.errors import PruningError

if TYPE_CHECKING:
    from pruning.selection import Scope

Unit = Literal["channels", "blocks"]
Definition = TypeVar("Definition", bound=Callable[..., Any])


@dataclass(frozen=True)
class Pruner:
    """A way to choose channels.

    Attributes:
        name: what it is called in configurations.
        description: one line for listings.
        definition: a `ChannelMask` class (trained by `train_masks`), or a criterion, a function that scores
            the units of groups (see `pruning.criteria`), or chooses blocks (see `pruning.blocks`).
        scope: how the scores of a criterion are best compared (see `keep_within`).
        unit: what it removes: `channels`, or whole residual `blocks` (see `pruning.blocks`).
    """

    name: str
    description: str
    definition: Callable[..., Any]
    scope: Scope = "uniform"
    unit: Unit = "channels"

    @property
    def is_mask(self) -> bool:
        """Whether the pruner is a mask to be trained, not a criterion to be computed."""
        from pruning.masks import ChannelMask

        return isinstance(self.definition, type) and issubclass(self.definition, ChannelMask)


_PRUNERS: dict[str, Pruner] = {}
_MODULES = ("blocks", "criteria", "masks")
"""The modules that register ours."""


def register_pruner(
    name: str, description: str, *, scope: Scope = "uniform", unit: Unit = "channels"
) -> Callable[[Definition], Definition]:
    """Register the decorated mask class or criterion under `name`.

    A criterion computes in the modes of torch that public calls do (`pruning.copies`).

    Raises:
        PruningError: if the name is taken.
    """

    def register(definition: Definition) -> Definition:
        if not str(definition.__module__).startswith(f"{__package__}."):
            _register_ours()  # so that their names count as taken
        if name in _PRUNERS:
            raise PruningError(f"a pruner named {name!r} is registered already")
        if not isinstance(definition, type):
            from pruning.copies import public_call

            definition = cast("Definition", public_call(definition))
        _PRUNERS[name] = Pruner(name, description, definition, scope, unit)
        return definition

    return register


def get_pruner(name: str) -> Pruner:
    """Return the pruner registered under `name`.

    Raises:
        PruningError: if there is none.
    """
    _register_ours()
    if name not in _PRUNERS:
        raise PruningError(f"unknown pruner {name!r}; choose among {', '.join(sorted(_PRUNERS))}")
    return _PRUNERS[name]


def list_pruners() -> list[Pruner]:
    """Return all registered pruners, sorted by name."""
    _register_ours()
    return [_PRUNERS[name] for name in sorted(_PRUNERS)]


def registered_pruners() -> list[str]:
    """Return the names of the pruners that are registered by now, sorted; nothing is imported."""
    return sorted(_PRUNERS)


def _register_ours() -> None:
    for module in _MODULES:
        importlib.import_module(f"{__package__}.{module}")
