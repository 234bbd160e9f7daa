"""Take options from earlier runs (`resume=`, `run=`, `weights=`); record a run's configuration and paths."""

from __future__ import annotations

import json
import os
import sys
import typing
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rankrl.cli.config.checks import typed_options
from rankrl.cli.config.compose import (
    COMPOSITION_ERRORS,
    Composed,
    in_hydra,
    parsed_flags,
    parsed_overrides,
    plain_values,
    quoted,
)
from rankrl.cli.config.schema import GROUPS
from rankrl.errors import ConfigError
from rankrl.files import write_atomically
from rankrl.runs.run_folder import COMPRESS, SAME_CALL, RunFolder, changed_options, check_free, with_effect

_DATA = "RANKRL_DATA"
_MODULES = "PYTHONPATH"
_CHOICES = "--config-dir"


def named_paths(config: Mapping[str, Any], choices: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return the paths in a configuration by option, and the folders of data, own modules and `choices`.

    Names that are no files are left out.
    """
    kept = with_effect(config)
    paths: dict[str, list[str]] = {}
    for option, value, hint in typed_options(config):
        if _is_path(hint) and option.partition(".")[0] in kept:
            texts = value if isinstance(value, list) else [value] if isinstance(value, str) and value else []
            paths.setdefault(option, []).extend(each for each in texts if os.path.exists(each))
    paths[_DATA] = [each for each in [os.environ.get(_DATA) or "data"] if os.path.isdir(each)]
    if config["plugins"] or "_target_" in {*config["model"], *config["finetune"]["teacher_options"]}:
        paths[_MODULES] = [sys.path[0] or os.curdir]
    paths[_CHOICES] = list(choices)
    return {option: texts for option, texts in paths.items() if texts}


def path_from_here(option: str, override: str, record: Mapping[str, Any], run: RunFolder) -> str:
    """Rewrite the relative paths in a recorded override so that they lead to the same files from here."""
    known = record.get("paths", {}).get(option, {})
    value: Any = record["config"]
    for part in option.split(".") if known else ():
        value = value[part]

    def moved(text: str) -> str:
        return _found(option, text, known[text], run) if text in known else text

    changed = _mapped(value, moved)
    return f"{option}={in_hydra(changed)}" if known and changed != value else override


def _recorded_options(record: Mapping[str, Any]) -> list[str]:
    """Return the options whose paths a run recorded."""
    return [option for option in record.get("paths", {}) if option not in (_DATA, _MODULES, _CHOICES)]


def _recorded_flags(folder: Path, flags: Namespace) -> list[str]:
    """Return the flag of the folder with choices that a run was given, unless there is one here."""
    run = RunFolder(folder)
    paths = (_record(run) or {}).get("paths", {}).get(_CHOICES, {})
    if flags.config_dir is not None:
        return []
    return [f"{_CHOICES}={_found(_CHOICES, text, places, run)}" for text, places in paths.items()]


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
    if isinstance(value, list):
        return [_mapped(each, change) for each in value]
    return change(value) if isinstance(value, str) else value


def _is_path(hint: Any) -> bool:
    return hint is Path or any(map(_is_path, typing.get_args(hint)))


_OF_NETWORK = ("plugins", "model", "dataset")
_OF_TASK = {
    "evaluate": ("seed", *_OF_NETWORK),
    "export": ("seed", *_OF_NETWORK),
    "finetune": ("seed", *_OF_NETWORK, "optim", "finetune"),
    "apply": ("seed", *_OF_NETWORK),
}
"""Sections that tasks take from the run that `run` names."""
_CHECKPOINT = "model.checkpoint"
_EPOCHS = "finetune.epochs"


def options_of_run(arguments: Sequence[str]) -> list[str]:
    """Return the network and data options of an earlier run that the command line does not set.

    With `run=RUN` they are those that the task needs, with the files of RUN; with
    `weights=RUN/model.safetensors` the network and the data. The run's dense network, loaded or trained
    there, is the checkpoint.
    """
    set_here = {each.key_or_group: each for each in parsed_overrides(parsed_flags(arguments).overrides)}
    if "run" in set_here and set_here["run"].is_sweep_override():
        raise ConfigError(f"{set_here['run'].input_line}: run names one run, for all jobs of a sweep")
    named, task = _text(set_here, "weights"), _text(set_here, "task") or "pipeline"
    taken = _text(set_here, "run") if task in _OF_TASK else ""
    if not taken and (not named or "experiment" in set_here):
        return []
    folder = RunFolder(Path(taken) if taken else Path(named).parent)
    record = _record(folder)
    recorded = _recorded(folder, record, _OF_TASK[task] if taken else _OF_NETWORK)
    if recorded is None:
        if taken:
            raise ConfigError(f"run={taken}: there is no run of the command line in that folder; name one")
        return []
    if taken:
        recorded += _files_of(folder, task)
    groups = {group for group in _OF_TASK["finetune"] if group in set_here}
    if "experiment" in set_here:  # it chooses network and data
        groups = {*_OF_NETWORK}
    left = {
        option: text
        for option, text in recorded
        if option not in set_here and option.partition(".")[0] not in groups
    }
    known = _CHECKPOINT in {*set_here, *left} or "model" in groups
    if task == "apply" and taken and not known and record["config"]["model"].get("architecture") != "onnx":
        raise ConfigError(  # training again would give another network
            f"run={taken} has no {folder.dense.name}, the network that its plan is for; put it back, or give "
            f"{_CHECKPOINT}=PATH"
        )
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
    if group in GROUPS and group not in of_group:
        yield group, f"{group}={config[group][GROUPS[group].key]}"
    for option, text in of_group.items():
        if option.partition(".")[0] == group and option not in (_CHECKPOINT, _EPOCHS):
            yield option, text
    if group == "model":
        checkpoint = config[group].get("checkpoint") or (run.dense if run.dense.is_file() else None)
        if checkpoint:
            yield _CHECKPOINT, quoted(_CHECKPOINT, str(checkpoint))


def _files_of(folder: RunFolder, task: str) -> list[tuple[str, str]]:
    """Return the options that name a run's compressed network or plan, as the task expects them."""
    option, path = ("plan", folder.plan) if task == "apply" else ("weights", folder.model)
    if path.is_file():
        return [(option, quoted(option, str(path)))]
    if task == "evaluate":  # it scores the dense network
        return []
    raise ConfigError(
        f"run={folder.path} has no {path.name}, which task={task} needs; wait for the run's end, or "
        "name another one"
    )


def resumed_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments, preceded by those of the run that `resume=RUN` names.

    The run continues in its own folder, with its own configuration; new options come last and override it.
    """
    folder = resumed_folder(arguments)
    if folder is None:
        return list(arguments)
    flags = parsed_flags(arguments)
    try:
        if flags.multirun or (folder / "multirun.yaml").is_file():
            raise ConfigError(
                f"resume={folder} goes on with one run; a sweep goes on when its command is run again with "
                "hydra.sweep.dir=FOLDER: finished jobs are skipped"
            )
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise ConfigError(
            f"resume={folder}: that folder cannot be read ({error.strerror}); give the folder of a run"
        ) from error
    if "overwrite=true" in (argument.lower() for argument in arguments):
        raise ConfigError(
            f"resume={folder} goes on with a run, and overwrite=true begins anew; leave one of them out"
        )
    of_run = [each for each in arguments if each.lstrip("+").partition("=")[0] in ("resume", "hydra.run.dir")]
    for each in of_run:  # elsewhere the run would start over and replace files, which `resume` allows
        named = folder if each.startswith("resume=") else parsed_overrides([each])[0].value()
        if Path(str(named)).resolve() != folder.resolve():
            raise ConfigError(
                f"{each} names another folder than resume={folder}, and a run goes on in its own folder; "
                "leave hydra.run.dir out, or leave resume out for a new run in that folder"
            )
    others = [each for each in arguments if each not in of_run]
    new = {each.partition("=")[0]: each for each in others}
    kept = [each for each in _recorded_overrides(folder, new) if each.partition("=")[0] not in new]
    own = [quoted(key, str(folder)) for key in ("hydra.run.dir", "resume")]
    return [*kept, *own, *others, *_recorded_flags(folder, flags)]


def resumed_folder(arguments: Sequence[str]) -> Path | None:
    """Return the folder that `resume=RUN` names, with or without quotes, or None."""
    name = next((each.removeprefix("resume=") for each in arguments if each.startswith("resume=")), "")
    text = name[1:-1] if name[:1] == name[-1:] == "'" else name
    return None if text in ("", "null") else Path(text)


def _recorded_overrides(folder: Path, new: Mapping[str, str]) -> list[str]:
    """Return the overrides of the run in a folder; paths lead from here.

    For files that are gone, the new overrides say where they are.
    """
    run = RunFolder(folder)
    content, config = _record(run), run.recorded()
    if config is None:  # Hydra's record stands in for a damaged one
        try:
            overrides = OmegaConf.to_container(OmegaConf.load(folder / ".hydra" / "overrides.yaml"))
        except (OSError, YAMLError, OmegaConfBaseException):
            overrides = None
        if not isinstance(overrides, list):
            raise ConfigError(
                f"resume={folder}: there is no rankrl run in that folder, or its record {run.record} is "
                "damaged; begin a new run in another folder"
            )
        return [str(each) for each in overrides]
    if config.get("task") == COMPRESS:
        raise ConfigError(f"resume={folder}: that is the folder of a call of {COMPRESS}; {SAME_CALL}")
    before = {str(each).lstrip("+").partition("=")[0]: str(each) for each in content["overrides"]}
    take_surroundings(content, run)
    for option in _recorded_options(content):
        try:
            override = path_from_here(option, before.get(option, ""), content, run)
        except ConfigError:
            if option not in new:
                raise
            override = new[option]
        if override:  # else an experiment sets it, and its path leads from here
            before[option] = override
    return list(before.values())


def check_resumed(folder: Path, overrides: Sequence[str], composed: Composed, now: Mapping[str, Any]) -> bool:
    """Refuse options that would change the results of a resumed run; tell whether it is finished."""
    check_free(folder)
    new = {each.partition("=")[0]: each for each in overrides}
    try:
        before = plain_values(composed(_recorded_overrides(folder, new)))
    except COMPOSITION_ERRORS:  # one of its options is no longer known
        before = dict(now)
    changes = changed_options(with_effect(before), with_effect(now))
    finished = RunFolder(folder).finished
    if changes and finished:
        raise ConfigError(
            f"resume={folder}: that run is finished, with other options ({changes}), and was left as it "
            "is. Choose another folder for a run with these: hydra.run.dir=FOLDER, without resume"
        )
    if changes:
        raise ConfigError(
            f"resume={folder} goes on with a run to the results of its own options, and not with others "
            f"({changes}); leave these out, or begin a new run: hydra.run.dir=FOLDER, without resume"
        )
    return finished


def write_record(config: DictConfig, folder: Path) -> None:
    """Write the files in `.hydra`, which Hydra itself would write before the folder is checked.

    `hydra.output_subdir` is null so that Hydra does not.
    """
    of_hydra = HydraConfig.get()
    contents = {
        "config": config,
        "hydra": OmegaConf.create({"hydra": of_hydra}),
        "overrides": of_hydra.overrides.task,
    }
    for name, content in contents.items():
        write_atomically(folder / ".hydra" / f"{name}.yaml", OmegaConf.to_yaml(content))
