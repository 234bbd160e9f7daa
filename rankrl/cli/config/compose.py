"""Read a command line, compose its configuration with Hydra, and write its help page."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import typing
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, entry_points, version
from itertools import islice
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.hydra import Hydra

# Hydra has no public way to tell flags from overrides, or to add folders.
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rankrl.cli.config.schema import TASKS, config_folder, group_choices, group_names, store_groups
from rankrl.errors import ConfigError

_PLUGINS = "rankrl.plugins"  # the group of entry points whose modules are imported at every start
COMPOSITION_ERRORS = (HydraException, OmegaConfBaseException, ValueError, KeyError, TypeError, AssertionError)
"""Errors of composing: AssertionError is OmegaConf's for keys of values, the builtin others are Hydra's."""
Composed = Callable[[Sequence[str]], DictConfig]
"""Returns the configuration of overrides with Hydra's section, read-only."""
# Lines of Hydra's and OmegaConf's messages without information about the fault.
_BOILERPLATE = re.compile(r"Error parsing override|See https://|(full_key|object_type|reference_type)[:=]|\^")
_TOO_DEEP = "the command line holds lists or mappings that are nested too deeply; give plain values"


def parsed_flags(arguments: Sequence[str]) -> Namespace:
    """Return Hydra's flags on a command line, its overrides in `overrides`."""
    return get_args_parser().parse_known_args(list(arguments))[0]


@contextmanager
def composing(flags: Namespace | None = None) -> Iterator[Composed]:
    """Yield what composes, with the folders and the main file that Hydra's flags name."""
    flags = parsed_flags([]) if flags is None else flags

    @cache
    def once(overrides: tuple[str, ...]) -> DictConfig:
        config = compose(flags.config_name or "config", list(overrides), return_hydra_config=True)
        OmegaConf.set_readonly(config, True)
        return config

    store_groups()  # plugins may have registered choices
    own = str(Path(flags.config_path or config_folder()).absolute())
    with initialize_config_dir(version_base="1.3", config_dir=own):
        if flags.config_dir is not None:
            GlobalHydra.instance().clear()
            path = create_config_search_path(own)
            added = f"file://{Path(flags.config_dir).absolute()}"
            path.prepend("command-line", added, SearchPathQuery(provider="schema"))
            Hydra.create_main_hydra2(task_name="app", config_search_path=path)
        yield lambda overrides: once(tuple(overrides))


def plain_values(config: DictConfig) -> dict[str, Any]:
    """Return the values of a configuration without Hydra's section, resolved."""
    own = OmegaConf.masked_copy(config, [str(name) for name in config if name != "hydra"])
    values: Any = OmegaConf.to_container(own, resolve=True, throw_on_missing=True)
    return dict(values)


def offered_choices(group: str) -> list[str]:
    """Return the choices of a group; within a composition those in folders that flags add, too."""
    if not GlobalHydra.instance().is_initialized():
        return group_choices(group)
    loader: Any = GlobalHydra.instance().config_loader()  # whose own method copies all files each time
    return sorted(loader.repository.get_group_options(group, ObjectType.CONFIG))


# Characters with a meaning of their own in values: lists, mappings, quotes, interpolations, escapes.
_SYNTAX = re.compile(r"""[\[\]{}'"\\]|\$\{""")
_INTERPOLATION = re.compile(r"\$\{[^'\"\\]*\}")  # which Hydra reads unquoted unless it holds another


def readable_arguments(arguments: Sequence[str]) -> list[str]:
    """Rewrite arguments for Hydra: overrides before flags, text quoted where necessary.

    Line ends, which scripts written on Windows have, are removed. Values between commas are quoted one by
    one, so that several values stay a sweep. Only values that Hydra cannot read, and that have no brackets,
    quotes or interpolations, are changed; `resume=` is read without Hydra.
    """
    actions = get_args_parser()._option_string_actions
    with_values = {flag for flag, action in actions.items() if action.nargs is None}
    overrides, others, before = [], [], ""
    for argument in (each.rstrip("\r\n") for each in arguments):
        if before not in with_values and re.match(r"[^-].*=|~", argument, re.DOTALL):
            overrides.append(_with_quotes(argument))
        elif argument or before in with_values:
            others.append(argument)
        before = argument
    return [*overrides, *others]


