"""The command line's overrides, parsed, and the values that they sweep over."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from rankrl.cli.config.composition import offered_choices
from rankrl.cli.config.quoting import is_readable, quoting_advice
from rankrl.errors import ConfigError

# Values of one sweep that are tried before it starts; Hydra itself checks every job.
_MOST_TRIED = 30
_MOST_SWEPT = 10_000
ALL_COMBINATIONS = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
"""Hydra's own sweeper."""
COMPOSITION_ERRORS = (HydraException, OmegaConfBaseException, ValueError, KeyError, AssertionError)
"""What composing raises: Hydra ValueError and KeyError, too, OmegaConf AssertionError for keys of a value."""
# Lines of Hydra's and OmegaConf's messages that say nothing about the fault.
_BOILERPLATE = re.compile(r"Error parsing override|See https://|(full_key|object_type|reference_type)[:=]|\^")
_PAIRS = (("{", "}"), ("[", "]"), ("(", ")"))
TOO_DEEP = "the command line holds lists or mappings that are nested too deeply; give plain values"


def parsed_overrides(overrides: Sequence[str]) -> list[Override]:
    """Return overrides, parsed."""
    for override in overrides:
        try:
            readable = "\0" not in override.encode().decode()
        except UnicodeError:
            readable = False
        if not readable:
            raise ConfigError(f"{override!a} is no valid text; write it in UTF-8, without zero bytes")
    try:
        return OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        broken = next((each for each in overrides if not is_readable(each)), "")
        advice = "Options are written NAME=VALUE, without dashes"
        if "=" in broken:
            advice = (
                f"Text with brackets, quotes or commas in it is quoted: {quoting_advice(broken)}, "
                f"within a list or a mapping each text by itself. {advice}"
            )
        odd = any(broken.count(quote) % 2 for quote in "'\"")
        if odd or any(broken.count(opened) != broken.count(closed) for opened, closed in _PAIRS):
            advice = f"A bracket, a brace or a quote in it is not closed. {advice}"
        raise ConfigError(
            f"the command line cannot be parsed at {broken!r}: {in_words(error)}. {advice}"
        ) from error
    except RecursionError as error:
        raise ConfigError(TOO_DEEP) from error


def first_values(overrides: Sequence[str]) -> list[str]:
    """Return overrides with the first value of every sweep: what the first job gets."""
    return next(tried_overrides(parsed_overrides(overrides)))


def tried_overrides(overrides: Sequence[Override]) -> Iterator[list[str]]:
    """Yield the overrides with the first value of every sweep, then with each other value of each sweep."""
    values = [override_values(override) for override in overrides]
    first = [each[0] for each in values]
    yield first
    for index, each in enumerate(values):
        for value in each[1:_MOST_TRIED]:
            yield [*first[:index], value, *first[index + 1 :]]


def override_values(override: Override) -> list[str]:
    """Return the override once for every value that it sweeps over."""
    line = override.input_line or ""
    if not override.is_sweep_override():
        return [line]
    key = line.partition("=")[0]
    sweep: Any = override.value()
    if isinstance(sweep, IntervalSweep):  # which some sweepers understand
        return [f"{key}={sweep.start}"]
    try:
        values = (
            sweep.filter(offered_choices(override.key_or_group))
            if isinstance(sweep, Glob)
            else list(islice(override.sweep_string_iterator(), _MOST_SWEPT + 1))
        )
    except OmegaConfBaseException as error:
        raise ConfigError(f"{line} has a sweep among the values of another; write all values out") from error
    if not values:
        raise ConfigError(f"{line} stands for no value; give at least one, such as {key}=VALUE,VALUE")
    if len(values) > _MOST_SWEPT:
        raise ConfigError(f"{line} sweeps over more than {_MOST_SWEPT} values; give fewer")
    return [f"{key}={value}" for value in values]


def in_words(error: BaseException) -> str:
    """Return in one paragraph what an error of Hydra's or OmegaConf's says, and where."""
    lines = [line.strip() for line in str(error).splitlines()]
    text = " ".join(line for line in lines if line and not _BOILERPLATE.match(line)).rstrip(".")
    text = re.sub(r'\w+ raised while resolving interpolation: "?(.*?)"?$', r"\1", text)
    if not isinstance(error, HydraException | OmegaConfBaseException | ValueError):
        text = f"{type(error).__name__}: {text}".removesuffix(": ")
    place = re.search(r"full_key: (\S+)", str(error))
    if place is not None and place[1] not in text:
        text = f"{place[1]}: {text}"
    if error.__cause__ is None or str(error.__cause__).strip() in str(error):
        return text
    return f"{text}: {in_words(error.__cause__)}"
