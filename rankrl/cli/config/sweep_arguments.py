"""What the command line of a sweep gets added, before Hydra starts."""

from __future__ import annotations

from collections.abc import Sequence

from rankrl.cli.config.composition import parsed_flags
from rankrl.cli.config.parsing import parsed_overrides

_SUBDIRECTORY = "hydra.sweep.subdir"


def sweep_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments, and for a sweep those that name each job's folder after what it varies.

    `rankrl -m dataset=mnist seed=0,1` gets the folders `seed-0` and `seed-1`: stable when values are added
    later, and without what all jobs share.
    """
    parsed = parsed_flags(arguments)
    overrides = {override.key_or_group: override for override in parsed_overrides(parsed.overrides)}
    if not (parsed.multirun or "experiment" in overrides):
        return list(arguments)
    options = {name: each for name, each in overrides.items() if not name.startswith(("hydra.", "hydra/"))}
    shared = ",".join(f"'{name}'" for name, each in options.items() if not each.is_sweep_override())
    added = [f"hydra.job.config.override_dirname.exclude_keys=[{shared}]"]
    if _SUBDIRECTORY not in overrides and any(each.is_sweep_override() for each in options.values()):
        added.append(f"{_SUBDIRECTORY}=${{hydra:job.override_dirname}}")
    return [*added, *arguments]