def quoted(value: str) -> str:
    """Quote text for Hydra, which then takes any characters literally."""
    # Only backslashes before a quote need escaping.
    text = re.sub(r"(\\*)('|$)", lambda match: 2 * match[1] + ("\\'" if match[2] else ""), value)
    return f"'{text}'"


def _is_readable(argument: str) -> bool:
    try:
        OverridesParser.create().parse_override(argument)
    except (HydraException, RecursionError):
        return False
    return True


def _with_quotes(argument: str) -> str:
    key, _, value = argument.partition("=")
    if key in ("", "resume") or key[0] == "~" or _is_readable(argument):
        return argument
    if _INTERPOLATION.fullmatch(value):
        return f"{key}={quoted(value)}"
    called = re.match(r"\s*\w+\(", value) or (re.search(r"[()]", value) and "," in value)
    texts = value.split(",")
    # A line end in the middle, or nothing between two commas, is a mistake rather than text.
    if called or _SYNTAX.search(value) or not value.isprintable() or not all(texts):
        return argument
    # Shells leave `~` alone in the middle of a word.
    texts = [os.path.expanduser(text) if text.startswith("~/") else text for text in texts]
    parts = (text if _is_readable(f"{key}={text}") else quoted(text) for text in texts)
    return f"{key}={','.join(parts)}"


# Values of one sweep that are composed before it starts, to keep the start fast; every job checks its own.
_MOST_TRIED = 30
_MOST_SWEPT = 10_000  # bounds the expansion of ranges, which may be endless


def parsed_overrides(overrides: Sequence[str]) -> list[Override]:
    try:
        if any("\0" in each.encode().decode() for each in overrides):
            raise ConfigError("the command line holds a zero byte; leave it out")
        return OverridesParser.create().parse_overrides(list(overrides))
    except UnicodeError as error:
        raise ConfigError(f"the command line is no valid text ({error}); write it in UTF-8") from error
    except HydraException as error:
        broken = next((each for each in overrides if not _is_readable(each)), "")
        advice = "Options are written NAME=VALUE, without dashes"
        if "=" in broken:
            key, _, value = broken.partition("=")
            example = shlex.quote(f"{key}={quoted(value)}")
            advice = f"Text with brackets or quotes in it is quoted: {example}, within a list each by itself"
        raise ConfigError(
            f"the command line cannot be parsed at {broken!r}: {in_words(error)}. {advice}"
        ) from error
    except RecursionError as error:
        raise ConfigError(_TOO_DEEP) from error


def with_swept(config: DictConfig, overrides: Iterable[object]) -> list[Override]:
    """Parse overrides, behind those that the configuration itself sweeps over."""
    swept = (OmegaConf.select(config, "hydra.sweeper.params") or {}).items()
    return parsed_overrides([*(f"{name}={value}" for name, value in swept), *map(str, overrides)])


def tried_overrides(overrides: Sequence[Override]) -> Iterator[list[str]]:
    """Yield the overrides with the first value of every sweep, then with each other value of each sweep."""
    values = [override_values(override) for override in overrides]
    first = [each[0] for each in values]
    yield first
    for index, each in enumerate(values):
        yield from ([*first[:index], value, *first[index + 1 :]] for value in each[1:_MOST_TRIED])


def override_values(override: Override) -> list[str]:
    """Expand an override into one for every value that it sweeps over."""
    line, sweep = override.input_line or "", typing.cast(Any, override.value())
    if not override.is_sweep_override():
        return [line]
    key = line.partition("=")[0]
    if isinstance(sweep, IntervalSweep):  # which some sweepers understand
        return [f"{key}={sweep.start}"]
    try:
        if isinstance(sweep, Glob):
            values = sweep.filter(offered_choices(override.key_or_group))
        else:
            values = list(islice(override.sweep_string_iterator(), _MOST_SWEPT + 1))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{line} has a sweep among the values of another; write all values out") from error
    if not 0 < len(values) <= _MOST_SWEPT:
        raise ConfigError(f"{line} stands for no value, or for more than {_MOST_SWEPT}; write them out")
    return [f"{key}={value}" for value in values]


def in_words(error: BaseException) -> str:
    """Rewrite an error of Hydra's or OmegaConf's as one paragraph, with the option it concerns."""
    if isinstance(error, RecursionError):
        return _TOO_DEEP
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


