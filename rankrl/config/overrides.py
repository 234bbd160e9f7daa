"""The command line's overrides: checked before Hydra runs, and taken over from a run that is resumed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser  # Hydra has no public way to tell flags from overrides
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rankrl.config import schema  # noqa: F401 - registers the types that the configuration refers to
from rankrl.config.folder import config_folder
from rankrl.errors import ConfigError, did_you_mean
from rankrl.workflow.run_folder import RunFolder

# Values of one sweep that are tried before it starts; Hydra itself checks every job.
_MOST_TRIED = 30


def overrides_first(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with overrides before flags: Hydra refuses `rankrl seed=1 -m decomposition=cp`."""
    overrides = [each for each in arguments if not each.startswith("-") and ("=" in each or each[:1] == "~")]
    return [*overrides, *(each for each in arguments if each not in overrides)]


def resumed_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments, with those of the run that `resume=RUN` names in front.

    The run goes on in its own folder, with its own configuration; options given now come last and win.

    Raises:
        ConfigError: `RUN` is no folder of a rankrl run.
    """
    folder = next((Path(a.removeprefix("resume=")) for a in arguments if a.startswith("resume=")), None)
    if folder is None or str(folder) in ("", "null"):
        return list(arguments)
    if (folder / "multirun.yaml").is_file() or {"-m", "--multirun"} & set(arguments):
        raise ConfigError(
            f"resume={folder} goes on with one run; a sweep goes on when its command is given again with "
            "hydra.sweep.dir=FOLDER: finished jobs are skipped"
        )
    before = _recorded_overrides(folder)
    given = {argument.partition("=")[0] for argument in arguments}
    kept = [override for override in before if override.partition("=")[0] not in given]
    resume, run_folder = (quoted(key, str(folder)) for key in ("resume", "hydra.run.dir"))
    return [*kept, run_folder, *(resume if each.startswith("resume=") else each for each in arguments)]


def quoted(key: str, value: str) -> str:
    """Return an override whose value Hydra takes as it is, whatever characters it has."""
    text = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"{key}='{text}'"


def _recorded_overrides(folder: Path) -> list[str]:
    """Return the overrides of the run in a folder: its own record's, or Hydra's.

    Hydra writes its record before a job can refuse a folder that is another run's, so ours comes first.
    """
    record = RunFolder(folder).record
    path = record if record.is_file() else folder / ".hydra" / "overrides.yaml"
    if not path.is_file():
        raise ConfigError(f"resume={folder}: there is no rankrl run in that folder (no {path})")
    content = OmegaConf.to_container(OmegaConf.load(path))
    overrides = content.get("overrides") if isinstance(content, dict) else content
    if not isinstance(overrides, list):
        raise ConfigError(f"resume={folder}: {path} is damaged; restore it or start anew")
    return [str(override) for override in overrides]


def check_overrides(arguments: Sequence[str]) -> None:
    """Compose the configuration once, so that a mistake gives one paragraph instead of Hydra's trace.

    Of an option that sweeps over several values each is tried, with the first of the others; flags are left
    to Hydra.

    Raises:
        ConfigError: An option or value is unknown, of the wrong type, or cannot be parsed; the message gives
            the nearest known one.
    """
    overrides = get_args_parser().parse_known_args(list(arguments))[0].overrides
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        raise ConfigError(f"the command line cannot be parsed: {_first_line(error)}") from error
    with initialize_config_dir(version_base="1.3", config_dir=str(config_folder())):
        try:
            for overrides in _tried(parsed):
                OmegaConf.to_object(compose("config", overrides=overrides))
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(_explain(error, parsed)) from error


def _tried(overrides: Sequence[Override]) -> Iterator[list[str]]:
    """Yield the overrides with the first value of every sweep, then with each further value of each sweep."""
    values = [_values(override) for override in overrides]
    first = [each[0] for each in values]
    yield first
    for index, each in enumerate(values):
        for value in each[1:_MOST_TRIED]:
            yield [*first[:index], value, *first[index + 1 :]]


def _values(override: Override) -> list[str]:
    """Return the override once for every value that it sweeps over."""
    line = override.input_line or ""
    if not override.is_sweep_override():
        return [line]
    key = line.partition("=")[0]
    found: Any = override.value()
    if isinstance(found, Glob):
        return [f"{key}={name}" for name in found.filter(_choices(override.key_or_group))] or [line]
    if not override.is_discrete_sweep():  # an interval, which some sweepers understand
        return [f"{key}={found.start}"] if isinstance(found, IntervalSweep) else [line]
    return [f"{key}={value}" for value in override.sweep_string_iterator()]


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _explain(error: BaseException, overrides: Sequence[Override]) -> str:
    """Turn Hydra's or OmegaConf's message into one that names the nearest option."""
    text = str(error)
    group = re.search(r"Could not find '([^']+)/([^'/]+)'", text)
    if group is not None:
        name, value = group.groups()
        known = _choices(name)
        return f"{name}={value} is unknown; choose from {', '.join(known)}.{did_you_mean(value, known)}"
    unknown = re.search(
        r"Could not override '([^']+)'|Could not find '([^']+)'|Key '([^']+)' is not in", text
    )
    if unknown is not None:
        name = next(part for part in unknown.groups() if part)
        written = [o.key_or_group for o in overrides if o.key_or_group.endswith(name)]
        name = written[0] if written else name
        return (
            f"the option {name!r} is unknown.{did_you_mean(name, _known_options())} "
            "`rankrl --help` lists all options."
        )
    where = re.search(r"full_key: (\S+)", text)
    place = f"{where.group(1)}: " if where else ""
    return f"{place}{_first_line(error).rstrip('.')}. `rankrl --cfg job` shows the options and their values."


def _choices(group: str) -> list[str]:
    return sorted(path.stem for path in (config_folder() / group).glob("*.yaml"))


def _known_options() -> list[str]:
    """Return all options of the default configuration, dotted, and the names of the groups."""
    config = compose("config")
    groups = [path.name for path in config_folder().iterdir() if path.is_dir()]
    return [*_dotted(config, ""), *groups]


def _dotted(config: DictConfig, prefix: str) -> Iterator[str]:
    for key in config:
        name = f"{prefix}{key!s}"
        yield name
        value = config._get_node(key)
        if isinstance(value, DictConfig) and not value._is_none() and not value._is_missing():
            yield from _dotted(value, f"{name}.")
