"""Steps that several tasks share: they read the configuration and call the workflow."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor, nn

from decomposition import CompressionPlan, FitLibrary
from rankrl.config import options
from rankrl.config.schema import AppConfig
from rankrl.data import ImageData
from rankrl.device import accepted_layout, in_layout
from rankrl.errors import ConfigError, RunStoppedError
from rankrl.files import write_json
from rankrl.models import save_checkpoint
from rankrl.plan_search.run import SearchResult
from rankrl.report import LayerRow, collect_setup, summary_table, write_report
from rankrl.training import EpochRow
from rankrl.workflow.apply import carry_out, load_compressed
from rankrl.workflow.choose import (
    CALIBRATION_BATCH,
    Choice,
    calibration_images,
    choose_plan,
    fit_candidates,
)
from rankrl.workflow.network import build_network, run_training
from rankrl.workflow.run_folder import RunFolder, cache_folder
from rankrl.workflow.training_step import write_training_step

log = logging.getLogger(__name__)


def dense_network(config: AppConfig, data: ImageData, folder: RunFolder) -> nn.Module:
    """Return the dense network: from its checkpoint, or trained here."""
    recipe = options.training_recipe(config)
    network = build_network(config.model, data, seed=config.seed)
    if not config.model.get("checkpoint"):
        state, track = folder.state / "train.safetensors", folder.tracking.epochs("train")
        run_training("train", network, data, recipe, state_file=state, on_epoch=track)
        save_checkpoint(network, folder.dense)
    return network


def calibration(config: AppConfig, data: ImageData, network: nn.Module) -> Tensor:
    """Return the images that the network's layers are fitted on."""
    images = calibration_images(data, config.calibration.images, seed=config.seed)
    return in_layout(images, accepted_layout(network, images[:2]))


def candidate_fits(config: AppConfig, dense: nn.Module, images: Tensor) -> FitLibrary:
    """Return the library of fits, calibrated on `images`; nothing is fitted yet."""
    return fit_candidates(
        dense,
        images.split(CALIBRATION_BATCH),
        options.candidate_options(config),
        cache=cache_folder() / "fits",
        seed=config.seed,
    )


def chosen_plan(
    config: AppConfig, data: ImageData, dense: nn.Module, images: Tensor, folder: RunFolder
) -> Choice:
    """Search for a plan and write it.

    Raises:
        RunStoppedError: If the user stopped the search.
    """
    choice = choose_plan(
        dense,
        data,
        candidate_fits(config, dense, images),
        options.search_options(config),
        candidates=options.candidate_options(config).candidates,
        folder=folder.path,
        seed=config.seed,
        on_episode=folder.tracking.episode,
        rewrite=lambda plan: applied_plan(config, plan, dense, images),
    )
    if choice.result.stopped_by == "interrupt":
        raise RunStoppedError(folder.path)
    choice.result.plan.save(folder.plan)
    return choice


def applied_plan(config: AppConfig, plan: CompressionPlan, dense: nn.Module, images: Tensor) -> nn.Module:
    """Return the compressed network."""
    log.info("rewriting the network, layer by layer")
    return carry_out(
        dense,
        plan,
        images,
        sequential=config.decomposition.sequential,
        weigh_outputs=config.decomposition.weigh_outputs,
        batch_norm=options.batch_norm_correction(config),
        options=options.final_fit(config),
        seed=config.seed,
    )


def finetuned(
    config: AppConfig,
    data: ImageData,
    network: nn.Module,
    dense: nn.Module,
    folder: RunFolder,
    *,
    stage: str = "finetune",
    after_removal: bool = False,
) -> Sequence[EpochRow]:
    """Fine-tune a compressed network in place with the dense one as teacher; return the epochs."""
    recipe = options.finetuning_recipe(config, after_removal=after_removal)
    state, track = folder.state / f"{stage}.safetensors", folder.tracking.epochs(stage)
    return run_training(
        "fine-tune", network, data, recipe, state_file=state, teacher=dense, on_epoch=track
    ).history


def compressed_from(config: AppConfig, data: ImageData) -> tuple[nn.Module, nn.Module, CompressionPlan]:
    """Return the compressed network that `weights` names, the dense architecture, and the plan.

    Raises:
        ConfigError: If `weights` is not given.
    """
    if not config.weights:
        raise ConfigError(
            f"task={config.task} needs weights=RUN/model.safetensors, the compressed network of an "
            "earlier run"
        )
    dense = build_network(config.model, data, seed=config.seed)
    network, plan = load_compressed(dense, Path(config.weights))
    return network.eval(), dense, plan


def exported_step(config: AppConfig, network: nn.Module, folder: RunFolder) -> None:
    """Write the optimizer's step as ONNX if the configuration asks for it."""
    if config.export.training:
        write_training_step(network, options.finetuning_recipe(config), folder.optimizer_step)


def head(config: AppConfig, data: ImageData) -> dict[str, Any]:
    """Return what metrics.json says of the run itself."""
    return {
        "task": config.task,
        "model": config.model.get("name") or config.model.get("_target_") or config.model["architecture"],
        "dataset": data.name,
        "decomposition": config.decomposition.format,
        "selector": config.selector["name"],
        "seed": config.seed,
    }


def search_numbers(result: SearchResult) -> dict[str, Any]:
    """Return the section `search` of metrics.json."""
    return {
        "episodes": len(result.rows),
        "evaluations": result.evaluations,
        "seconds": result.seconds,
        "best_reward": result.best.reward,
        "chosen_reward": result.chosen.reward,
        "chosen_episode": result.chosen.episode,
        "stopped_by": result.stopped_by,
    }


def finish(
    folder: RunFolder,
    metrics: dict[str, Any],
    *,
    seed: int,
    layers: Sequence[LayerRow] = (),
    epochs: Sequence[EpochRow] = (),
) -> None:
    """Write the report and, last, metrics.json, which marks the run as finished; print the final table."""
    if epochs:
        metrics["epochs"] = [dataclasses.asdict(row) for row in epochs]
    setup = collect_setup(["rankrl", *sys.argv[1:]], seed)
    page = write_report(folder.path, metrics=metrics, layers=layers, epochs=epochs, setup=setup)
    folder.tracking.result({key: value for key, value in metrics.items() if key != "seed"})
    write_json(folder.metrics, metrics)
    console = Console()
    table = summary_table(metrics)
    if table.row_count:
        console.print(table)
    console.print(f"report: {page}", soft_wrap=True)
