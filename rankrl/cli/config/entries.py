"""Selectors that are compared, as a user names them."""

from __future__ import annotations

import re

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException

from rankrl.errors import ConfigError
from rankrl.plan_search.selectors import SelectorEntry, check_selector, selector_class


def selector_entry(text: str) -> SelectorEntry:
    """Return a selector that is compared from what a user calls it, such as `bayes` or `ddpg:noise=0.1`.

    Values are read as on the command line; one with commas stands in brackets: `features=[macs,curve]`.
    """
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
    return SelectorEntry(text, selector, options)
