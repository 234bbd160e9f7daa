"""The command line's overrides, checked before Hydra runs."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import OmegaConf

from rankrl.cli.config.applicable import check_applicable
from rankrl.cli.config.choices import group_names
from rankrl.cli.config.composition import composed_config, composing, offered_choices, parsed_flags
from rankrl.cli.config.hydra_errors import explained
from rankrl.cli.config.parsing import (
    ALL_COMBINATIONS,
    COMPOSITION_ERRORS,
    TOO_DEEP,
    override_values,
    parsed_overrides,
    tried_overrides,
)
from rankrl.cli.config.schema import AppConfig
from rankrl.cli.config.structured import built
from rankrl.cli.config.values import check_value, check_values
from rankrl.errors import ConfigError


def check_overrides(arguments: Sequence[str]) -> None:
    """Compose the configuration once, so that a mistake gives one paragraph instead of Hydra's trace.

    Of an option that sweeps over several values each is tried, with the first of the others; flags are left
    to Hydra.
    """
    flags = parsed_flags(arguments)
    parsed = parsed_overrides(flags.overrides)
    with composing(flags):
        for override in parsed:
            for value in override_values(override):
                _check_override(*parsed_overrides([value]))
        try:
            hydra = composed_config(next(tried_overrides(parsed)), with_hydra=True).hydra
            if hydra.job.chdir:
                raise ConfigError(
                    "hydra.job.chdir=true would change the folder that the paths of options begin in; "
                    "leave it out: whatever a run writes lies in hydra.run.dir"
                )
            parsed = [*_swept_by_configuration(parsed, multirun=flags.multirun), *parsed]
            for overrides in tried_overrides(parsed):
                config = composed_config(overrides)
                plain: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
                check_values(plain)
                check_applicable(plain, [each.key_or_group for each in parsed_overrides(overrides)])
                built(AppConfig, plain)
            OmegaConf.to_container(hydra.overrides.task, resolve=True)  # as the run's record has them
        except RecursionError as error:
            raise ConfigError(TOO_DEEP) from error
        except COMPOSITION_ERRORS as error:
            raise ConfigError(explained(error, parsed)) from error


def composed(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the configuration that overrides stand for, plain values; empty where one is unknown."""
    if not GlobalHydra.instance().is_initialized():  # as it is within a run
        with composing():
            return composed(overrides)
    try:
        plain: Any = OmegaConf.to_container(composed_config(overrides), resolve=True)
    except COMPOSITION_ERRORS:
        return {}
    return typing.cast(dict[str, Any], plain)


def longest_overrides(overrides: Sequence[str], *, multirun: bool) -> list[str]:
    """Return overrides with the longest value of every sweep: what a job's folder is named after at most.

    Hydra's compose must be initialised.
    """
    parsed = parsed_overrides(overrides)
    swept = _swept_by_configuration(parsed, multirun=multirun)
    return [max(override_values(each), key=len) for each in (*swept, *parsed)]


def _check_override(override: Override) -> None:
    """Refuse a group that is set to something else than a name, and what the schema does not allow.

    Where OmegaConf refuses a value it does not say which ones are allowed.
    """
    if override.is_delete():
        return
    name, value = override.key_or_group, override.value()
    if any(part.startswith("__") for part in name.split(".")):  # OmegaConf would set the attribute
        raise ConfigError(f"the option {name!r} is unknown. `rankrl --help` lists all options.")
    if name in group_names() and not isinstance(value, str) and (name, value) != ("experiment", None):
        raise ConfigError(
            f"{override.input_line}: a group is chosen by name, one of "
            f"{', '.join(offered_choices(name))}; its options are set one by one, as {name}.OPTION=VALUE"
        )
    if name not in group_names():
        check_value(name, value)


def _swept_by_configuration(overrides: Sequence[Override], *, multirun: bool) -> list[Override]:
    """Return the sweeps that the configuration itself asks for, such as an experiment's."""
    hydra = composed_config(next(tried_overrides(overrides)), with_hydra=True).hydra
    several = multirun or hydra.mode == RunMode.MULTIRUN
    swept = (OmegaConf.select(hydra, "sweeper.params") or {}) if several else {}
    sweeps = parsed_overrides([f"{key}={value}" for key, value in swept.items()])
    for override in sweeps:
        for value in override_values(override):
            _check_override(*parsed_overrides([value]))
    for override in (each for each in (*sweeps, *overrides) if each.is_sweep_override()):
        line, name = override.input_line, override.key_or_group
        if not several:
            raise ConfigError(
                f"{line} gives several values, a job for each; add -m for a sweep, or quote what is one "
                f"value: {name}=\"'...'\""
            )
        if not override.is_discrete_sweep() and hydra.sweeper._target_ == ALL_COMBINATIONS:
            raise ConfigError(
                f"{line} gives no list of values, which Hydra's own sweeper runs one by one; write "
                f"{name}=A,B,C, or choose a sweeper that draws values, such as hydra/sweeper=optuna of the "
                "package hydra-optuna-sweeper"
            )
    return sweeps
