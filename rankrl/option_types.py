"""Read the types of options from function signatures, and check values against them.

Options of a dataset, a network, a selector, ... come from YAML or a command line as plain values: null, truth
values, numbers, text, lists and mappings. The annotation of the parameter that takes an option is the only
definition of its type.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import os
import reprlib
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

from rankrl.errors import ConfigError, did_you_mean

OptionTypes = Mapping[str, Any]
"""Annotations by the name of the option."""

_LARGEST = 2**63 - 1  # of signed integers in 64 bits
_LONGEST_SHOWN = 60
_PLAIN = (bool, int, float, str)
_LISTS = (list, tuple, Sequence, Collection)


def parameter_types(function: Callable[..., Any], *, without: Collection[str] = ()) -> dict[str, Any]:
    """Return the annotations of a function's or a class's named parameters; Any where there is none."""
    return {
        name: Any if parameter.annotation is parameter.empty else parameter.annotation
        for name, parameter in inspect.signature(function, eval_str=True).parameters.items()
        if name not in without and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }


def parameter_defaults(function: Callable[..., Any], *, without: Collection[str] = ()) -> dict[str, Any]:
    """Return the defaults of a function's or a class's named parameters; `Parameter.empty` for none."""
    parameters = inspect.signature(function).parameters
    return {name: parameters[name].default for name in parameter_types(function, without=without)}


def takes_any_option(function: Callable[..., Any]) -> bool:
    return any(each.kind is each.VAR_KEYWORD for each in inspect.signature(function).parameters.values())


def check_options(owner: str, group: str, values: Mapping[str, Any], allowed: OptionTypes) -> None:
    for name, value in values.items():
        if name not in allowed:
            raise ConfigError(
                f"{owner} has no option {name!r}; it has {', '.join(allowed) or 'none'}."
                f"{did_you_mean(name, allowed)}"
            )
        check_option(f"{group}.{name}", value, allowed[name])


def check_option(name: str, value: Any, wanted: Any) -> None:
    """Refuse a value that is not of an option's type, NaN and infinities."""
    leaves = list(_leaves(value))
    if any(isinstance(leaf, float) and not math.isfinite(leaf) for leaf in leaves):
        raise ConfigError(f"{name} must be finite, got {shown(value)}; {_allowed(wanted)}")
    if any(isinstance(leaf, int) and abs(leaf) > _LARGEST for leaf in leaves):
        raise ConfigError(f"{name} must be a whole number of at most 64 bits, got {shown(value)}")
    if value == "" and wanted is not Any and _fits(value, wanted):
        raise ConfigError(f"{name} is empty; {_allowed(wanted)}")
    if not _fits(value, wanted):
        near = did_you_mean(value, _choices(wanted)) if isinstance(value, str) else ""
        listed = f" Write {name}=[{value}]." if _fits([value], wanted) else ""
        raise ConfigError(
            f"{name} must be {described(wanted)}, got {shown(value)}.{near}{listed}{_quoting(value, wanted)}"
        )


def described(wanted: Any) -> str:
    """Return an annotation in words, as in "a list of whole numbers or null"."""
    *members, last = _in_words(wanted)
    return f"{', '.join(members)} or {last}" if members else last


def shown(value: Any) -> str:
    """Return a value as the command line writes it, shortened."""
    plain = value is None or isinstance(value, bool)
    text = {True: "true", False: "false", None: "null"}[value] if plain else repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _in_words(wanted: Any) -> list[str]:
    """Return the words for each member of a union, null last."""
    words = [_word(member) for member in _members(wanted) if member is not type(None)]
    if type(None) in _members(wanted):
        words = ["true", "false", "null"] if words == ["true or false"] else [*words, "null"]
    return list(dict.fromkeys(words))


def _word(wanted: Any) -> str:
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin in _LISTS:
        pair = origin is tuple and Ellipsis not in arguments
        count = f"{len(arguments)} " if pair else ""
        return f"a list of {count}{_plural(arguments[0])}" if arguments else "a list"
    if _is_mapping(wanted):
        values = (
            f" from names to {_plural(arguments[1])}"
            if len(arguments) == 2 and arguments[1] is not Any
            else ""
        )
        return f"a mapping{values}"
    words: dict[Any, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return words.get(wanted, "text" if wanted is Path else "anything")


def _plural(wanted: Any) -> str:
    words: dict[Any, str] = {bool: "truth values", int: "whole numbers", float: "numbers", str: "names"}
    return words.get(wanted, "paths" if Path in _members(wanted) else described(wanted))


def _members(wanted: Any) -> tuple[Any, ...]:
    """Return the members of a union that plain values can have, or the annotation alone."""
    if typing.get_origin(wanted) not in (typing.Union, types.UnionType):
        return (wanted,)
    return tuple(each for each in typing.get_args(wanted) if each is Path or _is_plain(each))


def _is_plain(wanted: Any) -> bool:
    return wanted in (*_PLAIN, type(None), Any) or typing.get_origin(wanted) is not None


def _choices(wanted: Any) -> list[str]:
    return [
        str(choice)
        for member in _members(wanted)
        if typing.get_origin(member) is Literal
        for choice in typing.get_args(member)
    ]


def _fits(value: Any, wanted: Any) -> bool:
    """Tell whether a value, plain or Python's, is of an annotation's type."""
    origin, arguments = _origin(wanted), typing.get_args(wanted)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, member) for member in arguments)
    if wanted is Any:
        return True
    if wanted is None or wanted is type(None):
        return value is None
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in arguments)
    if origin is Callable:
        return callable(value)
    if origin in (int, float):  # numpy's, too
        kind = numbers.Integral if origin is int else numbers.Real
        return isinstance(value, kind) and not isinstance(value, bool)
    if origin in (str, Path):  # paths are text on the command line
        return isinstance(value, str | os.PathLike)
    if origin in _LISTS:
        entries = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        return entries and _entries_fit(value, origin, arguments)
    if _is_mapping(wanted):
        inner = arguments[1] if len(arguments) == 2 else Any
        return isinstance(value, Mapping) and all(_fits(each, inner) for each in value.values())
    return isinstance(value, origin) if isinstance(origin, type) else True


