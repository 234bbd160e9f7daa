"""Telling whether a user's score is still the one whose rewards were kept.

A score is its code and what the code reaches: constants, defaults, what it closes over, what it is bound to,
and the functions, classes and values of the user's own modules that it names. Installed packages count by
name and version: they are not what a user edits between two runs. Neither the score's name nor the lines it
stands on matter, and nothing depends on addresses or on the order of sets, so that another process finds the
same. What cannot be read, or is nested too deeply, is named as opaque and never an error.
"""

from __future__ import annotations

import argparse
import dataclasses
import dis
import functools
import hashlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from rankrl.plan_search.scores.installed import OWN_PACKAGES, is_installed, version

_DEEPEST = 1000
"""Values within values that are looked into."""
_CALLS_A_LEVEL = 8
"""Python's calls for each of them, with some to spare."""
_VALUES = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device)


@dataclass(frozen=True)
class ScoreFingerprint:
    """What a score is.

    Attributes:
        digest: Equal for equal scores, 16 hexadecimal digits.
        opaque: Names of what could not be looked into, such as functions written in C: an edit of these is
            not seen.
    """

    digest: str
    opaque: tuple[str, ...]

    @classmethod
    def of(cls, score: Callable[..., Any]) -> ScoreFingerprint:
        """Look into a score: a function, a method, a `functools.partial` or an object that can be called."""
        reader = _Reader()
        with _room_for_calls(_DEEPEST * _CALLS_A_LEVEL):
            digest = reader.digest_of(score)
        if isinstance(score, types.BuiltinFunctionType):  # an installed one is taken by name elsewhere
            reader.opaque.add(_full_name(score))
        return cls(digest[:16], tuple(sorted(reader.opaque)))


