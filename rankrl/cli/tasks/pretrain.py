"""Pretrain one policy on the plans of many networks and formats (`task=pretrain`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from rankrl.cli.config import options
from rankrl.cli.config.schema import AppConfig
from rankrl.cli.tasks import steps
from rankrl.data import ImageData
from rankrl.errors import CheckpointError, ConfigError
from rankrl.plan_search.pretraining import (
    FittedNetwork,
    TaskEpisodes,
    TaskFit,
    play_tasks,
    pretrained,
    read_episodes,
    task_fits,
)
from rankrl.plan_search.scores.scoring import ImageScoring
from rankrl.runs.run_folder import RunFolder
from rankrl.training.networks import build_network, model_title

POLICY_FILE = "policy.safetensors"
EPISODES_FOLDER = "tasks"


def pretrain(config: AppConfig, folder: RunFolder) -> None:
    """Score every task's plans once, train the policy on all of them, and write `policy.safetensors`.

    The episodes of each task are kept in `state/tasks`, so that a killed run resumes with the next task.
    """
    networks = _networks(config)
    added = [task for run in config.pretrain.add for task in _added(Path(run))]
    data = options.dataset(config)
    kept = folder.state / EPISODES_FOLDER
    episodes = [
        task
        for one in networks
        for network, scoring in _fitted(one, data, folder)
        for task in play_tasks(
            network,
            scoring,
            config.pretrain,
            kept,
            seed=config.seed,
            warn=folder.warn,
        )
    ]
    played = {task.task.decision for task in episodes}
    episodes += [task for task in added if task.task.decision not in played]
    if not episodes:
        raise ConfigError(
            "pretrain: no task is left, none of the budgets can be reached; raise pretrain.params or "
            "pretrain.macs"
        )
    policy = pretrained(episodes, config.pretrain, config.pretrain, seed=config.seed)
    policy.save(folder.path / POLICY_FILE)
    fits = task_fits(episodes, policy, config.pretrain, seed=config.seed)
    folder.finish(
        {
            "task": config.task,
            "seed": config.seed,
            "policy": POLICY_FILE,
            "tasks": [{**dataclasses.asdict(fit), "task": str(fit.task)} for fit in fits],
            "warnings": folder.notes.warnings,
        },
    )
    console = Console()
    console.print(_table(fits))
    console.print(f"policy: {folder.path / POLICY_FILE}", soft_wrap=True)


def _networks(config: AppConfig) -> list[AppConfig]:
    """Return a configuration for every network and format."""
    networks: Sequence[Mapping[str, Any]] = config.pretrain.networks or [config.model]
    for network in networks:
        if not network.get("architecture"):
            raise ConfigError(
                f"pretrain.networks: {dict(network)} names no architecture; an entry is for example "
                "{architecture: resnet20, checkpoint: cifar10-resnet20.th}"
            )
        if not network.get("checkpoint"):
            raise ConfigError(
                f"task=pretrain fits trained networks, and {network['architecture']} has no checkpoint; set "
                "model.checkpoint=PATH, or one for every entry of pretrain.networks"
            )
    formats = config.pretrain.formats
    decompositions = [config.decomposition]
    if formats is not None:
        decompositions = [
            dataclasses.replace(config.decomposition, format=name, formats=None) for name in formats
        ]
    return [
        dataclasses.replace(config, model=dict(network), decomposition=decomposition)
        for network in networks
        for decomposition in decompositions
    ]


def _fitted(
    config: AppConfig, data: ImageData, folder: RunFolder
) -> Iterator[tuple[FittedNetwork, ImageScoring]]:
    dense = build_network(config.model, data, seed=config.seed)
    network = steps.searched_network(config, data, dense, folder)
    limit, title = options.request(config).candidates().candidates, model_title(config.model, dense)
    fitted = FittedNetwork(title, dense, steps.candidate_fits(config, network), limit, data)
    scoring: Any = network.scoring
    yield fitted, scoring


def _added(run: Path) -> list[TaskEpisodes]:
    paths = sorted((run / "state" / EPISODES_FOLDER).glob("*.safetensors"))
    if not paths:
        raise CheckpointError(
            f"pretrain.add: {run} holds no episodes; give folders of earlier runs of task=pretrain"
        )
    return [read_episodes(path) for path in paths]


def _table(fits: Sequence[TaskFit]) -> Table:
    table = Table(title="What the additive model leaves over of the gains", header_style="bold")
    table.add_column("task", overflow="fold")
    for column in ("plans", "greedy", "policy", "unseen"):
        table.add_column(column, justify="right")
    for fit in fits:
        table.add_row(str(fit.task), str(fit.plans), *map(_share, (fit.greedy, fit.policy, fit.unseen)))
    unseen = [fit.unseen for fit in fits if fit.unseen is not None]
    means = fmean(fit.greedy for fit in fits), fmean(fit.policy for fit in fits)
    table.add_row("mean", "", *map(_share, (*means, fmean(unseen) if unseen else None)))
    return table


def _share(left: float | None) -> str:
    return "–" if left is None else f"{left:.3f}"
