"""Prune channels or blocks to a target, verify the removal, and optionally decompose afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from torch import nn

from decomposition import CompressionPlan, Operation, inspect_layers
from decomposition.network.surgery import copied
from pruning import PruningError
from rankrl.cli.config import options
from rankrl.cli.config.schema import AppConfig
from rankrl.cli.tasks import steps
from rankrl.cli.tasks.compression import both_chose
from rankrl.data import ImageData
from rankrl.errors import ConfigError
from rankrl.module_compression import choose_plan, finish_module
from rankrl.networks.module import FileModule, calibrating_images
from rankrl.operations import RemoveBlock, kept_channels, removed_blocks
from rankrl.plan_search.run import ChosenPlan
from rankrl.pruners.options import PruningOptions
from rankrl.pruners.prune import PrunedNetwork, check_target, prune_network
from rankrl.runs.run_folder import RunFolder
from rankrl.training.networks import build_network
from rankrl.verify.measure import network_numbers, with_preprocessing


def prune(config: AppConfig, folder: RunFolder) -> None:
    """Run all steps; each finished step is reused when the run is resumed."""
    pruning = options.pruning(config)
    decomposing = options.decomposition_after_pruning(config)
    between = options.before_decomposition(config)
    options.check(config if decomposing is None else decomposing, finetuning=config.finetune.epochs > 0)
    if between.finetune.epochs > 0:
        options.finetuning_recipe(between, after_removal=True)
    data = options.dataset(config)
    with _refusals():
        check_target(build_network(config.model, data, seed=config.seed), data.input_shape, pruning)
        teacher = steps.teacher(config, data)
        dense = steps.dense_network(config, data, folder)
        network = steps.searched_network(config, data, dense, folder)
        if not network.without_file:
            _ = network.baseline  # refuses a network that cannot be exported, before pruning
        images = calibrating_images(dense, data, config.calibration.images, seed=config.seed)
        state = folder.state / "pruned.safetensors"
        pruned = prune_network(dense, data, pruning, images, state_file=state)
    folder.notes.about.update(
        _head(config, data, dense, decomposing), pruning=_pruning_numbers(pruning, pruned, dense, data)
    )
    compressed, plan, search = pruned.network, with_preprocessing(pruned.plan, data.preprocessing), None
    if decomposing is not None:
        compressed = copied(compressed)
        steps.finetuned(
            between,
            data,
            compressed,
            dense,
            folder,
            taught_by=teacher,
            stage="finetune-pruned",
            after_removal=True,
        )
        folder.notes.about["pruned"] = network_numbers(compressed, data)
        compressed, plan, search = _decomposed(decomposing, network, compressed, pruned, folder)
    plan.save(folder.plan)
    tuned = copied(compressed)
    removed = decomposing is None
    epochs = steps.finetuned(config, data, tuned, dense, folder, taught_by=teacher, after_removal=removed)
    result = finish_module(network, plan, compressed, folder, config.budget, tuned=tuned, search=search)
    steps.finish_compressed(config, replace(result, epochs=tuple(epochs)), folder)


def _decomposed(
    config: AppConfig, network: FileModule, tuned: nn.Module, pruned: PrunedNetwork, folder: RunFolder
) -> tuple[nn.Module, CompressionPlan, ChosenPlan]:
    """Decompose the fine-tuned pruned network; return it, one plan for both steps, and how it was chosen."""
    scoring: Any = network.scoring
    remainder = replace(network, model=tuned, scoring=replace(scoring, model=tuned))
    _, search = choose_plan(remainder, options.request(config), folder)
    plan = replace(
        search.plan.with_operations(network.model, _removals(pruned.plan)),
        chosen_by=both_chose(pruned.plan.chosen_by, search.plan.chosen_by),
    )
    return remainder.applied(search.plan), plan, search


def _removals(plan: CompressionPlan) -> dict[str, Operation]:
    """Return the operations that removed something, by layer."""
    return {layer.name: each for layer in plan for each in layer.group_operations}


def _head(
    config: AppConfig, data: ImageData, dense: nn.Module, decomposing: AppConfig | None
) -> dict[str, Any]:
    """Return the entries of metrics.json on the run itself; methods that were not used are null."""
    method = None if decomposing is None else steps.searched(config)
    return {**steps.head(config, data, dense, method), "pruner": config.pruner["name"]}


def _pruning_numbers(
    pruning: PruningOptions, pruned: PrunedNetwork, dense: nn.Module, data: ImageData
) -> dict[str, Any]:
    """Return the section `pruning` of metrics.json."""
    before = {spec.name: spec.out_channels for spec in inspect_layers(dense, data.input_shape)}
    removed = pruned.plan.chosen(RemoveBlock)
    kept: dict[str, Sequence[int]] = {**kept_channels(pruned.plan), **dict.fromkeys(removed, ())}
    return {
        "measure": pruning.measure,
        "target": pruning.kept,
        "channels": sum(before.values()),
        "channels_kept": sum(len(kept.get(name, range(count))) for name, count in before.items()),
        "blocks_removed": removed_blocks(removed),
        "rewound": pruned.rewound,
        "seconds": pruned.seconds,
        "mask_epochs": [asdict(epoch) for epoch in pruned.epochs],
        "jump": None if pruned.jump is None else asdict(pruned.jump),
    }


@contextmanager
def _refusals() -> Iterator[None]:
    """Convert errors of the pruning library into errors of the configuration."""
    try:
        yield
    except PruningError as error:
        raise ConfigError(f"the network cannot be pruned as asked: {error}") from error
