"""Hydra's and OmegaConf's errors in one paragraph, which names the nearest option."""

from __future__ import annotations

import difflib
import os
import re
import typing
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from rankrl.cli.config.choices import group_names
from rankrl.cli.config.composition import composed_config, offered_choices
from rankrl.cli.config.parsing import COMPOSITION_ERRORS, in_words, tried_overrides
from rankrl.cli.config.tables import TABLES
from rankrl.errors import did_you_mean

COMPLETE_ERRORS = "HYDRA_FULL_ERROR"
"""The environment variable with which Hydra raises errors, instead of printing them and leaving with 1."""


@contextmanager
def raised_errors() -> Iterator[None]:
    """Let Hydra raise its errors within the block."""
    before = os.environ.get(COMPLETE_ERRORS)
    os.environ[COMPLETE_ERRORS] = "1"
    try:
        yield
    finally:
        del os.environ[COMPLETE_ERRORS]
        if before is not None:
            os.environ[COMPLETE_ERRORS] = before


def explained(error: BaseException, overrides: Sequence[Override]) -> str:
    """Turn Hydra's or OmegaConf's message into one that names the nearest option."""
    text = str(error)
    if "primary config" in text:  # without it there are no options to be near to
        return f"{in_words(error)}. --config-name=NAME is a file NAME.yaml with `defaults: [config, ...]`"
    missing = re.search(r"Missing mandatory value: .*?full_key: (\S+)", text, re.DOTALL)
    if missing is not None:
        option = missing.group(1)
        group_of = option.partition(".")[0]
        choice = "the command"
        if group_of in TABLES:
            choice = f"{group_of}={composed_config(_made_choices(overrides))[group_of][TABLES[group_of].key]}"
        return f"{choice} needs {option}=VALUE. `rankrl --help` lists all options."
    twice = re.search(r"Multiple values for (\S+?)\.|(\S+) appears more than once", text)
    if twice is not None:
        name = twice[1] or twice[2]
        return f"{name} is chosen twice; choose it once, without a plus: {name}=NAME"
    group = re.search(r"Could not find '([^']+)/([^'/]+)'", text)
    if group is not None:
        name, value = group.groups()
        known = offered_choices(name)
        own = " One of your own needs plugins=[MODULE]." if name in TABLES else ""
        near = did_you_mean(value, known) or own
        return f"{name}={value} is unknown; choose from {', '.join(known)}.{near}"
    unknown = re.search(
        r"Could not override '([^']+)'|Could not find '([^']+)'|Key '([^']+)' is not in", text
    )
    if unknown is not None:
        name = next(part for part in unknown.groups() if part)
        name = next((each.key_or_group for each in overrides if each.key_or_group.endswith(name)), name)
        if not name.startswith("hydra"):  # where Hydra's own message says what to do
            return _unknown_option(name, _made_choices(overrides))
    return f"{in_words(error)}. `rankrl --cfg job` shows the options and their values."


def _unknown_option(name: str, choices: Sequence[str]) -> str:
    known = _known_options(choices)
    if name in known:  # a mapping, and it is its keys that are new
        return f"{name} gets new entries with a plus in front: '+{name}={{NAME: VALUE}}'"
    mapping = name.rpartition(".")[0]
    if mapping in known and not any(each.startswith(f"{mapping}.") for each in known):
        return f"{mapping} gets new entries with a plus in front: +{name}=VALUE"
    near = _nearest(name, known, choices)
    return f"the option {name!r} is unknown.{near} `rankrl --help` lists all options."


def _nearest(name: str, options: Collection[str], choices: Sequence[str]) -> str:
    """Return " Did you mean ...?" for the nearest option: of the group, of its other choices, of all."""
    group, _, option = name.partition(".")
    near = _nearest_within(group, option, options)
    if near is not None:
        return f" Did you mean {near!r}?"
    choice = next((each.partition("=")[2] for each in choices if each.startswith(f"{group}=")), "")
    if group in TABLES and choice in TABLES[group].known() and TABLES[group].types(choice)[1]:
        return f" Options that {group}={choice} passes on begin with a plus: did you mean '+{name}'?"
    others = _options_of_choices(group) if group in group_names() else {}
    if name in others:
        return f" It is one of {others[name]}."
    near = _nearest_within(group, option, others)
    if near is not None:
        return f" Did you mean {near!r} ({others[near]})?"
    return did_you_mean(name, [*options, *group_names()])


def _nearest_within(group: str, option: str, options: Collection[str]) -> str | None:
    within = [each.removeprefix(f"{group}.") for each in options if each.startswith(f"{group}.")]
    near = difflib.get_close_matches(option, within, n=1)
    return f"{group}.{near[0]}" if near else None


def _made_choices(overrides: Sequence[Override]) -> list[str]:
    """Return those overrides that choose a group, with the first value of each sweep."""
    return [line for line in next(tried_overrides(overrides)) if line.partition("=")[0] in group_names()]


def _options_of_choices(group: str) -> dict[str, str]:
    """Return all options that a group has with one choice or another, and the choice."""
    options: dict[str, str] = {}
    for choice in offered_choices(group):
        for name in _dotted(_node(group, choice), f"{group}."):
            options.setdefault(name, f"{group}={choice}")
    return options


def _node(group: str, choice: str) -> DictConfig:
    """Return what the configuration holds for a choice of a group."""
    registered = TABLES.get(group)
    if registered is not None and choice in registered.known():  # composing takes a tenth of a second
        return OmegaConf.create(registered.node(choice))
    return typing.cast(DictConfig, composed_config([f"{group}={choice}"])[group])


def _known_options(choices: Sequence[str]) -> dict[str, None]:
    """Return all options with these choices of groups, dotted."""
    try:
        return dict.fromkeys(_dotted(composed_config(choices), ""))
    except COMPOSITION_ERRORS:  # the choices are what is wrong
        return dict.fromkeys(_dotted(composed_config(), ""))


def _dotted(config: DictConfig, prefix: str) -> Iterator[str]:
    for key in config:
        name = f"{prefix}{key!s}"
        yield name
        value = config._get_node(key)
        if isinstance(value, DictConfig) and not value._is_none() and not value._is_missing():
            yield from _dotted(value, f"{name}.")
