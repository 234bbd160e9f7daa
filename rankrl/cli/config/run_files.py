"""Check the files and folders of a run before it starts: inputs, its own folder, the run to resume."""

from __future__ import annotations

import copy
import json
import os
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rankrl.cli.config.choices import TABLES
from rankrl.cli.config.composition import (
    composed_config,
    composing,
    in_hydra,
    parsed_flags,
    parsed_overrides,
    quoted,
)
from rankrl.cli.config.overrides import composed, longest_overrides, typed_options
from rankrl.errors import ConfigError, StorageError
from rankrl.files import check_own, write_atomically
from rankrl.runs.run_folder import (
    COMPRESS,
    SAME_CALL,
    RunFolder,
    changed_options,
    check_free,
    check_writable,
    with_effect,
)

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
"""Files that tasks take from the run that `run` names."""
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


def resumed_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments, preceded by those of the run that `resume=RUN` names.

    The run continues in its own folder, with its own configuration; new options come last and override it.
    """
    folder = next((Path(a.removeprefix("resume=")) for a in arguments if a.startswith("resume=")), None)
    if folder is None or str(folder) in ("", "null"):
        return list(arguments)
    try:
        of_sweep = (folder / "multirun.yaml").is_file()
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise ConfigError(
            f"resume={folder}: that folder cannot be read ({error.strerror}); give the folder of a run"
        ) from error
    if of_sweep or {"-m", "--multirun"} & set(arguments):
        raise ConfigError(
            f"resume={folder} goes on with one run; a sweep goes on when its command is run again with "
            "hydra.sweep.dir=FOLDER: finished jobs are skipped"
        )
    if "overwrite=true" in (argument.lower() for argument in arguments):
        raise ConfigError(
            f"resume={folder} goes on with a run, and overwrite=true begins anew; leave one of them out"
        )
    arguments = _without_run_folder(arguments, folder)
    new = {argument.partition("=")[0]: argument for argument in arguments}
    before = _recorded_overrides(folder, new)
    kept = [override for override in before if override.partition("=")[0] not in new]
    resume, run_folder = (quoted(key, str(folder)) for key in ("resume", "hydra.run.dir"))
    return [*kept, run_folder, *(resume if each.startswith("resume=") else each for each in arguments)]


def _without_run_folder(arguments: Sequence[str], folder: Path) -> list[str]:
    """Remove `hydra.run.dir` from the arguments of a resumed run; it may only name the run's folder.

    In another folder the run would start over and replace files there, as `resume` switches off that check.
    """
    kept = []
    for argument in arguments:
        if argument.lstrip("+").partition("=")[0] != "hydra.run.dir":
            kept.append(argument)
        elif Path(str(parsed_overrides([argument])[0].value())).resolve() != folder.resolve():
            raise ConfigError(
                f"{argument} names another folder than resume={folder}, and a run goes on in its own folder; "
                "leave hydra.run.dir out, or leave resume out for a new run in that folder"
            )
    return kept


def finished_run(arguments: Sequence[str]) -> Path | None:
    """Return the folder that `resume=RUN` names if its run has ended, and nothing else is asked for."""
    folder = Path(arguments[0].removeprefix("resume=")) if len(arguments) == 1 else Path()
    if not arguments or not arguments[0].startswith("resume=") or folder == Path():
        return None
    try:
        return folder if RunFolder(folder).finished else None
    except OSError:  # the checks of the folder report it
        return None


def _recorded_overrides(folder: Path, new: Mapping[str, str]) -> list[str]:
    """Return the overrides of the run in a folder, from its own record or Hydra's; paths lead from here.

    For files that are gone, the new overrides say where they are.

    Our record comes first, as it says where files are; that of Hydra stands in for a damaged one.
    """
    run = RunFolder(folder)
    own = run.recorded() is not None
    path = run.record if own else folder / ".hydra" / "overrides.yaml"
    if not path.is_file():
        if run.record.is_file():
            raise ConfigError(f"resume={folder}: {run.record} is damaged; begin a new run in another folder")
        raise ConfigError(f"resume={folder}: there is no rankrl run in that folder (no {path})")
    try:
        text = path.read_text(encoding="utf-8")
        content: Any = json.loads(text) if own else OmegaConf.to_container(OmegaConf.create(text))
    except (OSError, ValueError, YAMLError, OmegaConfBaseException):
        content = None
    overrides = content.get("overrides") if isinstance(content, dict) else content
    config = content.get("config") if isinstance(content, dict) else None
    if isinstance(config, dict) and config.get("task") == COMPRESS:
        raise ConfigError(f"resume={folder}: that is the folder of a call of {COMPRESS}; {SAME_CALL}")
    if not isinstance(overrides, list):
        raise ConfigError(f"resume={folder}: {path} is damaged; begin a new run in another folder")
    before = {str(each).lstrip("+").partition("=")[0]: str(each) for each in overrides}
    if not isinstance(config, dict):
        return list(before.values())
    take_surroundings(content, run)
    for option in recorded_options(content):
        try:
            override = path_from_here(option, before.get(option, ""), content, run)
        except ConfigError:
            if option not in new:
                raise
            override = new[option]
        if override:  # else an experiment sets it, and its path leads from here
            before[option] = override
    return list(before.values())


def check_resumed(arguments: Sequence[str]) -> Path | None:
    """Refuse options that would change the results of a resumed run; nothing is written."""
    flags = parsed_flags(arguments)
    folder = _resumed_folder(arguments)
    if folder is None or flags.help or flags.hydra_help or flags.cfg or flags.info:
        return None
    check_free(folder)
    finished = RunFolder(folder).finished
    with composing(flags):
        new = {each.partition("=")[0]: each for each in flags.overrides}
        before, now = composed(_recorded_overrides(folder, new)), composed(flags.overrides)
    if before:  # empty if one of its options is no longer known
        changes = changed_options(with_effect(before), with_effect(now))
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
    return folder if finished else None


def _resumed_folder(arguments: Sequence[str]) -> Path | None:
    """Return the folder that `resume=RUN` names, with or without quotes, or None."""
    argument = next((each for each in arguments if each.startswith("resume=")), None)
    name = None if argument is None else argument.removeprefix("resume=")
    if name in (None, "", "null"):
        return None
    return Path(str(parsed_overrides([str(argument)])[0].value()))


def check_folders(arguments: Sequence[str]) -> Path | None:
    """Refuse a folder that Hydra could not create or write; none is left behind."""
    flags = parsed_flags(arguments)
    if flags.help or flags.hydra_help or flags.cfg or flags.info:
        return None
    before = HydraConfig.instance().cfg
    with composing(flags):
        try:
            overrides = longest_overrides(flags.overrides, multirun=flags.multirun)
            config = copy.deepcopy(composed_config(overrides, with_hydra=True))
            with read_write(config.hydra), open_dict(config.hydra):
                config.hydra.job.num, config.hydra.job.id = 0, "0"
            HydraConfig.instance().set_config(config)  # resolves `${hydra:...}`
            if flags.multirun or config.hydra.mode == RunMode.MULTIRUN:
                sweep = _named(config, "hydra.sweep.dir")
                check_writable(sweep, "hydra.sweep.dir")
                subfolder = str(OmegaConf.select(config, "hydra.sweep.subdir") or "")
                check_writable(sweep / subfolder, "hydra.sweep.subdir")
                _check_reused(config.reuse)
                return sweep
            _check_run_folder(config)
            return None
        except (HydraException, OmegaConfBaseException) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(f"the name of the run folder cannot be read: {reason}") from error
        finally:
            HydraConfig.instance().cfg = before


def refuse_used_folder(folder: RunFolder, config: Mapping[str, Any]) -> None:
    """Refuse a folder with files of others, or with a run, and say how its options differ from these."""
    if folder.holds_results:
        state = folder.difference(config) or "already"
        raise ConfigError(
            f"{folder.path} holds a run {state}; `rankrl resume={folder.path}` goes on with it; for a new "
            "run choose another folder with hydra.run.dir=FOLDER, or overwrite=true to remove that one"
        )
    check_own(folder.path)


def _check_reused(folder: str | None) -> None:
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"reuse={folder}: there is no such folder; give one that holds finished runs")


def _check_run_folder(config: DictConfig) -> None:
    if config.reuse is not None:
        raise ConfigError(f"reuse={config.reuse} is for the jobs of a sweep; leave it out, or add -m")
    folder = _named(config, "hydra.run.dir")
    check_writable(folder, "hydra.run.dir")
    record = OmegaConf.select(config, "hydra.output_subdir")  # null switches Hydra's record off
    if record is not None:
        check_writable(folder / str(record), "hydra.output_subdir")
    check_free(folder)
    if config.resume is None and not config.overwrite:
        own = OmegaConf.masked_copy(config, [str(name) for name in config if name != "hydra"])
        plain: Any = OmegaConf.to_container(own, resolve=True)
        refuse_used_folder(RunFolder(folder), plain)


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


def _named(config: DictConfig, option: str) -> Path:
    name = OmegaConf.select(config, option)
    if name in (None, ""):
        raise ConfigError(f"{option} is empty; name a folder")
    return Path(str(name))
