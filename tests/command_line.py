"""What tests of the command line share: options of a quick run, and the JSON files of a run folder."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rankrl.config.applicable import check_applicable
from rankrl.config.folder import config_folder
from rankrl.errors import ConfigError

QUICK = (
    "model=conv4",
    "train.epochs=2",
    "train.optim.lr=0.02",
    "search.episodes=3",
    "search.images=100",
    "calibration.images=64",
    "decomposition.candidates=4",
    "decomposition.iterations=5",
    "decomposition.final_iterations=10",
    "decomposition.final_starts=1",
    "finetune.epochs=1",
    "export.runs=3",
)


BUDGET = "budget.params=0.5"
"""What `whole_run` was given beside `QUICK`."""


def with_effect(*arguments: str, removable: Collection[str] = QUICK) -> tuple[str, ...]:
    """Return the arguments without those of `removable` that the task has no use for, and would refuse."""
    if not set(arguments) & set(removable):
        return arguments
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(config_folder())):
            overrides = [each for each in arguments if not each.startswith("-") and "=" in each]
            config: Any = OmegaConf.to_container(compose("config", overrides=overrides))
    except (HydraException, OmegaConfBaseException, ValueError):
        return arguments  # refused for something else
    return tuple(each for each in arguments if each not in removable or _has_effect(each, config))


def _has_effect(argument: str, config: dict[str, Any]) -> bool:
    try:
        check_applicable(config, [argument.partition("=")[0]])
    except ConfigError:
        return False
    return True


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content
