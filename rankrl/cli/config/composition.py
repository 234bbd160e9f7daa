"""Compose a configuration from arguments: quote values, parse overrides, expand sweeps."""

from __future__ import annotations

import copy
import json
import re
import shlex
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.hydra import Hydra
from hydra._internal.utils import (  # Hydra has no public way to tell flags from overrides, or to add folders
    create_config_search_path,
    get_args_parser,
)
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from rankrl.cli.config.choices import config_folder, group_choices
from rankrl.errors import ConfigError

MAIN_FILE = "config"
_KEPT = 8  # configurations cached: of a sweep's many, only the first is composed again


@dataclass(frozen=True)
class _Files:
    """Sources of a composition: rankrl's folder `configs`, the folder that a flag adds, the main file."""

    own: Path
    added: Path | None
    main: str


@dataclass(frozen=True)
class _Composing:
    """Sources of a `composing` block, and its configurations by (overrides, whether with Hydra's section)."""

    files: _Files
    known: dict[tuple[tuple[str, ...], bool], DictConfig] = field(default_factory=dict)

    def config(self, overrides: tuple[str, ...], *, with_hydra: bool) -> DictConfig:
        key = overrides, with_hydra
        if key not in self.known:
            if with_hydra:
                config = compose(self.files.main, overrides=list(overrides), return_hydra_config=True)
            else:  # copying takes a tenth of the time of composing
                config = copy.deepcopy(self.config(overrides, with_hydra=True))
                OmegaConf.set_readonly(config, None)
                with open_dict(config):
                    del config["hydra"]
            OmegaConf.set_readonly(config, True)
            self.known[key] = config
            while len(self.known) > _KEPT:
                del self.known[next(iter(self.known))]
        return self.known[key]


_composing: ContextVar[_Composing | None] = ContextVar("composing", default=None)


def parsed_flags(arguments: Sequence[str]) -> Namespace:
    """Return Hydra's flags on a command line, its overrides in `overrides`."""
    return get_args_parser().parse_known_args(list(arguments))[0]


@contextmanager
def composing(flags: Namespace | None = None) -> Iterator[None]:
    """Enable `composed_config` within the block, which composes each configuration once.

    A block within another one with the same flags shares its configurations.
    """
    files, outer = _files(flags), _composing.get()
    if outer is not None and outer.files == files:
        yield
        return
    token = _composing.set(_Composing(files))
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(files.own)):
            if files.added is not None:
                GlobalHydra.instance().clear()
                path = create_config_search_path(str(files.own))
                path.prepend("command-line", f"file://{files.added}", SearchPathQuery(provider="schema"))
                Hydra.create_main_hydra2(task_name="app", config_search_path=path)
            yield
    finally:
        _composing.reset(token)


def composed_config(overrides: Sequence[str] = (), *, with_hydra: bool = False) -> DictConfig:
    """Compose the configuration with these overrides, within `composing` or a run of Hydra's.

    Within `composing` it is read-only, since it is shared.
    """
    composing_now = _composing.get()
    if composing_now is not None:
        return composing_now.config(tuple(overrides), with_hydra=with_hydra)
    name = str(HydraConfig.get().job.config_name or MAIN_FILE)
    return compose(name, overrides=list(overrides), return_hydra_config=with_hydra)


def offered_choices(group: str) -> list[str]:
    """Return the choices of a group; within a composition those in folders that flags add, too."""
    if not GlobalHydra.instance().is_initialized():
        return group_choices(group)
    return sorted(GlobalHydra.instance().config_loader().get_group_options(group))


def _files(flags: Namespace | None) -> _Files:
    """Return the sources of a composition with these flags."""
    own, added = config_folder(), None
    if flags is None:
        return _Files(own, added, MAIN_FILE)
    if flags.config_path is not None:
        own = _folder("--config-path", flags.config_path)
    if flags.config_dir is not None:
        added = _folder("--config-dir", flags.config_dir)
    return _Files(own, added, flags.config_name or MAIN_FILE)


def _folder(flag: str, name: str) -> Path:
    path = Path(name)
    if flag == "--config-path" and not path.is_absolute():
        raise ConfigError(
            f"{flag}={name} would be looked for in rankrl's own code; give the whole path, "
            f"{flag}={path.absolute()}"
        )
    if not path.is_dir():
        raise ConfigError(f"{flag}={name}: there is no such folder; give one that holds GROUP/CHOICE.yaml")
    return path.absolute()


# Characters with a meaning of their own in values: lists, mappings, quotes, interpolations, escapes.
_SYNTAX = re.compile(r"""[\[\]{}'"\\]|\$\{""")
_INTERPOLATION = re.compile(r"\$\{[^'\"\\]*\}")  # which Hydra reads unquoted unless it holds another
_FUNCTION = re.compile(
    r"\s*(?:choice|range|interval|glob|sort|shuffle|tag|extend_list|str|int|float|bool|json_str)\("
)
_WORD = re.compile(r"[\w.,/+:-]*", re.ASCII)  # values that are readable without running the parser
_SHELL = re.compile(r"[\"\\$`!]")


