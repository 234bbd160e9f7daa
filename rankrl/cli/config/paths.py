"""Paths that a run records, of its options and surroundings, and where they are from here.

Options are paths by their types. A path is recorded from the root and from the run's folder, so that it leads
to the same file from any current folder, and after the run was moved together with its files.
"""

from __future__ import annotations

import os
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rankrl.cli.config.quoting import in_hydra
from rankrl.cli.config.values import typed_options
from rankrl.errors import ConfigError
from rankrl.runs.configurations import with_effect
from rankrl.runs.run_folder import RunFolder

_DATA = "RANKRL_DATA"
_MODULES = "PYTHONPATH"


def named_paths(config: Mapping[str, Any]) -> dict[str, list[str]]:
    """The paths that a configuration names, by option; the folders of data and of a user's modules beside.

    Names that are no files, such as that of a policy which comes with rankrl, are left out.
    """
    kept = with_effect(config)
    paths: dict[str, list[str]] = {}
    for option, value, hint in typed_options(config):
        if _is_path(hint) and option.partition(".")[0] in kept:
            paths.setdefault(option, []).extend(each for each in _texts(value) if os.path.exists(each))
    paths[_DATA] = [each for each in [os.environ.get(_DATA) or "data"] if os.path.isdir(each)]
    if config["plugins"] or "_target_" in {*config["model"], *config["finetune"]["teacher_options"]}:
        paths[_MODULES] = [sys.path[0] or os.curdir]
    return {option: texts for option, texts in paths.items() if texts}


def path_from_here(option: str, override: str, record: Mapping[str, Any], run: RunFolder) -> str:
    """An override of a run's record, with paths that lead from here to the files that they led to there."""
    known = record.get("paths", {}).get(option, {})
    value: Any = record["config"]
    for part in option.split(".") if known else ():
        value = value[part]
    moved = _mapped(value, lambda text: _found(option, text, known[text], run) if text in known else text)
    return f"{option}={in_hydra(moved)}" if known and moved != value else override


def recorded_options(record: Mapping[str, Any]) -> list[str]:
    """The options whose paths a run recorded."""
    return [option for option in record.get("paths", {}) if option not in (_DATA, _MODULES)]


def take_surroundings(record: Mapping[str, Any], run: RunFolder) -> None:
    """Look for data and for a user's modules where a run did; the user's own RANKRL_DATA counts more."""
    for name in (_DATA, _MODULES):
        for places in record.get("paths", {}).get(name, {}).values():
            place = next((each for each in _places(places, run) if os.path.exists(each)), None)
            if place is None:
                continue
            if name == _DATA and place != os.path.abspath("data"):
                os.environ.setdefault(_DATA, place)
            elif name == _MODULES and place != os.path.abspath(sys.path[0]):
                sys.path.insert(0, place)  # before modules of the same names in the current folder


def _found(option: str, text: str, places: list[str], run: RunFolder) -> str:
    tried = list(dict.fromkeys(_places(places, run)))
    for place in tried:
        if os.path.exists(place):
            return text if place == os.path.abspath(text) else place
    raise ConfigError(
        f"{run.path} is a run with {option}={text}, and that is gone: there is no {' and no '.join(tried)}; "
        f"put it back, or name the file with {option}=PATH"
    )


def _places(places: list[str], run: RunFolder) -> Iterator[str]:
    absolute, relative = places
    yield absolute
    yield os.path.abspath(run.path / relative)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _mapped(each, change) for key, each in value.items()}
    if isinstance(value, list):
        return [_mapped(each, change) for each in value]
    return change(value) if isinstance(value, str) else value


def _texts(value: Any) -> list[str]:
    return value if isinstance(value, list) else [value] if isinstance(value, str) and value else []


def _is_path(hint: Any) -> bool:
    return hint is Path or any(map(_is_path, typing.get_args(hint)))
