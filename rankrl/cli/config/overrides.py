"""The command line's overrides, checked before Hydra runs."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rankrl.cli.config.applicable import check_applicable
from rankrl.cli.config.choices import group_names
from rankrl.cli.config.composition import composed_config, composing, offered_choices, parsed_flags
from rankrl.cli.config.quoting import is_readable, quoting_advice
from rankrl.cli.config.schema import AppConfig
from rankrl.cli.config.structured import built
from rankrl.cli.config.tables import TABLES
from rankrl.cli.config.values import check_value, check_values
from rankrl.errors import ConfigError, did_you_mean

# Values of one sweep that are tried before it starts; Hydra itself checks every job.
_MOST_TRIED = 30
_MOST_SWEPT = 10_000
_TOO_DEEP = "the command line holds lists or mappings that are nested too deeply; give plain values"


def check_overrides(arguments: Sequence[str]) -> None:
    """Compose the configuration once, so that a mistake gives one paragraph instead of Hydra's trace.

    Of an option that sweeps over several values each is tried, with the first of the others; flags are left
    to Hydra.

    Raises:
        ConfigError: An option or value is unknown, of the wrong type, cannot be parsed, or has no effect; the
            message gives the nearest known one, or what to do.
    """
    flags = parsed_flags(arguments)
    parsed = parsed_overrides(flags.overrides)
    with composing(flags):
        for override in parsed:
            for value in _values(override):
                _check_override(*parsed_overrides([value]))
        try:
            parsed = [*_swept_by_configuration(parsed, multirun=flags.multirun), *parsed]
            for overrides in _tried(parsed):
                config = composed_config(overrides)
                plain: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
                check_values(plain)
                check_applicable(plain, [each.key_or_group for each in parsed_overrides(overrides)])
                built(AppConfig, plain)
        except RecursionError as error:
            raise ConfigError(_TOO_DEEP) from error
        # Hydra itself raises ValueError for some choices of groups that it cannot read.
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            raise ConfigError(_explain(error, parsed)) from error


def composed(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the configuration that overrides stand for, plain values; empty where one is unknown."""
    if not GlobalHydra.instance().is_initialized():  # as it is within a run
        with composing():
            return composed(overrides)
    try:
        plain: Any = OmegaConf.to_container(composed_config(overrides), resolve=True)
    except (HydraException, OmegaConfBaseException, ValueError):
        return {}
    return typing.cast(dict[str, Any], plain)


def longest_overrides(overrides: Sequence[str], *, multirun: bool) -> list[str]:
    """Return overrides with the longest value of every sweep: what a job's folder is named after at most.

    Hydra's compose must be initialised.
    """
    parsed = parsed_overrides(overrides)
    swept = _swept_by_configuration(parsed, multirun=multirun)
    return [max(_values(each), key=len) for each in (*swept, *parsed)]


def first_values(overrides: Sequence[str]) -> list[str]:
    """Return overrides with the first value of every sweep: what the first job gets."""
    return next(_tried(parsed_overrides(overrides)))


def parsed_overrides(overrides: Sequence[str]) -> list[Override]:
    """Return overrides, parsed.

    Raises:
        ConfigError: One cannot be parsed.
    """
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
        raise ConfigError(
            f"the command line cannot be parsed at {broken!r}: {_first_line(error)}. {advice}"
        ) from error
    except RecursionError as error:
        raise ConfigError(_TOO_DEEP) from error


def _check_override(override: Override) -> None:
    """Refuse a group that is set to something else than a name, and what the schema does not allow.

    Where OmegaConf refuses a value it does not say which ones are allowed.
    """
    if override.is_delete():
        return
    name, value = override.key_or_group, override.value()
    if any(part.startswith("__") for part in name.split(".")):  # OmegaConf would set the attribute
        raise ConfigError(f"the option {name!r} is unknown. `rankrl --help` lists all options.")
    if name in group_names() and not isinstance(value, str) and (name, value) != ("experiment", None):
        raise ConfigError(
            f"{override.input_line}: a group is chosen by name, one of "
            f"{', '.join(offered_choices(name))}; its options are set one by one, as {name}.OPTION=VALUE"
        )
    if name not in group_names():
        check_value(name, value)


def _swept_by_configuration(overrides: Sequence[Override], *, multirun: bool) -> list[Override]:
    """Return the sweeps that the configuration itself asks for, such as an experiment's.

    Raises:
        ConfigError: There are sweeps where nothing asks for more than one run.
    """
    hydra = None
    if multirun or {"experiment", "hydra.mode"} & {each.key_or_group for each in overrides}:
        hydra = composed_config(next(_tried(overrides)), with_hydra=True).hydra
    if hydra is None or not (multirun or hydra.mode == RunMode.MULTIRUN):
        for override in overrides:
            if override.is_sweep_override():
                raise ConfigError(
                    f"{override.input_line} gives several values, a job for each; add -m for a sweep, or "
                    f"quote what is one value: {override.key_or_group}=\"'...'\""
                )
        return []
    swept = OmegaConf.select(hydra, "sweeper.params") or {}
    found = parsed_overrides([f"{key}={value}" for key, value in swept.items()])
    for override in found:
        for value in _values(override):
            _check_override(*parsed_overrides([value]))
    return found


def _tried(overrides: Sequence[Override]) -> Iterator[list[str]]:
    """Yield the overrides with the first value of every sweep, then with each further value of each sweep."""
    values = [_values(override) for override in overrides]
    first = [each[0] for each in values]
    yield first
    for index, each in enumerate(values):
        for value in each[1:_MOST_TRIED]:
            yield [*first[:index], value, *first[index + 1 :]]


