"""Arguments of the functions that users call from Python, checked against their annotations."""

from __future__ import annotations

import functools
import inspect
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
    allowed = list(_members(annotation))
    if any(_fits(value, kind) for kind in allowed):
        return
    kinds = " or ".join(dict.fromkeys(map(_described, allowed)))
    choices = [
        str(choice) for kind in allowed for choice in typing.get_args(kind) if _origin(kind) is Literal
    ]
    near = did_you_mean(value, choices) if isinstance(value, str) else ""
    raise ConfigError(
        f"{name} must be {kinds}, got {reprlib.repr(value)}{_remedy(name, value, allowed)}.{near}"
    )


def _members(wanted: Any) -> Iterator[Any]:
    """Yield the members of a union, or the annotation alone."""
    if _origin(wanted) in (typing.Union, types.UnionType):
        for each in typing.get_args(wanted):
            yield from _members(each)
    else:
        yield wanted


def _origin(wanted: Any) -> Any:
    return typing.get_origin(wanted) or wanted


def _fits(value: Any, wanted: Any) -> bool:
    origin, arguments = _origin(wanted), typing.get_args(wanted)
    if wanted is None or wanted is type(None):
        return value is None
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in arguments)
    if origin is Callable:
        return callable(value)
    if origin in (int, float):  # numpy's, too
        kind = numbers.Integral if origin is int else numbers.Real
        return isinstance(value, kind) and not isinstance(value, bool)
    if origin is Path:
        return isinstance(value, os.PathLike)
    if origin in (Sequence, tuple):
        entries = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        return entries and all(any(_fits(v, each) for each in _members(arguments[0])) for v in value)
    return isinstance(value, origin) if isinstance(origin, type) else True


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
    """Return what to write, if it can be told."""
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
