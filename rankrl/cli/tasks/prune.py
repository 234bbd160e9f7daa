"""`task=prune`: channels or blocks removed to a target, with proof; decomposed afterwards if wanted."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from decomposition import CompressionPlan, Operation, inspect_layers, save_compressed
from decomposition.network.surgery import copied
from pruning import PruningError
from rankrl.cli.config import options
from rankrl.cli.config.schema import AppConfig
from rankrl.cli.tasks import steps
from rankrl.cli.tasks.compressed import both_chose
from rankrl.data import ImageData
from rankrl.errors import ConfigError
from rankrl.operations import RemoveBlock, kept_channels, removed_blocks
from rankrl.plan_search.run import search_numbers
from rankrl.pruners.options import PruningOptions
from rankrl.pruners.prune import PrunedNetwork, check_target, prune_network
from rankrl.runs.run_folder import RunFolder
from rankrl.training.networks import build_network
from rankrl.verify.measure import (
    cost_ratios,
    export_dense,
    export_numbers,
    int8_numbers,
    layer_rows,
    network_numbers,
    test_accuracy,
    with_preprocessing,
)
from rankrl.verify.runtimes import runtime_numbers


def prune(config: AppConfig, folder: RunFolder) -> None:
    """Run all steps; each finished step is reused when the run is resumed."""
    chosen = options.pruning(config)
    decomposing = options.decomposition_after_pruning(config)
    between = options.before_decomposition(config)
    options.check(config if decomposing is None else decomposing, finetuning=config.finetune.epochs > 0)
    if between.finetune.epochs > 0:
        options.finetuning_recipe(between, after_removal=True)
    export_options = options.export_options(config)
    data = options.dataset(config)
    with _refusals():
        check_target(build_network(config.model, data, seed=config.seed), data.input_shape, chosen)
        dense = steps.dense_network(config, data, folder)
        baseline = export_dense(dense, data, folder.state, export_options)
        images = steps.calibration(config, data, dense)
        state = folder.state / "pruned.safetensors"
        pruned = prune_network(dense, data, chosen, images, state_file=state)
    metrics: dict[str, Any] = {
        **_head(config, data, dense, decomposing),
        "baseline": network_numbers(dense, data),
        "pruning": _pruning_numbers(chosen, pruned, dense, data),
    }
    network, plan = pruned.network, with_preprocessing(pruned.plan, data)
    if decomposing is None:
        plan.save(folder.plan)
    else:
        tuned = copied(network)
        steps.finetuned(between, data, tuned, dense, folder, stage="finetune-pruned", after_removal=True)
        metrics["pruned"] = network_numbers(tuned, data)
        network, plan, metrics["search"] = _decomposed(
            decomposing, data, tuned, pruned, images, dense, folder
        )
    rows = layer_rows(plan, dense, network)
    finetuned = copied(network)
    epochs = steps.finetuned(config, data, finetuned, dense, folder, after_removal=decomposing is None)
    save_compressed(finetuned, plan, folder.model, dense=dense)
    metrics["compressed"] = network_numbers(network, data)
    metrics["finetuned"] = {"accuracy": test_accuracy(finetuned, data)}
    metrics["onnx"], latency = export_numbers(
        finetuned,
        baseline,
        data,
        folder.onnx,
        export_options,
        metadata=steps.file_metadata(plan, metrics),
        scratch=folder.state,
    )
    metrics["dense_int8"] = int8_numbers(baseline, data, export_options, folder.state)
    metrics["runtimes"] = runtime_numbers(
        finetuned, baseline, folder.onnx, data, export_options, known=metrics["onnx"], scratch=folder.state
    )
    metrics["ratios"] = {**cost_ratios(metrics["baseline"], metrics["compressed"]), "latency": latency}
    steps.check_collapse(folder, metrics, data)
    steps.finish(folder, metrics, seed=config.seed, layers=rows, epochs=epochs)


def _decomposed(
    config: AppConfig,
    data: ImageData,
    tuned: nn.Module,
    pruned: PrunedNetwork,
    images: Tensor,
    dense: nn.Module,
    folder: RunFolder,
) -> tuple[nn.Module, CompressionPlan, dict[str, Any]]:
    """Return the fine-tuned pruned network decomposed, one plan for both steps, and the search's numbers."""
    _, result = steps.chosen_plan(config, data, tuned, images, folder)
    found = result.plan
    network = steps.applied_plan(config, data, found, tuned, images)
    plan = dataclasses.replace(
        found.with_operations(dense, _removals(pruned.plan)),
        chosen_by=both_chose(pruned.plan.chosen_by, found.chosen_by),
    )
    plan.save(folder.plan)
    return network, plan, search_numbers(result)


def _removals(plan: CompressionPlan) -> dict[str, Operation]:
    """Return the operations that removed something, by layer."""
    return {layer.name: each for layer in plan for each in layer.group_operations}


def _head(
    config: AppConfig, data: ImageData, dense: nn.Module, decomposing: AppConfig | None
) -> dict[str, Any]:
    """Return what metrics.json says of the run itself; what took no part in it is null."""
    method = None if decomposing is None else steps.searched(config)
    return {**steps.head(config, data, dense, method), "pruner": config.pruner["name"]}


def _pruning_numbers(
    chosen: PruningOptions, pruned: PrunedNetwork, dense: nn.Module, data: ImageData
) -> dict[str, Any]:
    """Return the section `pruning` of metrics.json."""
    before = {spec.name: spec.out_channels for spec in inspect_layers(dense, data.input_shape)}
    removed = pruned.plan.chosen(RemoveBlock)
    kept: dict[str, Sequence[int]] = {**kept_channels(pruned.plan), **dict.fromkeys(removed, ())}
    return {
        "measure": chosen.measure,
        "target": chosen.kept,
        "channels": sum(before.values()),
        "channels_kept": sum(len(kept.get(name, range(count))) for name, count in before.items()),
        "blocks_removed": removed_blocks(removed),
        "rewound": pruned.rewound,
        "seconds": pruned.seconds,
        "mask_epochs": [dataclasses.asdict(epoch) for epoch in pruned.epochs],
        "jump": None if pruned.jump is None else dataclasses.asdict(pruned.jump),
    }


@contextmanager
def _refusals() -> Iterator[None]:
    """Hand the pruning library's refusals on as errors of the configuration."""
    try:
        yield
    except PruningError as error:
        raise ConfigError(f"the network cannot be pruned as asked: {error}") from error