def _values(override: Override) -> list[str]:
    """Return the override once for every value that it sweeps over."""
    line = override.input_line or ""
    if not override.is_sweep_override():
        return [line]
    key = line.partition("=")[0]
    found: Any = override.value()
    if isinstance(found, Glob):
        return [f"{key}={name}" for name in found.filter(offered_choices(override.key_or_group))] or [line]
    if not override.is_discrete_sweep():  # an interval, which some sweepers understand
        return [f"{key}={found.start}"] if isinstance(found, IntervalSweep) else [line]
    try:
        values = list(islice(override.sweep_string_iterator(), _MOST_SWEPT + 1))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{line} has a sweep among the values of another; write all values out") from error
    if len(values) > _MOST_SWEPT:
        raise ConfigError(f"{line} sweeps over more than {_MOST_SWEPT} values; give fewer")
    return [f"{key}={value}" for value in values]


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _explain(error: BaseException, overrides: Sequence[Override]) -> str:
    """Turn Hydra's or OmegaConf's message into one that names the nearest option."""
    text = str(error)
    if "primary config" in text:  # without it there are no options to be near to
        return f"{_first_line(error)} --config-name=NAME is a file NAME.yaml with `defaults: [config, ...]`"
    missing = re.search(r"Missing mandatory value: .*?full_key: (\S+)", text, re.DOTALL)
    if missing is not None:
        option = missing.group(1)
        group_of = option.partition(".")[0]
        choice = "the command"
        if group_of in TABLES:
            choice = f"{group_of}={composed_config(_chosen(overrides))[group_of][TABLES[group_of].key]}"
        return f"{choice} needs {option}=VALUE. `rankrl --help` lists all options."
    group = re.search(r"Could not find '([^']+)/([^'/]+)'", text)
    if group is not None:
        name, value = group.groups()
        known = offered_choices(name)
        return f"{name}={value} is unknown; choose from {', '.join(known)}.{did_you_mean(value, known)}"
    unknown = re.search(
        r"Could not override '([^']+)'|Could not find '([^']+)'|Key '([^']+)' is not in", text
    )
    if unknown is not None:
        name = next(part for part in unknown.groups() if part)
        written = [o.key_or_group for o in overrides if o.key_or_group.endswith(name)]
        name = written[0] if written else name
        known_options = _known_options(_chosen(overrides))
        if name in known_options:  # a mapping, and it is its keys that are new
            return f"{name} gets new entries with a plus in front: '+{name}={{NAME: VALUE}}'"
        mapping = name.rpartition(".")[0]
        if mapping in known_options and not any(each.startswith(f"{mapping}.") for each in known_options):
            return f"{mapping} gets new entries with a plus in front: +{name}=VALUE"
        return (
            f"the option {name!r} is unknown.{_nearest(name, known_options, _chosen(overrides))} "
            "`rankrl --help` lists all options."
        )
    config: Any = OmegaConf.to_container(composed_config(_chosen(overrides)))
    for override in overrides:
        for value in _values(override):
            check_value(override.key_or_group, parsed_overrides([value])[0].value(), config)
    where = re.search(r"full_key: (\S+)", text)
    place = f"{where.group(1)}: " if where else ""
    reason = f": {_first_line(error.__cause__)}" if error.__cause__ is not None and not where else ""
    message = f"{place}{_first_line(error).rstrip('.')}{reason.rstrip('.')}"
    return f"{message}. `rankrl --cfg job` shows the options and their values."


def _nearest(name: str, options: Collection[str], chosen: Sequence[str]) -> str:
    """Return " Did you mean ...?" for the nearest option: of the group, of its other choices, of all.

    Args:
        name: What was written.
        options: All options with the choices of groups that were made.
        chosen: These choices, as overrides.
    """
    group, _, option = name.partition(".")
    near = _nearest_within(group, option, options)
    if near is not None:
        return f" Did you mean {near!r}?"
    choice = next((each.partition("=")[2] for each in chosen if each.startswith(f"{group}=")), "")
    if group in TABLES and choice in TABLES[group].known() and TABLES[group].types(choice)[1]:
        return f" Options that {group}={choice} passes on begin with a plus: did you mean '+{name}'?"
    others = _options_of_choices(group)
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


def _chosen(overrides: Sequence[Override]) -> list[str]:
    """Return those overrides that choose a group, with the first value of each sweep."""
    return [line for line in next(_tried(overrides)) if line.partition("=")[0] in group_names()]


def _options_of_choices(group: str) -> dict[str, str]:
    """Return all options that a group has with one choice or another, and the choice."""
    found: dict[str, str] = {}
    for choice in offered_choices(group):
        for name in _dotted(_node(group, choice), f"{group}."):
            found.setdefault(name, f"{group}={choice}")
    return found


def _node(group: str, choice: str) -> DictConfig:
    """Return what the configuration holds for a choice of a group."""
    registered = TABLES.get(group)
    if registered is not None and choice in registered.known():  # composing takes a tenth of a second
        return OmegaConf.create(registered.node(choice))
    return typing.cast(DictConfig, composed_config([f"{group}={choice}"])[group])


def _known_options(chosen: Sequence[str]) -> dict[str, None]:
    """Return all options with these choices of groups, dotted."""
    try:
        return dict.fromkeys(_dotted(composed_config(chosen), ""))
    except (HydraException, OmegaConfBaseException, ValueError):  # the choices are what is wrong
        return dict.fromkeys(_dotted(composed_config(), ""))


def _dotted(config: DictConfig, prefix: str) -> Iterator[str]:
    for key in config:
        name = f"{prefix}{key!s}"
        yield name
        value = config._get_node(key)
        if isinstance(value, DictConfig) and not value._is_none() and not value._is_missing():
            yield from _dotted(value, f"{name}.")
