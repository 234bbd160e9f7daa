"""Define the interface of selectors, and register, check and create them by name."""

from __future__ import annotations

import importlib
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from decomposition.choose.heuristics import get_heuristic, list_heuristics
from decomposition.registry import Registry
from rankrl.errors import ConfigError, did_you_mean
from rankrl.option_types import check_options, parameter_defaults, parameter_types
from rankrl.options.selectors import ActionKind
from rankrl.plan_search.scores.evaluation import EpisodeRow
from rankrl.plan_search.space.problem import Choices, SearchProblem, SearchSetting

# Parameters that every selector's constructor takes besides its own options.
_GIVEN = ("problem", "seed", "episodes")


@dataclass(frozen=True)
class Proposal:
    """A plan that a selector wants scored.

    Attributes:
        choices: The plan: the candidate of every site. It should keep the problem's budget: one that does not
            is scored, but never taken.
        phase: What the selector was doing, for the record: `preset`, `warm-up`, `policy`, `random`, ...
        actions: Numbers behind the plan that `observe` needs besides, if any; they are recorded with it.
    """

    choices: Choices
    phase: str
    actions: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "choices", tuple(map(int, self.choices)))


OnUpdate = Callable[[int, Mapping[str, float]], None]


class Selector(ABC):
    """Chooses plans, one step after the other: `propose`, scoring by the caller, `observe`.

    The two halves are separate so that the caller can score the plans of one step in parallel and record them
    between steps. A search is resumed by `observe` alone, with what is recorded: proposals depend on problem,
    seed, options and what was observed, not on earlier calls of `propose`. So draws come from `generator`.

    Attributes:
        name: Name in the registry, in plans and on the command line.
        description: One line for listings.
        seeded: Whether its proposals depend on the seed.
        needs_weights: Whether it looks at the network, too, which RankBench's tables lack.
        own_options: The dataclass of its own options, which checks them; None for those of its signature.
        action_kind: What its actions stand for; None where it has none.
        options: All options it has, defaults too; part of a search's identity when it is resumed.
        observed: Number of plans observed so far.
        on_update: Called with the episode and the numbers of an agent's update, by name, for trackers.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    seeded: ClassVar[bool] = True
    needs_weights: ClassVar[bool] = False
    own_options: ClassVar[type[Any] | None] = None
    action_kind: ActionKind | None = None

    def __init__(self, problem: SearchProblem, *, seed: int, episodes: int) -> None:
        self.problem = problem
        self.seed = seed
        self.episodes = episodes
        self.options: Mapping[str, Any] = {}
        self.observed = 0
        self.on_update: OnUpdate | None = None

    def account(self, row: EpisodeRow, last_reward: float) -> list[dict[str, Any]]:
        """List an agent's observation, action and candidate of every layer in an episode, for the report.

        Args:
            row: The episode.
            last_reward: The last reward that was observed before its step.
        """
        del row, last_reward
        return []

    def generator(self) -> np.random.Generator:
        """Return the generator of a step's draws, seeded by the seed and the number of plans observed."""
        return np.random.default_rng((self.seed, self.observed))

    @classmethod
    def option_owner(cls) -> Callable[..., Any]:
        """Return the class whose signature and docstring define the options."""
        return cls if cls.own_options is None else cls.own_options

    @classmethod
    def default_options(cls) -> dict[str, Any]:
        return parameter_defaults(cls.option_owner(), without=_GIVEN)

    @classmethod
    def option_types(cls) -> dict[str, Any]:
        return parameter_types(cls.option_owner(), without=_GIVEN)

    @classmethod
    def check_ranges(cls, options: Mapping[str, Any]) -> None:
        """Refuse options that are invalid for every problem, before there is a problem.

        Args:
            options: All options, defaults too, of the right types.

        Raises:
            ConfigError: An option is out of its range.
        """
        if cls.own_options is not None:
            cls.own_options(**options)

    @classmethod  # noqa: B027 (some go with every search)
    def check_setting(cls, options: Mapping[str, Any], setting: SearchSetting) -> None:
        """Refuse options that do not suit a search, before there is a problem.

        Args:
            options: All options, defaults too, in their ranges.
            setting: What is known of the search.

        Raises:
            ConfigError: An option contradicts it.
        """

    def use_folder(self, folder: Path) -> None:  # noqa: B027 (most selectors have nothing to keep)
        """Keep the selector's own files in the search's folder; a resumed search does not need them."""

    @abstractmethod
    def propose(self) -> list[Proposal]:
        """Return the plans to score next, one or more; none when the selector has nothing more to try."""

    def observe(self, proposals: Sequence[Proposal], rewards: Sequence[float]) -> None:
        """Learn the rewards of one step's plans; here, count them. Overriding methods call this one too.

        Args:
            proposals: The plans that were scored: all of the step, or the first of them when the search has
                come to its end. They may be of an earlier process, whose search is resumed.
            rewards: Their rewards, in order.
        """
        self.observed += len(proposals)


