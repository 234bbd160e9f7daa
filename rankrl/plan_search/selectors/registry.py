"""The registry of selectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from decomposition.choose.heuristics import list_heuristics
from decomposition.registry import Registry
from rankrl.errors import ConfigError, did_you_mean
from rankrl.option_types import check_options
from rankrl.plan_search.selectors.base import Selector
from rankrl.plan_search.selectors.one_shot import heuristic_selector
from rankrl.plan_search.space.problem import SearchProblem
from rankrl.plan_search.space.setting import SearchSetting

_SELECTORS: Registry[type[Selector]] = Registry("selector", ConfigError)

_Class = TypeVar("_Class", bound=type[Selector])


def register_selector(cls: _Class) -> _Class:
    """Class decorator: add a selector to the registry under its `name`.

    Raises:
        ConfigError: The name is taken.
    """
    _SELECTORS.add(cls.name, cls, cls.description)
    return cls


def list_selectors() -> list[str]:
    """Return the names of all registered selectors; every registered heuristic is one too."""
    return sorted({*_SELECTORS.names(), *list_heuristics()})


def selector_description(name: str) -> str:
    """Return one line about a selector."""
    return selector_class(name).description


def selector_is_seeded(name: str) -> bool:
    """Return whether a selector's proposals depend on the seed."""
    return selector_class(name).seeded


def selector_options(name: str) -> dict[str, Any]:
    """Return a selector's own options, by name, with their defaults."""
    return selector_class(name).default_options()


def selector_option_types(name: str) -> dict[str, Any]:
    """Return the types of a selector's own options, by name."""
    return selector_class(name).option_types()


def check_selector(name: str, options: Mapping[str, Any], setting: SearchSetting | None = None) -> None:
    """Refuse a selector's options as far as that can be told without a problem."""
    check_options(f"selector {name!r}", "selector", options, selector_option_types(name))
    every = {**selector_options(name), **options}
    selector_class(name).check_ranges(every)
    if setting is not None:
        selector_class(name).check_setting(every, setting)


def create_selector(
    name: str, problem: SearchProblem, *, seed: int = 0, episodes: int = 50, **options: Any
) -> Selector:
    """Make a selector."""
    check_selector(name, options)
    if episodes < 1:
        raise ConfigError(f"search.episodes must be at least 1, got {episodes}")
    selector = selector_class(name)(problem, seed=seed, episodes=episodes, **options)
    selector.options = {**selector_options(name), **options}
    return selector


def selector_class(name: str) -> type[Selector]:
    """Return the class of a selector."""
    if name in list_heuristics():
        return heuristic_selector(name)
    if name not in _SELECTORS:
        raise ConfigError(
            f"there is no selector {name!r}; choose from {', '.join(list_selectors())}."
            f"{did_you_mean(name, list_selectors())}"
        )
    return _SELECTORS[name]
