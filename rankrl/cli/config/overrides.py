"""Check names and values of options, and explain Hydra's errors."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from decomposition.registry import registered
from rankrl.cli.config.applicable import check_applicable
from rankrl.cli.config.choices import TABLES, TASKS, Group, formats, group_names
from rankrl.cli.config.composition import (
    ALL_COMBINATIONS,
    COMPOSITION_ERRORS,
    TOO_DEEP,
    composed_config,
    composing,
    in_words,
    offered_choices,
    override_values,
    parsed_flags,
    parsed_overrides,
    tried_overrides,
)
from rankrl.cli.config.schema import AppConfig, Choice, built
from rankrl.errors import ConfigError, did_you_mean
from rankrl.option_types import check_option, check_options, shown
from rankrl.options.decomposition import AUTO
from rankrl.options.names import option_fields
from rankrl.options.timing import RUNTIMES


def check_values(config: Mapping[str, Any]) -> None:
    """Refuse a composed configuration that holds a value of the wrong type, or one that is not finite."""
    _check_typed(AppConfig, config, "")
    if config["task"] not in TASKS:
        raise ConfigError(
            f"there is no task {config['task']!r}; choose from {', '.join(TASKS)}."
            f"{did_you_mean(config['task'], TASKS)}"
        )
    _check_names(config)
    for group, prefix, name, options in _owned(config):
        if not options:
            continue
        owner = TABLES[group]
        types, takes_others = owner.types(name)
        others = {key: Any for key in options if key not in types} if takes_others else {}
        check_options(f"{owner.noun} {name!r}", prefix, options, {**types, **others})
    for name, seed in (
        ("seed", config["seed"]),
        *(("compare.seeds", each) for each in config["compare"]["seeds"]),
    ):
        if seed < 0:
            raise ConfigError(f"{name} must not be negative, got {seed}; any whole number from 0 on will do")


def _check_names(config: Mapping[str, Any]) -> None:
    """Refuse unknown formats and runtimes."""
    choice = config["decomposition"]
    if choice["format"] == AUTO:
        _check_known("decomposition.formats", "tensor format", choice["formats"] or (), formats())
    else:
        _check_known("decomposition.format", "tensor format", [choice["format"]], formats())
    runtimes = sorted({*RUNTIMES, *registered("runtime")})
    _check_known("export.runtime", "runtime", [config["export"]["runtime"]], runtimes)
    _check_known("export.runtimes", "runtime", config["export"]["runtimes"], runtimes)


def _check_known(option: str, noun: str, names: Collection[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(
                f"{option}: there is no {noun} {name!r}; choose from {', '.join(known)}."
                f"{did_you_mean(name, known)}"
            )


def check_value(name: str, value: Any, config: Mapping[str, Any] | None = None) -> None:
    """Refuse a value of the wrong type; unknown options are ignored here."""
    hint = _schema_type(name)
    if hint is None and config is not None:
        hint = _owned_type(name, config)
    if hint is None or hint == Choice or (isinstance(value, str) and "${" in value):
        return
    if dataclasses.is_dataclass(hint):
        _check_section(name, value, hint)
    else:
        check_option(name, value, hint)


def _schema_type(name: str) -> Any:
    """Return the annotation of an option of the schema, or None."""
    hint: Any = AppConfig
    for part in name.split("."):
        hints = typing.get_type_hints(hint) if dataclasses.is_dataclass(hint) else {}
        hint = hints.get(part)
    return hint


def _owned_type(option: str, config: Mapping[str, Any]) -> Any:
    """Return the annotation of an option that the schema leaves open, or None."""
    for group, prefix, name, _ in _owned(config):
        if option.startswith(f"{prefix}."):
            return TABLES[group].types(name)[0].get(option.removeprefix(f"{prefix}."))
    return None


def typed_options(config: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield every option with value and type; options of networks to pretrain on have the list's name.

    Raises:
        ConfigError: A choice of a group is unknown.
    """
    yield from _typed(AppConfig, config, "")
    owned = list(_owned(config))
    for network in config["pretrain"]["networks"]:
        owned += [("model", "", _name("pretrain.networks", network, TABLES["model"]), network)]
    for group, prefix, name, options in owned:
        types = TABLES[group].types(name)[0] if options else {}
        for key, value in options.items():
            yield f"{prefix}.{key}" if prefix else "pretrain.networks", value, types.get(key, Any)


