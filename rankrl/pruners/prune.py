"""Prune a data set's classifier to a target; decompose what is left if asked, fine-tune and measure it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decomposition import (
    CompressionPlan,
    DecompositionError,
    LayerPlan,
    Operation,
    apply_plan,
    build_structure,
    count_macs,
    count_parameters,
    fingerprint,
    inspect_layers,
)
from decomposition.network.inputs import example_tensor
from decomposition.network.surgery import copied
from decomposition.progress import ProgressBar, progress_bar
from pruning import (
    ChannelGroup,
    KeptChannels,
    MaskedNetwork,
    MaskEpoch,
    MaskTrainingResult,
    MaskTrainingState,
    PruningError,
    QualityJump,
    ResidualBlock,
    channel_groups,
    keep_within,
    removable_groups,
    require_blocks_suffice,
    residual_blocks,
    train_masks,
)
from pruning.selection import Cost, require_reachable
from pruning.training import adam
from rankrl.data import ImageData
from rankrl.data.sample import calibration_images
from rankrl.device import inference_precision, to_fastest_layout
from rankrl.errors import ConfigError
from rankrl.module_compression import choose_plan, finetune_in, finish_module, image_classifier
from rankrl.networks.module import FileModule, calibrating_images
from rankrl.operations import KeepChannels, RemoveBlock, kept_channels, removed_blocks
from rankrl.plan_search.run import ChosenPlan
from rankrl.pruners.options import Measure, PruningOptions
from rankrl.request import Request
from rankrl.result import MeasuredModule
from rankrl.runs.run_folder import RunFolder
from rankrl.state_file import check_setup, read_state, write_state
from rankrl.training import TrainingRecipe, accuracy
from rankrl.training.loop import steps_per_epoch, training_batches
from rankrl.training.networks import Teacher, heldout_accuracy
from rankrl.verify.measure import network_numbers, with_preprocessing

log = logging.getLogger(__name__)

STATE_VERSION = 1


def train_channel_masks(
    model: nn.Module, data: ImageData, options: PruningOptions, state_file: Path | None
) -> tuple[MaskedNetwork, MaskTrainingResult]:
    """Train a copy of the network with masks until the target is met and the masks are fixed."""
    precision = inference_precision()
    dense = copied(model).to(precision.device)
    inputs = example_tensor(dense, data.input_shape)
    layout = to_fastest_layout(dense, inputs)
    steps, training = options.steps, options.training

    def evaluate(network: nn.Module) -> float:
        return accuracy(network, data.heldout, mean=data.mean, std=data.std, precision=precision)

    setup = _setup(data, options)

    def save(state: MaskTrainingState) -> None:
        if state_file is not None:
            write_state(state_file, state.tensors, {"setup": setup, "values": state.values}, STATE_VERSION)

    start = None
    if state_file is not None and state_file.exists():
        tensors, content = _read(state_file, "mask training", setup)
        start = MaskTrainingState(tensors, content["values"])
    finished = 0 if start is None else len(start.epochs)
    epoch_steps = steps_per_epoch(data, steps.batch_size)
    total = (training.epochs + training.settling_epochs) * epoch_steps
    with torch.random.fork_rng([precision.device] if precision.device.type == "cuda" else []):
        torch.manual_seed(options.seed)
        masked = MaskedNetwork(
            dense, inputs, lambda units: options.definition.definition(units, **options.mask), options.layers
        )
        with progress_bar("prune", total=total) as bar:
            bar.advance(finished * epoch_steps)
            result = train_masks(
                masked,
                _Epochs(data, options, precision.device, layout, bar, finished),
                F.cross_entropy,
                training,
                network_optimizer=adam(steps.lr),
                mask_optimizer=None if steps.mask_lr is None else adam(steps.mask_lr),
                cost=target_cost(options.measure, data.input_shape),
                target=options.kept,
                evaluate=evaluate,
                autocast=precision.autocast,
                on_epoch=_log_epoch,
                start=start,
                on_state=save,
            )
    _log_jump(result)
    return masked, result


def target_cost(measure: Measure, input_shape: Sequence[int]) -> Cost:
    return count_parameters if measure == "params" else lambda network: count_macs(network, input_shape)


def _setup(data: ImageData, options: PruningOptions) -> dict[str, Any]:
    return {"dataset": data.name, "training images": len(data.train), **asdict(options)}


def _read(path: Path, what: str, setup: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a state file; refuse one of another pruning."""
    tensors, content = read_state(path, STATE_VERSION, what)
    check_setup(path, "pruning", content["setup"], setup)
    return tensors, content