def readable_arguments(arguments: Sequence[str]) -> list[str]:
    """Rewrite arguments for Hydra: overrides before flags, text quoted where necessary.

    Line ends, which scripts written on Windows have, are removed. Values between commas are quoted one by
    one, so that several values stay a sweep. Only values that Hydra cannot read, and that have no brackets,
    quotes or interpolations, are changed; `resume=` is read without Hydra.
    """
    overrides, others = [], []
    before = ""
    for argument in (each.rstrip("\r\n") for each in arguments):
        if before not in _flags_with_values() and re.match(r"[^-].*=|~", argument, re.DOTALL):
            overrides.append(_with_quotes(argument))
        elif argument or before in _flags_with_values():
            others.append(argument)
        before = argument
    return [*overrides, *others]


@cache
def _flags_with_values() -> frozenset[str]:
    actions = get_args_parser()._option_string_actions
    return frozenset(flag for flag, action in actions.items() if action.nargs is None)


def quoted(key: str, value: str) -> str:
    """Return an override whose value is quoted, so that Hydra takes any characters literally."""
    return f"{key}={_in_quotes(value)}"


def in_hydra(value: Any) -> str:
    """Write a plain value in Hydra's syntax."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{in_hydra(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(in_hydra, value))}]"
    return _in_quotes(value) if isinstance(value, str) else json.dumps(value)


def quoting_advice(argument: str) -> str:
    """Return the argument as it can be pasted into a shell where its value is meant as text."""
    line = quoted(*_parts(argument))
    return shlex.quote(line) if _SHELL.search(line) else f'"{line}"'


def is_readable(argument: str) -> bool:
    """Tell whether Hydra can read an override."""
    try:
        OverridesParser.create().parse_override(argument)
    except (HydraException, RecursionError):
        return False
    return True


def _with_quotes(argument: str) -> str:
    key, value = _parts(argument)
    if _INTERPOLATION.fullmatch(value) and not is_readable(argument):
        return quoted(key, value)
    called = re.search(r"[()]", value) and ("," in value or _FUNCTION.match(value))
    untouched = key in ("", "resume") or key[0] == "~" or _SYNTAX.search(value) or called
    if untouched or _WORD.fullmatch(value) or is_readable(argument):
        return argument
    texts = value.split(",")
    changed = ",".join(text if is_readable(f"{key}={text}") else _in_quotes(_at_home(text)) for text in texts)
    # A line end in the middle, or nothing between two commas, is a mistake rather than text.
    return (
        f"{key}={changed}"
        if value.isprintable() and all(texts) and is_readable(f"{key}={changed}")
        else argument
    )


def _parts(argument: str) -> tuple[str, str]:
    key, _, value = argument.partition("=")
    return key, value


def _in_quotes(value: str) -> str:
    """Quote text for Hydra, where only backslashes before a quote need escaping."""
    text = re.sub(r"(\\*)('|$)", lambda match: 2 * match[1] + ("\\'" if match[2] else ""), value)
    return f"'{text}'"


def _at_home(text: str) -> str:
    """Expand `~` in a path, which shells leave alone in the middle of a word."""
    return str(Path(text).expanduser()) if text.startswith("~/") else text


# Values of one sweep that are composed before it starts, to keep the start fast; Hydra checks every job.
_MOST_TRIED = 30
_MOST_SWEPT = 10_000  # bounds the expansion of ranges, which may be endless
ALL_COMBINATIONS = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
"""Hydra's own sweeper."""
COMPOSITION_ERRORS = (HydraException, OmegaConfBaseException, ValueError, KeyError, AssertionError)
"""Errors of composing: ValueError and KeyError are Hydra's, AssertionError OmegaConf's for keys of values."""
# Lines of Hydra's and OmegaConf's messages without information about the fault.
_BOILERPLATE = re.compile(r"Error parsing override|See https://|(full_key|object_type|reference_type)[:=]|\^")
_PAIRS = (("{", "}"), ("[", "]"), ("(", ")"))
TOO_DEEP = "the command line holds lists or mappings that are nested too deeply; give plain values"


def parsed_overrides(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides."""
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
    """Expand an override into one for every value that it sweeps over."""
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
    """Rewrite an error of Hydra's or OmegaConf's as one paragraph, with the option it concerns."""
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
    added = [f"hydra.job.config.override_dirname.exclude_keys=[{shared}]"]
    if _SUBDIRECTORY not in overrides and any(each.is_sweep_override() for each in options.values()):
        added.append(f"{_SUBDIRECTORY}=${{hydra:job.override_dirname}}")
    return [*added, *arguments]
