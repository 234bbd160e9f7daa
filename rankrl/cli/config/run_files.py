"""Take options from earlier runs (`resume=`, `run=`, `weights=`); record a run's configuration and paths."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from rankrl.cli.config.checks import FILES, named_paths, option_value
from rankrl.cli.config.compose import Composed, parsed_flags, parsed_overrides, plain_values, quoted
from rankrl.cli.config.schema import GROUPS
from rankrl.errors import ConfigError
from rankrl.files import read_object, write_atomically
from rankrl.runs.run_folder import COMPRESS, SAME_CALL, RunFolder, changed_options, check_free, with_effect

_DATA = "RANKRL_DATA"
_PATHS = (*FILES, "model.path", "dataset.path")
"""Options that name files, relative to the folder that a run was started in."""


def _home(record: Mapping[str, Any], run: RunFolder) -> Path:
    """Return the folder that a run was started in, also where it was moved together with the run."""
    absolute, relative = record.get("folder") or (os.getcwd(), os.curdir)
    return Path(absolute) if os.path.isdir(absolute) else (run.path / relative).resolve()


def _use_modules_of(home: Path) -> None:
    """Import modules from the folder of a run before those of the same names in the current one."""
    if str(home) != os.path.abspath(sys.path[0]):
        sys.path.insert(0, str(home))


def _from_here(option: str, override: str, record: Mapping[str, Any], home: Path) -> str:
    """Rewrite the relative paths in a recorded override so that they lead to the same files from here."""
    named = named_paths(record["config"], option) if option in _PATHS else []
    if not named or home == Path.cwd():
        return override
    paths = [quoted(str(home / each)) for each in named]
    several = isinstance(option_value(record["config"], option), list)
    key = override.partition("=")[0]  # perhaps with a plus
    return f"{key}=[{','.join(paths)}]" if several else f"{key}={paths[0]}"


_OF_NETWORK = ("plugins", "model", "dataset")
_OF_TASK = {
    **dict.fromkeys(("apply", "evaluate", "export"), ("seed", *_OF_NETWORK)),
    "finetune": ("seed", *_OF_NETWORK, "optim", "finetune"),
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
    record = read_object(folder.record)
    try:
        overrides, config = parsed_overrides([str(each) for each in record["overrides"]]), record["config"]
        sections = _OF_TASK[task] if taken else _OF_NETWORK
        recorded = [each for group in sections for each in _of_group(group, overrides, config, folder)]
    except (KeyError, TypeError) as error:
        if taken:
            raise ConfigError(f"run={taken}: there is no run of the command line in that folder") from error
        return []
    if taken:
        recorded += _files_of(folder, task)
    # An experiment chooses network and data.
    groups = _OF_NETWORK if "experiment" in set_here else set_here.keys() & _OF_TASK["finetune"]
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
    home = _home(record, folder)
    _use_modules_of(home)
    if home != Path.cwd() and (home / "data").is_dir():
        os.environ.setdefault(_DATA, str(home / "data"))
    return [_from_here(option, text, record, home) for option, text in left.items()]


def _text(overrides: Mapping[str, Override], option: str) -> str:
    """Return the single value of an option; empty if it is not set, or is a sweep."""
    override = overrides.get(option)
    if override is None or override.is_sweep_override() or not override.value():
        return ""
    return str(override.value())


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
            yield _CHECKPOINT, f"{_CHECKPOINT}={quoted(str(checkpoint))}"


def _files_of(folder: RunFolder, task: str) -> list[tuple[str, str]]:
    """Return the options that name a run's compressed network or plan, as the task expects them."""
    option, path = ("plan", folder.plan) if task == "apply" else ("weights", folder.model)
    if path.is_file():
        return [(option, f"{option}={quoted(str(path))}")]
    if task == "evaluate":  # it scores the dense network
        return []
    raise ConfigError(
        f"run={folder.path} has no {path.name}, which task={task} needs; wait for the run's end, or "
        "name another one"
    )


def resumed_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments, preceded by those of the run that `resume=RUN` names.

    The run continues in its own folder, with its own configuration, and where it was started; new options
    come last and override it.
    """
    folder = resumed_folder(arguments)
    if folder is None:
        return list(arguments)
    flags = parsed_flags(arguments)
    if flags.multirun or os.path.isfile(folder / "multirun.yaml"):
        raise ConfigError(
            f"resume={folder} goes on with one run; a sweep goes on when its command is run again with "
            "hydra.sweep.dir=FOLDER: finished jobs are skipped"
        )
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
    record = read_object(RunFolder(folder).record)
    home = _home(record, RunFolder(folder))
    if home != Path.cwd():
        folder = folder.resolve()
        os.chdir(home)
    _use_modules_of(home)
    own = [f"{key}={quoted(str(folder))}" for key in ("hydra.run.dir", "resume")]
    folders = () if flags.config_dir else record.get("choices", ())
    choices = [f"--config-dir={home / each}" for each in folders]
    return [*kept, *own, *others, *choices]


def resumed_folder(arguments: Sequence[str]) -> Path | None:
    """Return the folder that `resume=RUN` names, with or without quotes, or None."""
    name = next((each.removeprefix("resume=") for each in arguments if each.startswith("resume=")), "")
    text = str(parsed_overrides([f"resume={name}"])[0].value()) if name[:1] == name[-1:] == "'" else name
    return None if text in ("", "null") else Path(text)


def _recorded_overrides(folder: Path, new: Mapping[str, str]) -> list[str]:
    """Return the overrides of the run in a folder; the new ones say where files are that are gone."""
    run = RunFolder(folder)
    content, config = read_object(run.record), run.recorded()
    if config is None:
        raise ConfigError(
            f"resume={folder}: there is no rankrl run in that folder, or its record {run.record} is damaged; "
            "begin a new run in another folder"
        )
    if config.get("task") == COMPRESS:
        raise ConfigError(f"resume={folder}: that is the folder of a call of {COMPRESS}; {SAME_CALL}")
    before = {str(each).lstrip("+").partition("=")[0]: str(each) for each in content["overrides"]}
    home = _home(content, run)
    for option in new.keys() & set(_PATHS):
        if not all((home / each).exists() for each in named_paths(config, option)):
            before[option] = new[option]
    return list(before.values())


def check_resumed(folder: Path, overrides: Sequence[str], composed: Composed, now: Mapping[str, Any]) -> bool:
    """Refuse options that would change the results of a resumed run; tell whether it is finished."""
    check_free(folder)
    new = {each.partition("=")[0]: each for each in overrides}
    before = plain_values(composed(_recorded_overrides(folder, new)))
    changes = changed_options(with_effect(before), with_effect(now))
    finished = RunFolder(folder).finished
    if changes:
        state = "that run is finished" if finished else "a run goes on to the results of its own options"
        raise ConfigError(
            f"resume={folder}: {state}, and not with others ({changes}); leave these out, or begin a new run "
            "with them: hydra.run.dir=FOLDER, without resume"
        )
    return finished


def write_record(config: DictConfig, folder: Path) -> None:
    """Write the files in `.hydra`, which Hydra would write before the folder is checked."""
    hydra = HydraConfig.get()
    contents = {"config": config, "hydra": {"hydra": hydra}, "overrides": hydra.overrides.task}
    for name, content in contents.items():
        write_atomically(folder / ".hydra" / f"{name}.yaml", OmegaConf.to_yaml(content))
