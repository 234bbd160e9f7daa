"""Selectors that are compared: by name, or with options of their own, so that one may enter several times."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rankrl.errors import ConfigError
from rankrl.plan_search.selectors.registry import check_selector, selector_class


@dataclass(frozen=True)
class SelectorEntry:
    """A selector that is compared with others.

    Attributes:
        text: What it is called: NAME, or NAME:OPTION=VALUE,OPTION=VALUE.
        selector: Its name in the registry.
        options: Its options; those that it lacks have their defaults.
    """

    text: str
    selector: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @classmethod
    def parse(cls, text: str) -> SelectorEntry:
        """Read what a user calls it, such as `bayes` or `ddpg:policy=a.safetensors,noise=0.1`.

        Values are read as on the command line; one with commas stands in brackets: `features=[macs,curve]`.

        Raises:
            ConfigError: There is no such selector or option, or a value does not suit it.
        """
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.errors import OverrideParseException

        selector, _, rest = text.partition(":")
        selector_class(selector)  # an unknown name is refused before its options are read
        pairs = re.split(r",(?=\w+=)", rest) if rest else []
        if not all("=" in pair for pair in pairs):
            raise ConfigError(
                f"{text!r} is no selector with options; write NAME:OPTION=VALUE,OPTION=VALUE, for example "
                f"{selector}:plans_per_step=2"
            )
        try:
            read = OverridesParser.create().parse_overrides(pairs)
        except OverrideParseException as error:
            raise ConfigError(f"the options of {text!r} cannot be read: {error}") from error
        options = {each.key_or_group: each.value() for each in read}
        check_selector(selector, options)
        return cls(text, selector, options)

    @property
    def folder_name(self) -> str:
        """The text as the name of a folder."""
        return re.sub(r"[^A-Za-z0-9_.]+", "-", self.text)