def _typed(section: type, values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any, Any]]:
    hints = typing.get_type_hints(section)
    for name in (each.name for each in option_fields(section)):
        if dataclasses.is_dataclass(hints[name]):
            yield from _typed(typing.cast(type, hints[name]), values[name], f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", values[name], hints[name]


def _check_typed(section: type, values: Mapping[str, Any], prefix: str) -> None:
    hints = typing.get_type_hints(section)
    for key, hint in ((each.name, hints[each.name]) for each in option_fields(section)):
        name = f"{prefix}{key}"
        if key not in values:
            raise ConfigError(f"{name} is missing; leave out ~{name}, or set it to a value")
        if dataclasses.is_dataclass(hint):
            _check_section(name, values[key], hint)
            _check_typed(typing.cast(type, hint), values[key], f"{name}.")
        elif hint == Choice:  # the owner of its options checks them
            check_option(name, {} if isinstance(values[key], Mapping) else values[key], hint)
        else:
            check_option(name, values[key], hint)
    for key in values.keys() - {each.name for each in option_fields(section)}:
        name = f"{prefix}{key}"
        raise ConfigError(f"the option {name!r} is unknown; docs/configuration.md lists all")


def _check_section(name: str, value: Any, section: Any) -> None:
    if not isinstance(value, Mapping):
        options = ", ".join(f"{name}.{field.name}" for field in option_fields(section))
        raise ConfigError(f"{name} holds options of its own, got {shown(value)}; set {options}")


def _name(prefix: str, options: Mapping[str, Any], owner: Group) -> str:
    """Return the registered name in a group."""
    if options.get(owner.key) is None:
        raise ConfigError(
            f"{prefix}.{owner.key} is missing; choose with {prefix}=NAME, one of {_listed(owner)}"
        )
    name = options[owner.key]
    if not isinstance(name, str) or name not in owner.known():
        raise ConfigError(
            f"{prefix}.{owner.key} must be one of {_listed(owner)}, got {shown(name)}."
            f"{did_you_mean(name, owner.known())}"
        )
    return name


def _listed(owner: Group) -> str:
    return ", ".join(owner.known())


def _owned(config: Mapping[str, Any]) -> Iterator[tuple[str, str, str, Mapping[str, Any]]]:
    """Yield the options outside the schema: (group, prefix of the names, owner, options)."""
    for group in ("model", "dataset", "selector", "reward", "pruner"):
        options, owner = config[group], TABLES[group]
        rest = {key: value for key, value in options.items() if key != owner.key}
        yield group, group, _name(group, options, owner), rest
    optimizers = {"optim": config["optim"], "train.optim": config["train"]["optim"]}
    for prefix, optimizer in optimizers.items():
        yield "optim", f"{prefix}.options", _name(prefix, optimizer, TABLES["optim"]), optimizer["options"]
    tracking = config["tracking"]
    yield (
        "tracking",
        "tracking.options",
        _name("tracking", tracking, TABLES["tracking"]),
        tracking["options"],
    )


COMPLETE_ERRORS = "HYDRA_FULL_ERROR"
"""The environment variable with which Hydra raises errors, instead of printing them and leaving with 1."""


@contextmanager
def raised_errors() -> Iterator[None]:
    """Make Hydra raise its errors within the block."""
    before = os.environ.get(COMPLETE_ERRORS)
    os.environ[COMPLETE_ERRORS] = "1"
    try:
        yield
    finally:
        del os.environ[COMPLETE_ERRORS]
        if before is not None:
            os.environ[COMPLETE_ERRORS] = before


def explained(error: BaseException, overrides: Sequence[Override]) -> str:
    """Rewrite Hydra's or OmegaConf's message so that it names the nearest option."""
    text = str(error)
    if "primary config" in text:  # without it no option is known to suggest
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
        if not name.startswith("hydra"):  # for its own options Hydra's message is clear
            return _unknown_option(name, _made_choices(overrides))
    return f"{in_words(error)}. `rankrl --cfg job` shows the options and their values."


def _unknown_option(name: str, choices: Sequence[str]) -> str:
    known = _known_options(choices)
    if name in known:  # the option is a mapping and only its keys are new
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
    """Return the options of all choices of a group, each with its choice."""
    options: dict[str, str] = {}
    for choice in offered_choices(group):
        for name in _dotted(_node(group, choice), f"{group}."):
            options.setdefault(name, f"{group}={choice}")
    return options


def _node(group: str, choice: str) -> DictConfig:
    """Return the configuration node of a choice of a group."""
    registered = TABLES.get(group)
    if registered is not None and choice in registered.known():  # saves composing, a tenth of a second
        return OmegaConf.create(registered.node(choice))
    return typing.cast(DictConfig, composed_config([f"{group}={choice}"])[group])


def _known_options(choices: Sequence[str]) -> dict[str, None]:
    """Return the dotted names of all options under these choices of groups."""
    try:
        return dict.fromkeys(_dotted(composed_config(choices), ""))
    except COMPOSITION_ERRORS:  # the choices themselves are wrong
        return dict.fromkeys(_dotted(composed_config(), ""))


def _dotted(config: DictConfig, prefix: str) -> Iterator[str]:
    for key in config:
        name = f"{prefix}{key!s}"
        yield name
        value = config._get_node(key)
        if isinstance(value, DictConfig) and not value._is_none() and not value._is_missing():
            yield from _dotted(value, f"{name}.")


def check_overrides(arguments: Sequence[str]) -> None:
    """Compose the configuration once, so that a mistake gives one paragraph instead of Hydra's trace.

    Each value of a sweep is tried, together with the first value of the other sweeps; flags are left to
    Hydra.
    """
    flags = parsed_flags(arguments)
    parsed = parsed_overrides(flags.overrides)
    with composing(flags):
        for override in parsed:
            for value in override_values(override):
                _check_override(*parsed_overrides([value]))
        try:
            hydra = composed_config(next(tried_overrides(parsed)), with_hydra=True).hydra
            if hydra.job.chdir:
                raise ConfigError(
                    "hydra.job.chdir=true would change the folder that the paths of options begin in; "
                    "leave it out: whatever a run writes lies in hydra.run.dir"
                )
            parsed = [*_swept_by_configuration(parsed, multirun=flags.multirun), *parsed]
            for overrides in tried_overrides(parsed):
                config = composed_config(overrides)
                plain: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
                check_values(plain)
                check_applicable(plain, [each.key_or_group for each in parsed_overrides(overrides)])
                built(AppConfig, plain)
            OmegaConf.to_container(hydra.overrides.task, resolve=True)  # as the run's record will
        except RecursionError as error:
            raise ConfigError(TOO_DEEP) from error
        except COMPOSITION_ERRORS as error:
            raise ConfigError(explained(error, parsed)) from error


def composed(overrides: Sequence[str]) -> dict[str, Any]:
    """Compose the configuration of overrides as plain values; empty if one is unknown."""
    if not GlobalHydra.instance().is_initialized():  # within a run it is
        with composing():
            return composed(overrides)
    try:
        plain: Any = OmegaConf.to_container(composed_config(overrides), resolve=True)
    except COMPOSITION_ERRORS:
        return {}
    return typing.cast(dict[str, Any], plain)


def longest_overrides(overrides: Sequence[str], *, multirun: bool) -> list[str]:
    """Return overrides with the longest value of every sweep, which give the longest name of a job's folder.

    Hydra's compose must be initialised.
    """
    parsed = parsed_overrides(overrides)
    swept = _swept_by_configuration(parsed, multirun=multirun)
    return [max(override_values(each), key=len) for each in (*swept, *parsed)]


def _check_override(override: Override) -> None:
    """Refuse a group that is not set to a name, and values that the schema does not allow.

    OmegaConf's own message would not list the allowed values.
    """
    if override.is_delete():
        return
    name, value = override.key_or_group, override.value()
    if any(part.startswith("__") for part in name.split(".")):  # OmegaConf would set a Python attribute
        raise ConfigError(f"the option {name!r} is unknown. `rankrl --help` lists all options.")
    if name in group_names() and not isinstance(value, str) and (name, value) != ("experiment", None):
        raise ConfigError(
            f"{override.input_line}: a group is chosen by name, one of "
            f"{', '.join(offered_choices(name))}; its options are set one by one, as {name}.OPTION=VALUE"
        )
    if name not in group_names():
        check_value(name, value)


def _swept_by_configuration(overrides: Sequence[Override], *, multirun: bool) -> list[Override]:
    """Return the sweeps in the configuration itself, such as an experiment's."""
    hydra = composed_config(next(tried_overrides(overrides)), with_hydra=True).hydra
    several = multirun or hydra.mode == RunMode.MULTIRUN
    swept = (OmegaConf.select(hydra, "sweeper.params") or {}) if several else {}
    sweeps = parsed_overrides([f"{key}={value}" for key, value in swept.items()])
    for override in sweeps:
        for value in override_values(override):
            _check_override(*parsed_overrides([value]))
    for override in (each for each in (*sweeps, *overrides) if each.is_sweep_override()):
        line, name = override.input_line, override.key_or_group
        if not several:
            raise ConfigError(
                f"{line} gives several values, a job for each; add -m for a sweep, or quote what is one "
                f"value: {name}=\"'...'\""
            )
        if not override.is_discrete_sweep() and hydra.sweeper._target_ == ALL_COMBINATIONS:
            raise ConfigError(
                f"{line} gives no list of values, which Hydra's own sweeper runs one by one; write "
                f"{name}=A,B,C, or choose a sweeper that draws values, such as hydra/sweeper=optuna of the "
                "package hydra-optuna-sweeper"
            )
    return sweeps
