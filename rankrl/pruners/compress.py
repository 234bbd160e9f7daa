"""Prune a data set's classifier to a target, decompose what is left if asked, fine-tune and measure it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from decomposition import CompressionPlan, Operation, inspect_layers
from decomposition.network.surgery import copied
from rankrl.data import ImageData
from rankrl.module_compression import choose_plan, finetune_in, finish_module, image_classifier
from rankrl.networks.module import FileModule, calibrating_images
from rankrl.operations import RemoveBlock, kept_channels, removed_blocks
from rankrl.plan_search.run import ChosenPlan
from rankrl.pruners.options import PruningOptions
from rankrl.pruners.prune import PrunedNetwork, prune_network
from rankrl.request import Request
from rankrl.result import MeasuredModule
from rankrl.runs.run_folder import RunFolder
from rankrl.training import TrainingRecipe
from rankrl.training.networks import Teacher
from rankrl.verify.measure import network_numbers, with_preprocessing

THEN = ", then "
"""Between who removed channels and who chose the ranks of what was left, in a plan's `chosen_by`."""


@dataclass(frozen=True)
class PruningSteps:
    """Steps after channels or blocks were removed.

    With `decompose`, the pruned network is fine-tuned (`before`) and then decomposed; `finetune` comes last.
    None leaves a step out.
    """

    finetune: TrainingRecipe | None
    decompose: Request | None = None
    before: TrainingRecipe | None = None
    teacher: Teacher | None = None
    heldout_is_new: bool = True


def compress_pruned(
    dense: nn.Module,
    data: ImageData,
    run: RunFolder,
    pruning: PruningOptions,
    steps: PruningSteps,
    request: Request,
) -> MeasuredModule:
    """Run all steps; each finished one is reused when the run is resumed."""
    network = image_classifier(dense, data, request, run.state)
    if not network.without_file:
        _ = network.baseline  # refuses a network that cannot be exported, before pruning
    images = calibrating_images(dense, data, request.calibration, seed=request.seed)
    pruned = prune_network(dense, data, pruning, images, state_file=run.state / "pruned.safetensors")
    run.notes.about["pruning"] = _numbers(pruning, pruned, dense, data)

    def tuned(network: nn.Module, recipe: TrainingRecipe | None, stage: str) -> Sequence[Any]:
        if recipe is None:
            return ()
        new = steps.heldout_is_new
        return finetune_in(run, network, data, recipe, dense, steps.teacher, stage=stage, heldout_is_new=new)

    compressed, plan, search = pruned.network, with_preprocessing(pruned.plan, data.preprocessing), None
    if steps.decompose is not None:
        compressed = copied(compressed)
        tuned(compressed, steps.before, "finetune-pruned")
        run.notes.about["pruned"] = network_numbers(compressed, data)
        compressed, plan, search = _decomposed(network, compressed, pruned.plan, steps.decompose, run)
    plan.save(run.plan)
    last = copied(compressed)
    epochs = tuned(last, steps.finetune, "finetune")
    result = finish_module(network, plan, compressed, run, request.goal.budget, tuned=last, search=search)
    return replace(result, epochs=tuple(epochs))


def _decomposed(
    network: FileModule, tuned: nn.Module, removal: CompressionPlan, request: Request, run: RunFolder
) -> tuple[nn.Module, CompressionPlan, ChosenPlan]:
    """Decompose the fine-tuned pruned network; return it, one plan for both steps, and how it was chosen."""
    scoring: Any = network.scoring
    remainder = replace(network, model=tuned, scoring=replace(scoring, model=tuned))
    search = choose_plan(remainder, request, run)
    removed: dict[str, Operation] = {layer.name: each for layer in removal for each in layer.group_operations}
    plan = search.plan.with_operations(network.model, removed)
    plan = replace(plan, chosen_by=f"{removal.chosen_by}{THEN}{search.plan.chosen_by}")
    return remainder.applied(search.plan), plan, search


def _numbers(
    pruning: PruningOptions, pruned: PrunedNetwork, dense: nn.Module, data: ImageData
) -> dict[str, Any]:
    """Return the section `pruning` of metrics.json."""
    before = {spec.name: spec.out_channels for spec in inspect_layers(dense, data.input_shape)}
    removed = pruned.plan.chosen(RemoveBlock)
    kept: Mapping[str, Sequence[int]] = {**kept_channels(pruned.plan), **dict.fromkeys(removed, ())}
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