def _entries_fit(value: Sequence[Any], origin: Any, arguments: tuple[Any, ...]) -> bool:
    if origin is tuple and Ellipsis not in arguments:
        return len(value) == len(arguments) and all(map(_fits, value, arguments))
    return not arguments or all(_fits(each, arguments[0]) for each in value)


def _is_mapping(wanted: Any) -> bool:
    kind = typing.get_origin(wanted) or wanted
    return isinstance(kind, type) and issubclass(kind, Mapping)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for each in value.values():
            yield from _leaves(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _allowed(wanted: Any) -> str:
    return "give a finite value" if wanted is Any else f"it is {described(wanted)}"


def _quoting(value: Any, wanted: Any) -> str:
    """Say how to quote a number or truth value that is meant as text."""
    if str not in _members(wanted) or isinstance(value, str | Mapping | list | tuple) or value is None:
        return ""
    return f" If that is meant as text, quote it twice: \"'{shown(value)}'\"."


_P = ParamSpec("_P")
_R = TypeVar("_R")
_WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "text", Path: "a path"}


def checked_arguments(*, without: Collection[str]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Return a decorator that refuses arguments of another type than a function's annotations say."""

    def checking(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def checked(*args: _P.args, **options: _P.kwargs) -> _R:
            bound = inspect.signature(function).bind(*args, **options)
            check_arguments(function, bound.arguments, without=without)
            return function(*args, **options)

        return checked

    return checking


def check_arguments(
    function: Callable[..., Any], values: Mapping[str, Any], *, without: Collection[str]
) -> None:
    """Refuse arguments of another type than a function's annotations say."""
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        if name not in without and name in values:
            _check(name, values[name], parameter.annotation)


def check_fields(options: Any) -> None:
    """Refuse fields of a dataclass that have another type than their annotations say; lists become tuples."""
    types = typing.get_type_hints(type(options))
    for field in fields(options):
        value = getattr(options, field.name)
        _check(field.name, value, types[field.name])
        if isinstance(value, list):
            object.__setattr__(options, field.name, tuple(value))


def _check(name: str, value: Any, annotation: Any) -> None:
    if _fits(value, annotation):
        return
    union = _origin(annotation) in (typing.Union, types.UnionType)
    allowed = typing.get_args(annotation) if union else (annotation,)  # unions of unions are flat
    kinds = " or ".join(dict.fromkeys(map(_described, allowed)))
    choices = [
        str(choice) for kind in allowed for choice in typing.get_args(kind) if _origin(kind) is Literal
    ]
    near = did_you_mean(value, choices) if isinstance(value, str) else ""
    raise ConfigError(
        f"{name} must be {kinds}, got {reprlib.repr(value)}{_remedy(name, value, allowed)}.{near}"
    )


def _origin(wanted: Any) -> Any:
    return typing.get_origin(wanted) or wanted


def _described(wanted: Any) -> str:
    origin, arguments = _origin(wanted), typing.get_args(wanted)
    if wanted is None or wanted is type(None):
        return "None"
    if origin is Literal:
        return f"one of {', '.join(map(repr, arguments))}"
    if origin is Callable:
        return "a function"
    if origin in (Sequence, tuple):
        return f"a list of {'numbers' if arguments[0] is float else 'names'}"
    return _WORDS.get(origin, "a dict" if origin is Mapping else getattr(origin, "__name__", str(origin)))


def _remedy(name: str, value: Any, wanted: Collection[Any]) -> str:
    for each in wanted:
        if is_dataclass(each) and isinstance(value, Mapping):
            fields = ", ".join(f"{key}={entry!r}" for key, entry in value.items())
            package, kind = each.__module__.split(".")[0], typing.cast(type, each).__name__
            return f"; write {name}={package}.{kind}({fields})"
        if _origin(each) in (Sequence, tuple) and _fits(value, typing.get_args(each)[0]):
            return f"; write {name}=[{value!r}]"
        if each is float and isinstance(value, str):
            return f"; write a fraction, such as {name}=0.5"
    return ""


def check_least(section: str, options: object, **least: float) -> None:
    """Refuse options of a section below their least values; None passes."""
    for name, bound in least.items():
        value = getattr(options, name)
        if value is not None and not value >= bound:
            raise ConfigError(f"{section}.{name} must be at least {bound}, got {value}")


def check_positive(section: str, options: object, *names: str) -> None:
    """Refuse options of a section that are not positive, or infinite; None passes."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{section}.{name} must be positive, got {value}")


def check_known(option: str, noun: str, names: Collection[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(
                f"{option}: there is no {noun} {name!r}; choose from {', '.join(known)}."
                f"{did_you_mean(name, known)}"
            )