class _Epochs:
    """Batches of training images; each iteration runs the next epoch, seeded by its number."""

    def __init__(
        self,
        data: ImageData,
        options: PruningOptions,
        device: torch.device,
        layout: torch.memory_format,
        bar: ProgressBar,
        finished: int,
    ) -> None:
        self.data, self.options, self.device, self.layout, self.bar = data, options, device, layout, bar
        self.batch_size = min(options.steps.batch_size, len(data.train))
        self.epoch = finished

    def __len__(self) -> int:
        return steps_per_epoch(self.data, self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.epoch += 1
        seed = int(np.random.SeedSequence((self.options.seed, self.epoch)).generate_state(1)[0])
        torch.manual_seed(seed)  # for dropout and sampled gates
        for batch in training_batches(
            self.data,
            self.data.train,
            self.batch_size,
            seed,
            device=self.device,
            layout=self.layout,
            augment=self.options.steps.augment,
        ):
            yield batch
            self.bar.advance()


def _log_epoch(epoch: MaskEpoch) -> None:
    log.info(
        "masks, epoch %d: loss %.4f, strength %.3g, %.1f %% of the units open, %.1f %% of the cost kept",
        epoch.epoch + 1,
        epoch.loss,
        epoch.strength,
        100 * epoch.open_fraction,
        100 * (epoch.cost_fraction or 0.0),
    )


def _log_jump(result: MaskTrainingResult) -> None:
    if result.jump is not None:
        log.info(
            "masks fixed: held-out accuracy %.4f with sampled gates, %.4f with deterministic ones, %.4f once "
            "the channels are chosen",
            result.jump.sampled,
            result.jump.deterministic,
            result.jump.fixed,
        )


@dataclass(frozen=True)
class PrunedNetwork:
    network: nn.Module
    plan: CompressionPlan
    epochs: Sequence[MaskEpoch] = ()
    jump: QualityJump | None = None
    rewound: bool | None = None
    seconds: float = 0.0


def check_target(model: nn.Module, input_shape: Sequence[int], options: PruningOptions) -> None:
    """Refuse a target that cannot be met, whatever the weights, before any training or fit."""
    inputs = example_tensor(model, input_shape)
    if options.definition.unit == "blocks":
        cost = target_cost(options.measure, input_shape)
        require_blocks_suffice(model, _removable_blocks(model, inputs, options.layers), cost, options.kept)
        return
    groups = removable_groups(channel_groups(model, inputs), options.layers)
    names = [group.name for group in groups]
    for name in options.training.strengths:
        if name not in names:
            raise ConfigError(f"pruner.strengths names {name!r}; the channel groups are {', '.join(names)}")
    cost = target_cost(options.measure, input_shape)
    require_reachable(model, inputs, groups, cost, options.kept, options.multiple)


def prune_network(
    model: nn.Module,
    data: ImageData,
    options: PruningOptions,
    calibration: Tensor,
    *,
    state_file: Path | None = None,
) -> PrunedNetwork:
    """Remove channels or blocks until the target is met, without fine-tuning."""
    setup = _setup(data, options)
    if state_file is not None and state_file.exists():
        return _restore(state_file, model, setup)
    started = time.perf_counter()
    if options.definition.is_mask:
        masks = None if state_file is None else state_file.with_stem(f"{state_file.stem}-masks")
        masked, result = train_channel_masks(model, data, options, masks)
        groups = channel_groups(model, example_tensor(model, data.input_shape))
        plan = removal_plan(model, data.input_shape, masked.kept_channels(), groups, options.pruner)
        trained = masked.removed().cpu().to(memory_format=torch.contiguous_format).eval()
        network, rewound = _rewound(trained, model, plan, data, options, calibration)
        pruned = PrunedNetwork(network, plan, result.epochs, result.jump, rewound)
    elif options.definition.unit == "blocks":
        pruned = _by_blocks(model, data, options, calibration)
    else:
        pruned = _by_criterion(model, data, options, calibration)
    pruned = replace(pruned, seconds=time.perf_counter() - started)
    if state_file is not None:
        content = {
            "setup": setup,
            "plan": pruned.plan.to_json(),
            "epochs": [asdict(epoch) for epoch in pruned.epochs],
            "jump": None if pruned.jump is None else asdict(pruned.jump),
            "rewound": pruned.rewound,
            "seconds": pruned.seconds,
        }
        write_state(state_file, pruned.network.state_dict(), content, STATE_VERSION)
    return pruned


def removal_plan(
    model: nn.Module,
    input_shape: Sequence[int],
    kept: KeptChannels,
    groups: Sequence[ChannelGroup],
    chosen_by: str,
) -> CompressionPlan:
    """Return the plan that keeps the `kept` output channels and decomposes nothing."""
    obstacles = {name: group.obstacle for group in groups for name in group.layers}
    specs = inspect_layers(model, input_shape)
    layers = tuple(
        LayerPlan(spec.name)
        if len(kept.get(spec.name, range(spec.out_channels))) < spec.out_channels
        else LayerPlan(spec.name, reason=obstacles.get(spec.name) or "all its output channels stay")
        for spec in specs
    )
    plan = CompressionPlan(layers, fingerprint(specs), tuple(input_shape), chosen_by)
    out_channels = {spec.name: spec.out_channels for spec in specs}
    removed = {n: KeepChannels(tuple(k)) for n, k in kept.items() if len(k) < out_channels[n]}
    return plan.with_operations(model, removed)


def _by_criterion(
    model: nn.Module, data: ImageData, options: PruningOptions, calibration: Tensor
) -> PrunedNetwork:
    inputs = example_tensor(model, data.input_shape)
    every = channel_groups(model, inputs)
    groups = removable_groups(every, options.layers)
    generator = torch.Generator().manual_seed(options.seed)
    scores = options.definition.definition(model, groups, calibration, generator)
    cost = target_cost(options.measure, data.input_shape)
    kept = keep_within(model, inputs, groups, scores, cost, options.kept, options.scope, options.multiple)
    plan = removal_plan(model, data.input_shape, kept, every, options.pruner)
    return PrunedNetwork(_applied(model, plan, data, options, calibration).eval(), plan)


def _by_blocks(
    model: nn.Module, data: ImageData, options: PruningOptions, calibration: Tensor
) -> PrunedNetwork:
    blocks = _removable_blocks(model, example_tensor(model, data.input_shape), options.layers)
    cost = target_cost(options.measure, data.input_shape)
    gone = options.definition.definition(model, blocks, calibration, cost, options.kept)
    log.info("blocks that go, in this order: %s", ", ".join(gone))
    specs = inspect_layers(model, data.input_shape)

    def entry(layer: str) -> LayerPlan:
        block = next((known.name for known in blocks if layer.startswith(f"{known.name}.")), None)
        if block is None:
            return LayerPlan(layer, reason="it is in no block that may be removed")
        if block not in gone:
            return LayerPlan(layer, reason="its block stays")
        return LayerPlan(layer, (RemoveBlock(block),))

    layers = tuple(entry(spec.name) for spec in specs)
    plan = CompressionPlan(layers, fingerprint(specs), tuple(data.input_shape), options.pruner)
    return PrunedNetwork(_applied(model, plan, data, options, calibration).eval(), plan)


def _removable_blocks(model: nn.Module, inputs: Tensor, layers: Sequence[str] | None) -> list[ResidualBlock]:
    """Return the blocks that may be removed: all, or those that contain one of these layers."""
    blocks = residual_blocks(model, inputs)
    if layers is None:
        return blocks
    for name in layers:
        if not any(name in block.layers for block in blocks):
            known = ", ".join(layer for block in blocks for layer in block.layers) or "none"
            raise PruningError(f"layer {name!r} is in no block that can be removed; those that are: {known}")
    return [block for block in blocks if set(layers) & set(block.layers)]


def _rewound(
    trained: nn.Module,
    model: nn.Module,
    plan: CompressionPlan,
    data: ImageData,
    options: PruningOptions,
    calibration: Tensor,
) -> tuple[nn.Module, bool]:
    """Choose, by held-out accuracy, between mask-trained and refitted dense weights; return which."""
    if options.rewind is False:
        return trained, False
    try:
        rewound = _applied(model, plan, data, options, calibration).eval()
    except DecompositionError as error:
        if options.rewind:
            raise
        log.info("the dense weights cannot be gone back to: %s", error)
        return trained, False
    if options.rewind is None:
        kept, back = (heldout_accuracy(network, data) for network in (trained, rewound))
        log.info("held-out accuracy %.4f with the trained weights, %.4f with the dense ones", kept, back)
        if kept >= back:
            return trained, False
    return rewound, True


def _applied(
    model: nn.Module, plan: CompressionPlan, data: ImageData, options: PruningOptions, calibration: Tensor
) -> nn.Module:
    return apply_plan(
        model,
        plan,
        calibration,
        sequential=options.sequential,
        seed=options.seed,
        statistics=calibration_images(data, len(calibration), seed=options.seed, augmented=True),
    )


def _restore(path: Path, model: nn.Module, setup: Mapping[str, Any]) -> PrunedNetwork:
    tensors, content = _read(path, "pruned network", setup)
    plan = CompressionPlan.from_json(content["plan"], source=f"the plan in {path}")
    network = build_structure(model, plan)
    network.load_state_dict(tensors)
    return PrunedNetwork(
        network.eval(),
        plan,
        [MaskEpoch(**epoch) for epoch in content["epochs"]],
        None if content["jump"] is None else QualityJump(**content["jump"]),
        content["rewound"],
        content["seconds"],
    )


THEN = ", then "
"""Between who removed channels and who chose the ranks of what was left, in a plan's `chosen_by`."""


@dataclass(frozen=True)
class PruningSteps:
    """Steps after a removal: fine-tuning `before` the decomposition where there is one, `finetune` last."""

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
