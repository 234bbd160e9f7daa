"""Every value of the configuration against the type of its option, before any work.

The types are those of `cli.config.schema`; in the groups that the schema leaves open, those of what takes
the options: a dataset's source, a network's builder, a selector, a reward, a pruner, an optimizer, a tracker.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from decomposition.registry import registered
from rankrl.cli.config.group import Group
from rankrl.cli.config.schema import AppConfig, Choice
from rankrl.cli.config.tables import TABLES, formats
from rankrl.cli.config.tasks import TASKS
from rankrl.errors import ConfigError, did_you_mean
from rankrl.option_types import check_option, check_options, shown
from rankrl.options.decomposition import AUTO
from rankrl.options.fields import option_fields
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
    """Refuse formats and runtimes that there are not."""
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
    """Refuse a value that an option cannot have; an unknown option is not looked at."""
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
    """Yield every option with its value and its type, those of networks to pretrain on under the list's name.

    Raises:
        ConfigError: A choice of a group is unknown.
    """
    yield from _typed(AppConfig, config, "")
    owned = list(_owned(config))
    for network in config["pretrain"]["networks"]:
        owned += [("model", "", _name("pretrain.networks", network, TABLES["model"]), network)]
    for group, prefix, name, options in owned:
        types, _ = TABLES[group].types(name)
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
        elif hint == Choice:  # its entries have an owner
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
    """Yield what the schema leaves open: kind of owner, first part of the options' names, owner, options."""
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