@dataclass
class _Reader:
    """Hashes everything that a score reaches, each object once.

    Attributes:
        opaque: Names of what could not be looked into.
    """

    opaque: set[str] = field(default_factory=set)
    _digest: Any = field(default_factory=hashlib.sha256)
    _open: dict[int, int] = field(default_factory=dict)
    _known: dict[int, str] = field(default_factory=dict)
    _kept: list[Any] = field(default_factory=list)

    def digest_of(self, value: Any) -> str:
        """Return the hash of a value; equal values have equal ones, be they one object or two."""
        if id(value) in self._known:
            return self._known[id(value)]
        if id(value) in self._open:  # it holds itself
            return f"{len(self._open) - self._open[id(value)]} levels up"
        if len(self._open) == _DEEPEST:
            self.opaque.add(f"{_full_name(value)} (nested too deeply)")
            return "too deep"
        self._open[id(value)] = len(self._open)
        self._kept.append(value)  # or another object could get its address
        outer, self._digest = self._digest, hashlib.sha256()
        try:
            read = next((read for kinds, read in _READERS if isinstance(value, kinds)), _Reader._object)
            read(self, value)
        except Exception as error:  # objects of others raise anything when their attributes are read
            self._digest = hashlib.sha256()
            self._named(value)
            self.opaque.add(f"{_full_name(value)} ({type(error).__name__})")
        digest = self._known[id(value)] = str(self._digest.hexdigest())
        self._digest = outer
        del self._open[id(value)]
        return digest

    def _read(self, value: Any) -> None:
        self._note(self.digest_of(value))

    def _note(self, *words: object) -> None:
        for word in words:
            data = word if isinstance(word, bytes) else str(word).encode("utf-8", "surrogatepass")
            self._digest.update(f"{len(data)}:".encode() + data)

    def _all(self, kind: str, values: Iterable[Any]) -> None:
        values = list(values)
        self._note(kind, len(values))
        for value in values:
            self._read(value)

    def _unordered(self, kind: str, values: Iterable[Any]) -> None:
        """Take in a set, in an order that does not depend on the process."""
        self._note(kind, *sorted(self.digest_of(value) for value in values))

    def _plain(self, value: object) -> None:
        self._note(type(value).__name__, repr(value))

    def _mapping(self, values: Mapping[Any, Any]) -> None:
        self._all("mapping", [each for item in values.items() for each in item])

    def _tensor(self, tensor: Tensor) -> None:
        plain = tensor.detach().cpu().contiguous()
        self._note("tensor", plain.dtype, tuple(plain.shape))
        self._note(plain.flatten().view(torch.uint8).numpy().tobytes() if plain.numel() else b"")

    def _array(self, array: np.ndarray[Any, Any]) -> None:
        self._note("array", array.dtype, array.shape)
        if array.dtype.hasobject:
            self._all("objects", array.flatten().tolist())
        else:
            self._note(array.tobytes())

    def _network(self, network: nn.Module) -> None:
        for name, module in network.named_modules():
            self._note("module", name)
            self._read(type(module))
            if _is_users(type(module).__module__):
                self._mapping(
                    {key: held for key, held in vars(module).items() if key[0] != "_" and key != "training"}
                )
        self._mapping(network.state_dict())

    def _loader(self, loader: DataLoader[Any]) -> None:
        self._note("loader", loader.batch_size, loader.drop_last, type(loader.sampler).__qualname__)
        self._read(loader.dataset)

    def _held(self, value: Any) -> None:
        self._class(type(value))
        self._mapping(vars(value))

    def _partial(self, partial: functools.partial[Any]) -> None:
        self._note("partial")
        self._read(partial.func)
        self._all("arguments", partial.args)
        self._mapping(partial.keywords)

    def _method(self, method: types.MethodType) -> None:
        self._note("method")
        self._read(method.__func__)
        self._read(method.__self__)

    def _function(self, function: types.FunctionType) -> None:
        if function.__module__ is not None and not _is_users(function.__module__):
            self._named(function)
            return
        self._note("function")
        self._code(function.__code__, function.__doc__)
        self._all("defaults", function.__defaults__ or ())
        self._mapping(function.__kwdefaults__ or {})
        names = list(dict.fromkeys(_names(function.__code__)))
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # not filled yet
                content = None
            self._global(content, names)
        imported = {name: sys.modules[name] for name in _imports(function.__code__) if name in sys.modules}
        for name in names:
            found = imported.get(name, function.__globals__.get(name, _NOTHING))
            if found is not _NOTHING:
                self._note("global", name)
                self._global(found, names)

    def _global(self, value: Any, names: Iterable[str]) -> None:
        if not isinstance(value, types.ModuleType):
            self._read(value)
        elif _is_users(value.__name__):
            for name in names:  # those that the function takes from the module are among them
                if name in vars(value):
                    self._note("attribute", name)
                    self._read(vars(value)[name])
        else:
            self._module(value)

    def _module(self, module: types.ModuleType) -> None:
        self._note("module", module.__name__, version(module.__name__))

    def _builtin(self, function: types.BuiltinFunctionType) -> None:
        self._named(function)
        if _is_users(function.__module__):  # an extension module of the user's
            self.opaque.add(_full_name(function))

    def _code(self, code: types.CodeType, docstring: str | None = None) -> None:
        self._note("code", code.co_code, *code.co_names, *code.co_varnames, *code.co_freevars, code.co_flags)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant)
            elif docstring is None or constant != docstring:
                self._read(constant)

    def _class(self, cls: type) -> None:
        if not _is_users(cls.__module__):
            self._note("class", cls.__module__, cls.__qualname__, version(cls.__module__))
            return
        self._note("class", "", cls.__qualname__)
        self._all("bases", cls.__bases__)
        for name, value in sorted(vars(cls).items()):
            inner = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
            if isinstance(inner, _MEMBERS) and name not in _OF_THE_CLASS:
                self._note("member", name)
                self._read(inner)

    def _wrapper(self, value: Any) -> None:
        self._read(value.__wrapped__)

    def _enum(self, value: Enum) -> None:
        self._note("enum", type(value).__qualname__, value.name)

    def _generator(self, generator: torch.Generator) -> None:
        self._tensor(generator.get_state())

    def _numpy_generator(self, generator: np.random.Generator) -> None:
        self._note("generator", repr(sorted(generator.bit_generator.state.items())))

    def _object(self, value: Any) -> None:
        if hasattr(value, "__wrapped__"):  # functools.lru_cache and its like
            self._wrapper(value)
        elif _is_known(value):
            self._class(type(value))
            held = {**getattr(value, "__dict__", {})}
            for cls in type(value).__mro__:
                for name in _slots(cls):
                    if hasattr(value, name):
                        held[name] = getattr(value, name)
            self._mapping(held)
        else:
            self._named(value)
            if getattr(value, "__dict__", None) != {}:  # a marker object holds nothing
                self.opaque.add(_full_name(value))

    def _named(self, value: Any) -> None:
        name = _full_name(value)
        self._note("named", name, version(name))


