"""Dataclasses of options as OmegaConf understands them, and back.

OmegaConf makes the values of a frozen dataclass read-only and knows neither `Literal` nor tuples as we use
them. So the configuration's types are those of dataclasses that are derived here, with the same fields and
defaults; what is composed is made into the frozen ones again, which check it.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from omegaconf import MISSING

from rankrl.options.fields import option_fields

Options = TypeVar("Options")


@cache
def structured(section: Any) -> type:
    """Return the dataclass that OmegaConf takes in the place of a section of the configuration."""
    hints = typing.get_type_hints(section)
    fields = [(each.name, *_field(each, hints[each.name])) for each in option_fields(section)]
    return dataclasses.make_dataclass(section.__name__, fields, repr=False, eq=False)


def built(section: type[Options], values: Mapping[str, Any]) -> Options:
    """Return the section that plain values stand for."""
    hints = typing.get_type_hints(section)
    return section(**{name: _value(hints[name], value) for name, value in values.items()})


def _value(hint: Any, value: Any) -> Any:
    if _is_section(hint):
        return built(hint, value)
    if isinstance(value, list) and any(typing.get_origin(each) is tuple for each in _members(hint)):
        return tuple(value)
    return float(value) if isinstance(value, int) and _takes_floats(hint, value) else value


def _takes_floats(hint: Any, value: Any) -> bool:
    members = _members(hint)
    return float in members and int not in members and not isinstance(value, bool)


def _field(field: dataclasses.Field[Any], hint: Any) -> tuple[Any, Any]:
    """Return the type and the default of a field for OmegaConf."""
    if _is_section(hint):
        default: Any = hint
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory
        return structured(hint), dataclasses.field(default_factory=lambda: _thawed(default()))
    return _annotation(hint), _default(field)


def _is_section(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=field.default_factory)
    if isinstance(field.default, tuple):
        entries = field.default
        return dataclasses.field(default_factory=lambda: list(entries))
    return MISSING if field.default is dataclasses.MISSING else field.default


def _thawed(options: Any) -> Any:
    """Return what OmegaConf takes in the place of a section with these values."""
    values = {each.name: getattr(options, each.name) for each in option_fields(options)}
    for name, value in values.items():
        if dataclasses.is_dataclass(value):
            values[name] = _thawed(value)
        elif isinstance(value, tuple):
            values[name] = list(value)
    section: Any = type(options)
    return structured(section)(**values)


def _annotation(hint: Any) -> Any:
    """Return an annotation in OmegaConf's terms."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        members = list(dict.fromkeys(_annotation(each) for each in arguments if each is not type(None)))
        if len(members) > 1:  # which OmegaConf knows of plain types alone; `values` checks them
            return Any
        return members[0] | None if type(None) in arguments else members[0]
    if origin is Literal or hint is Path:
        return str
    if origin in (tuple, list, Sequence):
        return list[_annotation(arguments[0])]  # type: ignore[misc]
    if origin in (dict, Mapping):
        return dict[str, arguments[1]]  # type: ignore[valid-type]
    return hint


def _members(hint: Any) -> tuple[Any, ...]:
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if union else (hint,)
