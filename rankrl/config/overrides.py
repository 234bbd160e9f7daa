"""The command line's overrides: checked before Hydra runs, and taken over from a run that is resumed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser  # Hydra has no public way to tell flags from overrides
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rankrl.config import schema  # noqa: F401 - registers the types that the configuration refers to
from rankrl.config.folder import config_folder
from rankrl.errors import ConfigError, did_you_mean


def resumed_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments, with those of the run that `resume=RUN` names in front.

    The run goes on in its own folder, with its own configuration; options given now come last and win.

    Raises:
        ConfigError: `RUN` is no folder of a rankrl run.
    """
    folder = next((Path(a.removeprefix("resume=")) for a in arguments if a.startswith("resume=")), None)
    if folder is None or str(folder) in ("", "null"):
        return list(arguments)
    recorded = folder / ".hydra" / "overrides.yaml"
    if not recorded.is_file():
        raise ConfigError(f"resume={folder}: there is no rankrl run in that folder (no {recorded})")
    before = OmegaConf.to_object(OmegaConf.load(recorded))
    given = {argument.partition("=")[0] for argument in arguments}
    kept = (
        [str(a) for a in before if str(a).partition("=")[0] not in given] if isinstance(before, list) else []
    )
    return [*kept, *arguments, f"hydra.run.dir={folder}"]


def check_overrides(arguments: Sequence[str]) -> None:
    """Compose the configuration once, so that a mistake gives one paragraph instead of Hydra's trace.

    Of an option that sweeps over several values the first is tried; flags are left to Hydra.

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
            OmegaConf.to_object(compose("config", overrides=[_one_value(override) for override in parsed]))
        except HydraException as error:
            raise ConfigError(_explain(error, parsed)) from error
        except OmegaConfBaseException as error:
            raise ConfigError(_explain(error, parsed)) from error


def _one_value(override: Override) -> str:
    line = override.input_line or ""
    if not override.is_sweep_override():
        return line
    return f"{line.partition('=')[0]}={next(iter(override.sweep_string_iterator()))}"


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
