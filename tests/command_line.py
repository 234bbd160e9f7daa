"""What tests of the command line share: calls of it, options of a quick run, a small network."""

import copy
import json
import logging
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor, nn

from decomposition.errors import DecompositionError
from rankrl.cli.app import _run_task, checked_arguments, main
from rankrl.cli.config.checks import check_command, check_effect
from rankrl.cli.config.compose import composing, parsed_flags, parsed_overrides
from rankrl.cli.config.schema import AppConfig, built, group_names, store_groups
from rankrl.cli.tasks.task_run import TaskRun
from rankrl.errors import ConfigError, RankrlError
from rankrl.models import save_checkpoint
from rankrl.runs.run_folder import RunFolder

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
    "finetune.epochs=1",
    "export.runs=3",
)


BUDGET = ("budget.params=0.5", "selector=bayes")
"""What `whole_run` was given beside `QUICK`."""


def with_effect(*arguments: str, removable: Collection[str] = QUICK) -> tuple[str, ...]:
    """Return the arguments without those of `removable` that the task has no use for, and would refuse."""
    if not set(arguments) & set(removable):
        return arguments
    try:
        config = values(*(each for each in arguments if not each.startswith("-") and "=" in each))
    except (RankrlError, HydraException, OmegaConfBaseException, ValueError):
        return arguments  # refused for something else
    return tuple(each for each in arguments if each not in removable or _has_effect(each, config))


def _has_effect(argument: str, config: dict[str, Any]) -> bool:
    try:
        check_effect(config, [argument.partition("=")[0]])
    except ConfigError:
        return False
    return True


@contextmanager
def workplace(folder: Path) -> Iterator[None]:
    """Work in an empty folder with an own cache, and undo what Hydra does to the process."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("RANKRL_CACHE", str(folder / "cache"))
        patch.setattr(sys, "path", list(sys.path))
        yield
        GlobalHydra.instance().clear()
    root.handlers, root.level = handlers, level


def call(*arguments: str) -> None:
    """Call `rankrl` as the console would."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["rankrl", *with_effect(*arguments)])
        GlobalHydra.instance().clear()
        main()


@cache
def _with_choices(choices: tuple[str, ...]) -> DictConfig:
    store_groups()
    with composing() as composed:
        config = copy.deepcopy(composed(choices))
    OmegaConf.set_readonly(config, None)
    with open_dict(config):
        del config["hydra"]
    return config


def configuration(*overrides: str) -> DictConfig:
    """Return the configuration with these overrides, composed once for the same choices of groups."""
    parsed, groups = parsed_overrides(overrides), group_names()
    choices = [str(each.input_line) for each in parsed if each.key_or_group in groups]
    config = copy.deepcopy(_with_choices(tuple(choices)))
    for each in parsed:
        option = each.key_or_group
        if option in groups or option.startswith(("hydra.", "hydra/")):
            continue
        if each.is_delete():
            section, _, name = option.rpartition(".")
            with open_dict(config):
                del (OmegaConf.select(config, section) if section else config)[name]
        else:
            OmegaConf.update(config, option, each.value(), merge=True, force_add=each.is_add())
    return config


def values(*overrides: str) -> dict[str, Any]:
    """Return the configuration with these overrides, plain values."""
    plain: Any = OmegaConf.to_container(configuration(*overrides), resolve=True)
    return plain


def settings(*overrides: str) -> AppConfig:
    """Return the configuration with these overrides, as tasks get it."""
    plain: Any = OmegaConf.to_container(configuration(*overrides), resolve=True)
    return built(AppConfig, plain)


def task_run(*overrides: str) -> TaskRun:
    """Return what a task gets with these overrides."""
    return TaskRun(settings(*overrides), RunFolder(Path("run")))


def check_overrides(arguments: Sequence[str]) -> None:
    """Check the names and values of a command line, and not its paths."""
    flags = parsed_flags(arguments)
    with composing(flags) as composed:
        check_command(flags, composed)


def refusal(*arguments: str) -> str:
    """Return why a command line is refused before Hydra starts."""
    store_groups()
    with pytest.raises(RankrlError) as refused:
        checked_arguments(arguments)
    return " ".join(str(refused.value).split())


def task_refusal(*arguments: str) -> str:
    """Return why a task refuses its options: a run without Hydra, and without the checks before it."""
    with pytest.raises((RankrlError, DecompositionError)) as refused:
        _run_task(values(*arguments), RunFolder(Path("run")))
    return " ".join(str(refused.value).split())


class Killed(BaseException):
    """Stands for the end of the process."""


def kill(*_: object, **__: object) -> None:
    raise Killed


class SmallNetwork(nn.Module):
    """Two convolutions and two dense layers for the digits: a fraction of the work that conv4 is."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3), nn.Conv2d(16, 24, 3)
        self.fc1, self.fc2 = nn.Linear(96, 48), nn.Linear(48, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.conv2(torch.relu(self.conv1(x)))), 2)
        return self.fc2(torch.relu(self.fc1(x.flatten(1))))


def small_network(folder: Path) -> tuple[str, ...]:
    """Write the weights of an untrained `SmallNetwork` to the folder; return the options that name it."""
    torch.manual_seed(0)
    path = folder / "small.safetensors"
    save_checkpoint(SmallNetwork(10), path)
    return "model=custom", "model._target_=command_line.SmallNetwork", f"model.checkpoint={path}"


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content
