"""Files that options name, looked for before anything is imported or read, and the runs that they are of."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override

from rankrl.cli.config.composition import parsed_flags
from rankrl.cli.config.parsing import parsed_overrides
from rankrl.cli.config.quoting import quoted
from rankrl.cli.config.tables import TABLES
from rankrl.errors import ConfigError, StorageError
from rankrl.runs.run_folder import RunFolder

_FILES = {
    "weights": ("weights", "model.safetensors"),
    "plan": ("plan", "plan.json"),
    "timing.table": ("times", "times.json"),
    "model.checkpoint": ("checkpoint", "dense.safetensors"),
    "finetune.teacher": ("checkpoint", "dense.safetensors"),
}
"""Options that name a file, what that is called, and what a run's folder has for them."""
_OF_NETWORK = ("model", "dataset")
_CHECKPOINT = "model.checkpoint"


def check_input_files(config: Mapping[str, Any]) -> None:
    """Refuse files that are not there, and folders in their place.

    Args:
        config: The composed configuration, plain values.

    Raises:
        ConfigError: Naming the option and, for a folder that has it, the file in it.
    """
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


def network_of_weights(arguments: Sequence[str]) -> list[str]:
    """Return the options of the network and the dataset that the run of `weights=` had, but for those set.

    The run's record lies in the file's folder. Its dense network, loaded or trained there, is the checkpoint.

    Args:
        arguments: The command line; of a group that it chooses nothing is taken.
    """
    set_here = {each.key_or_group: each for each in parsed_overrides(parsed_flags(arguments).overrides)}
    weights = set_here.get("weights")
    if weights is None or weights.is_sweep_override() or not weights.value() or "experiment" in set_here:
        return []
    groups = [group for group in _OF_NETWORK if group not in set_here]
    folder = RunFolder(Path(str(weights.value())).parent)
    try:
        record = json.loads(folder.record.read_text(encoding="utf-8"))
        overrides, config = parsed_overrides([str(each) for each in record["overrides"]]), record["config"]
        recorded = [each for group in groups for each in _of_group(group, overrides, config, folder)]
        return [text for option, text in recorded if option not in set_here]
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
    ):  # it is no run's, and the options are the user's to give
        return []


def _of_group(
    group: str, overrides: Sequence[Override], config: Mapping[str, Any], run: RunFolder
) -> Iterator[tuple[str, str]]:
    """Yield the options of a group that a run had, each with its override."""
    yield group, f"{group}={config[group][TABLES[group].key]}"
    for override in overrides:
        option = override.key_or_group
        if option.startswith(f"{group}.") and option != _CHECKPOINT:
            yield option, str(override.input_line)
    if group == "model":
        checkpoint = Path(config[group].get("checkpoint") or run.dense)
        if checkpoint.is_file():
            yield _CHECKPOINT, quoted(_CHECKPOINT, str(checkpoint))