_NOTHING = object()
_MEMBERS = (types.FunctionType, *_VALUES, tuple, list, dict)
_OF_THE_CLASS = frozenset(
    {
        "__doc__",
        "__module__",
        "__qualname__",
        "__dict__",
        "__weakref__",
        "__annotations__",
        "__dataclass_fields__",  # what they say is in the methods made of them, and in other attributes
    }
)

_READERS: tuple[tuple[Any, Callable[[_Reader, Any], None]], ...] = (
    (Enum, _Reader._enum),
    (_VALUES, _Reader._plain),
    (types.FunctionType, _Reader._function),
    (types.BuiltinFunctionType, _Reader._builtin),
    (types.MethodType, _Reader._method),
    (functools.partial, _Reader._partial),
    (type, _Reader._class),
    (types.ModuleType, _Reader._module),
    (types.CodeType, _Reader._code),
    (Tensor, _Reader._tensor),
    (np.ndarray, _Reader._array),
    (np.generic, lambda reader, value: reader._array(np.asarray(value))),
    (nn.Module, _Reader._network),
    (DataLoader, _Reader._loader),
    (Dataset | argparse.Namespace | types.SimpleNamespace, _Reader._held),
    (torch.Generator, _Reader._generator),
    (np.random.Generator, _Reader._numpy_generator),
    (tuple | list, lambda reader, value: reader._all(type(value).__name__, value)),
    (set | frozenset, lambda reader, value: reader._unordered("set", value)),
    (Mapping, _Reader._mapping),
    (PurePath | range | slice, lambda reader, value: reader._note(type(value).__name__, str(value))),
)


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the global names and attributes that a function's code mentions, inner functions' too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _imports(code: types.CodeType) -> Iterator[str]:
    """Yield the modules that a function imports itself."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _imports(constant)


def _slots(cls: type) -> Iterable[str]:
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else slots


def _full_name(value: Any) -> str:
    named = value if isinstance(getattr(value, "__qualname__", None), str) else type(value)
    module = getattr(named, "__module__", None)
    return f"{module}.{named.__qualname__}" if module else str(getattr(value, "__name__", named.__qualname__))


def _is_known(value: Any) -> bool:
    """Return whether an object holds its attributes alone: one of the user, of ours, or a dataclass."""
    module = type(value).__module__
    ours = module.partition(".")[0] in OWN_PACKAGES
    return _is_users(module) or ours or dataclasses.is_dataclass(value)


def _is_users(module: str | None) -> bool:
    """Return whether a module is the user's own code: neither Python's, nor ours, nor installed."""
    return module is not None and not is_installed(module)


@contextmanager
def _room_for_calls(calls: int) -> Iterator[None]:
    """Let Python nest so many calls more than it does now; they take no room on the stack of C."""
    frame, nested = sys._getframe(), 0
    while frame.f_back is not None:
        frame, nested = frame.f_back, nested + 1
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, nested + calls))
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)
