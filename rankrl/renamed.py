"""Names of the last version, which still work and warn."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

from rankrl.options.decomposition import DecompositionOptions
from rankrl.options.search import SearchOptions

_P = ParamSpec("_P")
_R = TypeVar("_R")

_FIRST = {"model": "network", "path": "network", "data": "inputs", "calibration": "inputs"}
_DECOMPOSITION = (
    *("precisions", "channels", "blocks", "skip", "only", "candidates", "weigh_outputs", "iterations"),
    *("final_iterations", "final_starts", "rank_multiple"),
)
_SEARCH = (
    *("episodes", "seconds", "patience", "finalists", "term"),
    *("workers", "cluster", "worker_cpus", "worker_gpus"),
)


def renamed_arguments(
    named: Callable[[Any, Any], DecompositionOptions],
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Return a decorator that takes single options for `decomposition=` and `search=`, with a warning.

    Args:
        named: From a network and what `decomposition=` says to the options.
    """

    def renaming(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def renamed(*args: Any, **options: Any) -> _R:
            _rename(function, args, options)
            network = args[0] if args else options.get("network")
            layers = _taken(options, _DECOMPOSITION)
            if layers:
                known = named(network, options.get("decomposition"))
                layers.setdefault("precisions", known.precisions or ("float32",))
                options["decomposition"] = replace(known, **layers)
                _warn(layers, "decomposition=rankrl.DecompositionOptions")
            limits = _taken(options, _SEARCH)
            if limits:
                known_search = options.get("search")
                options["search"] = replace(known_search or SearchOptions(), **limits)
                _warn(limits, "search=rankrl.SearchOptions")
            return function(*args, **options)

        return renamed

    return renaming


def _rename(function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Give arguments the names of today."""
    parameters = list(inspect.signature(function).parameters)
    for old, new in _FIRST.items():
        if old in options and new not in options and new in parameters:
            options[new] = options.pop(old)
    if "multiple" in options:
        options["rank_multiple"] = options.pop("multiple")
    names = parameters[: len(args)]
    if function.__name__ == "compress" and "folder" in options and "target" not in [*names, *options]:
        options["target"] = options.pop("folder")


def _taken(options: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Take the options of these names out of a call's; None stands for a default."""
    old = {name: options.pop(name) for name in list(options) if name in names}
    return {name: value for name, value in old.items() if value is not None}


def _warn(options: Mapping[str, Any], instead: str) -> None:
    shown = ", ".join(f"{name}={value!r}" for name, value in options.items())
    warnings.warn(f"write {instead}({shown})", DeprecationWarning, stacklevel=4)
