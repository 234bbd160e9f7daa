"""Resume runs from their records, and check the folders that runs write to."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rankrl.cli.config.composition import composed_config, composing, parsed_flags, parsed_overrides, quoted
from rankrl.cli.config.input_files import path_from_here, recorded_options, take_surroundings
from rankrl.cli.config.overrides import composed, longest_overrides
from rankrl.errors import ConfigError
from rankrl.files import check_own, write_atomically
from rankrl.runs.run_folder import (
    COMPRESS,
    SAME_CALL,
    RunFolder,
    changed_options,
    check_writable,
    with_effect,
)
from rankrl.runs.run_lock import check_free


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
