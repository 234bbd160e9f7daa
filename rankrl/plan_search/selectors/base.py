"""What a selector is: it proposes plans, and is told how good they were."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from rankrl.option_types import parameter_defaults, parameter_types
from rankrl.plan_search.space.problem import Choices, SearchProblem
from rankrl.plan_search.space.setting import SearchSetting

# What every selector takes besides its own options.
_GIVEN = ("problem", "seed", "episodes")


@dataclass(frozen=True)
class Proposal:
    """A plan that a selector wants scored.

    Attributes:
        choices: The plan: the candidate of every site. It keeps the problem's budget.
        phase: What the selector was doing, for the record: `preset`, `warm-up`, `policy`, `random`, ...
    """

    choices: Choices
    phase: str


@dataclass(frozen=True)
class SelectorState:
    """All that a selector remembers, ready to be written without pickling.

    Attributes:
        tensors: Arrays by name.
        values: Plain JSON values by name.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)


class Selector(ABC):
    """Chooses plans, one step after the other: `propose`, scoring by the caller, `observe`.

    The two halves are apart so that the caller can score the plans of one step in parallel and save the state
    between steps. Equal problems, seeds, options and rewards bring equal proposals.

    Attributes:
        name: Name in the registry, in plans and on the command line.
        description: One line for listings.
        seeded: Whether its proposals depend on the seed.
        own_options: The dataclass of its own options, which checks them; None for those of its signature.
        options: All options it has, defaults too; part of a search's identity when it is resumed.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    seeded: ClassVar[bool] = True
    own_options: ClassVar[type[Any] | None] = None

    def __init__(self, problem: SearchProblem, *, seed: int, episodes: int) -> None:
        self.problem = problem
        self.seed = seed
        self.episodes = episodes
        self.options: Mapping[str, Any] = {}

    @classmethod
    def option_owner(cls) -> Callable[..., Any]:
        """Return what takes the options: its signature and docstring say what they are."""
        return cls if cls.own_options is None else cls.own_options

    @classmethod
    def default_options(cls) -> dict[str, Any]:
        """Return the selector's own options, by name, with their defaults."""
        return parameter_defaults(cls.option_owner(), without=_GIVEN)

    @classmethod
    def option_types(cls) -> dict[str, Any]:
        """Return the types of the selector's own options, by name."""
        return parameter_types(cls.option_owner(), without=_GIVEN)

    @classmethod
    def check_ranges(cls, options: Mapping[str, Any]) -> None:
        """Refuse options that no problem could go with, before there is a problem.

        Args:
            options: All options, defaults too, of the right types.

        Raises:
            ConfigError: An option is out of its range.
        """
        if cls.own_options is not None:
            cls.own_options(**options)

    @classmethod  # noqa: B027 (some go with every search)
    def check_setting(cls, options: Mapping[str, Any], setting: SearchSetting) -> None:
        """Refuse options that a search could not go with, before there is a problem.

        Args:
            options: All options, defaults too, in their ranges.
            setting: What is known of the search.

        Raises:
            ConfigError: An option contradicts it.
        """

    def use_folder(self, folder: Path) -> None:  # noqa: B027 (most selectors have nothing to keep)
        """Keep files of the selector's own in the search's folder; none are needed to go on."""

    @abstractmethod
    def propose(self) -> list[Proposal]:
        """Return the plans to score next, one or more; none when the selector has nothing more to try."""

    @abstractmethod
    def observe(self, proposals: Sequence[Proposal], rewards: Sequence[float]) -> None:
        """Take note of the rewards of the plans proposed last.

        Args:
            proposals: The plans that were scored: all that were proposed, or the first of them when the
                search has come to its end.
            rewards: Their rewards, in order.
        """

    @abstractmethod
    def state(self) -> SelectorState:
        """Return what it takes to go on from here, between `observe` and `propose`."""

    @abstractmethod
    def restore(self, state: SelectorState) -> None:
        """Take over a state that `state` returned under the same problem, seed and options."""


def generator_state(generator: np.random.Generator) -> dict[str, Any]:
    """Return the state of a numpy generator as plain JSON values."""
    return dict(generator.bit_generator.state)


def restore_generator(generator: np.random.Generator, state: Mapping[str, Any]) -> None:
    """Put a numpy generator into a state that `generator_state` returned."""
    generator.bit_generator.state = dict(state)