_SUBDIRECTORY = "hydra.sweep.subdir"
_NAMED_AFTER_JOB = f"{_SUBDIRECTORY}=${{hydra:job.override_dirname}}"
_EXCLUDED = "hydra.job.config.override_dirname.exclude_keys"


def sweep_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments, for a sweep with those that name each job's folder after its varied options.

    `rankrl -m dataset=mnist seed=0,1` gets the folders `seed-0` and `seed-1`: names stay the same when values
    are added later, and leave out options that all jobs share.
    """
    parsed = parsed_flags(arguments)
    overrides = {override.key_or_group: override for override in parsed_overrides(parsed.overrides)}
    if not (parsed.multirun or "experiment" in overrides):
        return list(arguments)
    options = {name: each for name, each in overrides.items() if not name.startswith(("hydra.", "hydra/"))}
    shared = ",".join(f"'{name}'" for name, each in options.items() if not each.is_sweep_override())
    varied = any(each.is_sweep_override() for each in options.values())
    named = [_NAMED_AFTER_JOB] if varied and _SUBDIRECTORY not in overrides else []
    return [f"{_EXCLUDED}=[{shared}]", *named, *arguments]


def is_added(argument: str) -> bool:
    """Tell whether an argument is one of those that `sweep_arguments` adds."""
    return argument == _NAMED_AFTER_JOB or argument.startswith(f"{_EXCLUDED}=")


def installed_plugins() -> dict[str, str]:
    """Return the plugin modules in the entry points of installed packages, and the package of each."""
    return {each.module: each.dist.name if each.dist else each.name for each in entry_points(group=_PLUGINS)}


def load_plugins(modules: Sequence[str] = ()) -> None:
    """Import the installed plugins and further modules, which register what they define."""
    installed = installed_plugins()
    for module in (*installed, *modules):
        try:
            importlib.import_module(module)
        except Exception as error:  # a third party's module may raise anything
            advice = "plugins names modules in the current folder, or of installed packages"
            if module in installed:
                advice = f"mend or remove the package {installed[module]}, which has it in {_PLUGINS}"
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(f"the plugin {module} cannot be imported ({reason}); {advice}") from error


def named_plugins(flags: Namespace) -> list[str]:
    """Return the plugins named on a command line, or in the experiment that it chooses."""
    given = [each for each in parsed_overrides(flags.overrides) if not each.is_sweep_override()]
    values: dict[str, Any] = {each.key_or_group: each.value() for each in given}
    modules, experiment = values.get("plugins", []), values.get("experiment")
    if "plugins" not in values and isinstance(experiment, str):
        folders = [each for each in (flags.config_dir, flags.config_path, config_folder()) if each]
        files = [Path(folder, "experiment", f"{experiment}.yaml") for folder in folders]
        for file in [each for each in files if each.is_file()][:1]:
            modules = OmegaConf.select(OmegaConf.load(file), "plugins", default=[])
    return [str(each) for each in (modules if isinstance(modules, list | ListConfig) else [modules]) if each]


def help_page(config: DictConfig) -> str:
    """Return the page: tasks, launchers, groups with their choices, and all options with their values."""
    about = config.hydra.help
    groups = {name: ", ".join(offered_choices(name)) for name in group_names()}
    values: Any = {key: config._get_node(key) for key in config if key != "hydra"}
    plugins = {**installed_plugins(), **dict.fromkeys(config.plugins, "plugins=")}
    parts = {
        "Tasks (task=NAME)": _columns(TASKS),
        "Groups (GROUP=CHOICE)": _columns(groups),
        **({"Plugins": _columns(plugins)} if plugins else {}),
        "Launchers of a sweep (rankrl -m hydra/launcher=NAME ...)": "  "
        + ", ".join(offered_choices("hydra/launcher")),
        "Options and their values with these choices (OPTION=VALUE)": OmegaConf.to_yaml(values).rstrip(),
    }
    return "\n\n".join([about.header, *(text for part in parts.items() for text in part), about.footer])


def version_line() -> str:
    try:
        return f"rankrl {version('rankrl')}"
    except PackageNotFoundError:
        return "rankrl, not installed: run from its source tree"


def _columns(rows: Mapping[str, str]) -> str:
    width = max(map(len, rows))
    return "\n".join(f"  {name:{width}}  {text}" for name, text in rows.items())