def heuristic_choices(problem: SearchProblem, heuristic: str) -> Choices:
    if problem.budget is None:
        raise ConfigError(
            f"selector {heuristic!r} spends a budget and there is none; set budget.params or budget.macs"
        )
    if heuristic == "greedy":
        return tuple(problem.preset.tolist())
    if problem.library is None:
        raise ConfigError(f"selector {heuristic!r} looks into the fits; make the problem with its library")
    choices = get_heuristic(heuristic).choose(problem.library, problem.sites, problem.budget)
    return tuple(choices.tolist())


class OneShot(Selector):
    """Proposes the plan of one heuristic, then nothing."""

    seeded = False

    def __init__(self, problem: SearchProblem, *, seed: int, episodes: int) -> None:
        super().__init__(problem, seed=seed, episodes=episodes)
        self._choices = heuristic_choices(problem, self.name)

    def propose(self) -> list[Proposal]:
        return [] if self.observed else [Proposal(self._choices, "one-shot")]


@cache
def heuristic_selector(name: str) -> type[Selector]:
    heuristic = get_heuristic(name)
    attributes = {"__doc__": heuristic.description, "name": name, "description": heuristic.description}
    return type(f"{name.title()}Selector", (OneShot,), {**attributes, "needs_weights": name != "greedy"})


_SELECTORS: Registry[type[Selector]] = Registry("selector", ConfigError)

_Class = TypeVar("_Class", bound=type[Selector])


def register_selector(cls: _Class) -> _Class:
    """Class decorator: add a selector to the registry under its `name`.

    Raises:
        ConfigError: The name is taken, or the class cannot be made and called as a search does.
    """
    _check_class(cls)
    _SELECTORS.add(cls.name, cls, cls.description)
    return cls


def _check_class(cls: type[Any]) -> None:
    """Refuse a class that is no selector, before anything takes time."""
    needed = "a selector is a subclass of Selector with name, description and propose"
    missing = [each for each in ("name", "description") if not isinstance(getattr(cls, each, None), str)]
    missing += sorted(getattr(cls, "__abstractmethods__", ()))
    if not issubclass(cls, Selector) or missing:
        without = f" lacks {', '.join(missing)}" if missing else " is none"
        raise ConfigError(f"{cls.__name__}{without}: {needed}")
    try:
        inspect.signature(cls).bind(None, **dict.fromkeys(_GIVEN[1:]))
    except TypeError as error:
        raise ConfigError(
            f"{cls.__name__} cannot be made: {error}. It is called as {cls.__name__}(problem, seed=SEED, "
            "episodes=EPISODES, **options), so its constructor takes these three, and its own options have "
            "defaults"
        ) from error


def list_selectors() -> list[str]:
    """Return the names of all registered selectors; every registered heuristic is one too."""
    return sorted({*_SELECTORS.names(), *list_heuristics()})


def check_selector(name: str, options: Mapping[str, Any], setting: SearchSetting | None = None) -> None:
    """Refuse a selector's invalid options, as far as they can be checked without a problem."""
    cls = selector_class(name)
    check_options(f"selector {name!r}", "selector", options, cls.option_types())
    every = {**cls.default_options(), **options}
    cls.check_ranges(every)
    if setting is not None:
        cls.check_setting(every, setting)


def create_selector(
    name: str, problem: SearchProblem, *, seed: int = 0, episodes: int = 50, **options: Any
) -> Selector:
    check_selector(name, options)
    if episodes < 1:
        raise ConfigError(f"search.episodes must be at least 1, got {episodes}")
    selector = selector_class(name)(problem, seed=seed, episodes=episodes, **options)
    if not hasattr(selector, "observed"):
        raise ConfigError(
            f"{type(selector).__name__}.__init__ must call super().__init__(problem, seed=seed, "
            "episodes=episodes)"
        )
    selector.options = {**selector.default_options(), **options}
    return selector


def selector_class(name: str) -> type[Selector]:
    if name in list_heuristics():
        return heuristic_selector(name)
    if name not in _SELECTORS:
        raise ConfigError(
            f"there is no selector {name!r}; choose from {', '.join(list_selectors())}."
            f"{did_you_mean(name, list_selectors())}"
        )
    return _SELECTORS[name]


def import_package(module: str, selector: str, called: str) -> Any:
    """Import a selector's optional package; `ConfigError` names it if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"selector={selector} needs {called}, which is not installed; `pip install {module}`, or choose "
            "another selector"
        ) from error


@dataclass(frozen=True)
class SelectorEntry:
    text: str
    selector: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def folder_name(self) -> str:
        return re.sub(r"[^A-Za-z0-9_.]+", "-", self.text)
