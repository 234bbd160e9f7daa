"""Resolve and check the paths among options, also those taken from the record of an earlier run."""

from __future__ import annotations

import json
import os
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override

from rankrl.cli.config.choices import TABLES
from rankrl.cli.config.composition import in_hydra, parsed_flags, parsed_overrides, quoted
from rankrl.cli.config.overrides import typed_options
from rankrl.errors import ConfigError, StorageError
from rankrl.runs.run_folder import RunFolder, with_effect

_DATA = "RANKRL_DATA"
_MODULES = "PYTHONPATH"


def named_paths(config: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the paths in a configuration by option, and the folders of data and of a user's modules.

    Names that are no files, such as that of a policy shipped with rankrl, are left out.
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
    """Rewrite the relative paths in a recorded override so that they lead to the same files from here."""
    known = record.get("paths", {}).get(option, {})
    value: Any = record["config"]
    for part in option.split(".") if known else ():
        value = value[part]
    moved = _mapped(value, lambda text: _found(option, text, known[text], run) if text in known else text)
    return f"{option}={in_hydra(moved)}" if known and moved != value else override


def recorded_options(record: Mapping[str, Any]) -> list[str]:
    """Return the options whose paths a run recorded."""
    return [option for option in record.get("paths", {}) if option not in (_DATA, _MODULES)]


def take_surroundings(record: Mapping[str, Any], run: RunFolder) -> None:
    """Search the folders of a run for data and a user's modules; RANKRL_DATA takes precedence."""
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


_FILES = {
    "weights": ("weights", "model.safetensors"),
    "plan": ("plan", "plan.json"),
    "timing.table": ("times", "times.json"),
    "model.checkpoint": ("checkpoint", "dense.safetensors"),
    "finetune.teacher": ("checkpoint", "dense.safetensors"),
}
"""Options that name a file, what that is called, and what a run's folder has for them."""
_OF_NETWORK = ("plugins", "model", "dataset")
_OF_TASK = {
    "evaluate": ("seed", *_OF_NETWORK),
    "export": ("seed", *_OF_NETWORK),
    "finetune": ("seed", *_OF_NETWORK, "optim", "finetune"),
    "apply": ("seed", *_OF_NETWORK),
}
"""What tasks take from the run that `run` names."""
_CHECKPOINT = "model.checkpoint"
_EPOCHS = "finetune.epochs"


def check_input_files(config: Mapping[str, Any]) -> None:
    """Refuse files that are missing or are folders."""
    teachers = config["finetune"]["teacher"]
    values = {**config, _CHECKPOINT: config["model"].get("checkpoint"), "finetune.teacher": teachers}
    values["timing.table"] = config["timing"]["table"]
    named = [
        (option, Path(each))
        for option in _FILES
        for each in (values[option] if isinstance(values[option], list) else [values[option]])
        if each
    ]
    for option, path in named:
        noun, name = _FILES[option]
        try:
            if path.is_dir():
                advice = f"{option}={path / name}" if (path / name).is_file() else f"a file, such as {name}"
                raise ConfigError(f"{option}={path} is a folder; give {advice}")
            if not path.exists():
                raise ConfigError(f"{option} cannot be read: there is no {noun} file {path}; check the path")
        except OSError as error:  # a name that is too long, a folder that may not be entered
            raise StorageError(
                f"{option}={path} cannot be read ({error.strerror}); check the path"
            ) from error


def options_of_run(arguments: Sequence[str]) -> list[str]:
    """Return the network and data options of an earlier run that the command line does not set.

    With `run=RUN` they are those that the task needs, with the files of RUN; with
    `weights=RUN/model.safetensors` the network and the data. The run's dense network, loaded or trained
    there, is the checkpoint.
    """
    set_here = {each.key_or_group: each for each in parsed_overrides(parsed_flags(arguments).overrides)}
    if "run" in set_here and set_here["run"].is_sweep_override():
        raise ConfigError(f"{set_here['run'].input_line}: run names one run, for all jobs of a sweep")
    taken, named = _text(set_here, "run"), _text(set_here, "weights")
    task = _text(set_here, "task") or "pipeline"
    if taken and task in _OF_TASK:
        folder = RunFolder(Path(taken))
        record = _record(folder)
        recorded = _recorded(folder, record, _OF_TASK[task])
        if record is None or recorded is None:
            raise ConfigError(f"run={taken}: there is no run of the command line in that folder; name one")
        recorded += _files_of(folder, task, taken)
    elif named and "experiment" not in set_here:
        folder = RunFolder(Path(named).parent)
        record = _record(folder)
        recorded = _recorded(folder, record, _OF_NETWORK)
    else:
        return []
    if record is None or recorded is None:
        return []
    groups = {group for group in _OF_TASK["finetune"] if group in set_here}
    if "experiment" in set_here:  # it chooses network and data
        groups = {*_OF_NETWORK}
    left = {
        option: text
        for option, text in recorded
        if option not in set_here and option.partition(".")[0] not in groups
    }
    if task == "apply" and taken and _CHECKPOINT not in {*set_here, *left} and "model" not in groups:
        _refuse_other_network(folder, record)
    take_surroundings(record, folder)
    return [path_from_here(option, text, record, folder) for option, text in left.items()]


def _text(overrides: Mapping[str, Override], option: str) -> str:
    """Return the single value of an option; empty if it is not set, or is a sweep."""
    override = overrides.get(option)
    if override is None or override.is_sweep_override() or not override.value():
        return ""
    return str(override.value())


def _record(folder: RunFolder) -> Any:
    """Return the content of a run's record; None if it is missing or damaged."""
    try:
        return json.loads(folder.record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _recorded(folder: RunFolder, record: Any, groups: Sequence[str]) -> list[tuple[str, str]] | None:
    """Return a run's options of some groups, each with its override; None without a record."""
    try:
        overrides, config = parsed_overrides([str(each) for each in record["overrides"]]), record["config"]
        return [each for group in groups for each in _of_group(group, overrides, config, folder)]
    except (KeyError, TypeError):
        return None


def _of_group(
    group: str, overrides: Sequence[Override], config: Mapping[str, Any], run: RunFolder
) -> Iterator[tuple[str, str]]:
    """Yield a run's options of a group, each with its override."""
    of_group = {each.key_or_group: str(each.input_line) for each in overrides}
    if group in TABLES and group not in of_group:
        yield group, f"{group}={config[group][TABLES[group].key]}"
    for option, text in of_group.items():
        if option.partition(".")[0] == group and option not in (_CHECKPOINT, _EPOCHS):
            yield option, text
    if group == "model":
        checkpoint = config[group].get("checkpoint") or (run.dense if run.dense.is_file() else None)
        if checkpoint:
            yield _CHECKPOINT, quoted(_CHECKPOINT, str(checkpoint))


def _refuse_other_network(run: RunFolder, record: Mapping[str, Any]) -> None:
    """Refuse a run whose dense network is missing: training again would give another one."""
    if record["config"]["model"].get("architecture") != "onnx":
        raise ConfigError(
            f"run={run.path} has no {run.dense.name}, the network that its plan is for; put it back, or give "
            f"{_CHECKPOINT}=PATH"
        )


def _files_of(folder: RunFolder, task: str, name: str) -> list[tuple[str, str]]:
    """Return the options that name a run's compressed network or plan, as the task expects them."""
    option = "plan" if task == "apply" else "weights"
    path = folder.path / _FILES[option][1]
    if path.is_file():
        return [(option, quoted(option, str(path)))]
    if task == "evaluate":  # it scores the dense network
        return []
    raise ConfigError(
        f"run={name} has no {path.name}, which task={task} needs; wait for the run's end, or name another one"
    )
