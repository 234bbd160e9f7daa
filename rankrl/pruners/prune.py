"""Prune channels or blocks of a network to a target, chosen by a criterion or by trained masks."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from decomposition import (
    CompressionPlan,
    DecompositionError,
    LayerPlan,
    apply_plan,
    build_structure,
    fingerprint,
    inspect_layers,
)
from decomposition.network.inputs import example_tensor
from decomposition.network.surgery import copied
from pruning import (
    ChannelGroup,
    KeptChannels,
    MaskEpoch,
    PruningError,
    QualityJump,
    ResidualBlock,
    channel_groups,
    keep_within,
    removable_groups,
    require_blocks_suffice,
    residual_blocks,
)
from pruning.selection import require_reachable
from rankrl.data import ImageData
from rankrl.data.calibration import calibration_images
from rankrl.device import inference_precision
from rankrl.errors import ConfigError
from rankrl.operations import KeepChannels, RemoveBlock
from rankrl.pruners.mask_training import (
    STATE_VERSION,
    pruning_setup,
    read_pruning_state,
    target_cost,
    train_channel_masks,
)
from rankrl.pruners.options import PruningOptions
from rankrl.state_file import write_state
from rankrl.training import accuracy

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PrunedNetwork:
    """A pruned network with its plan."""

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
    """Remove channels or blocks until the target is met, without fine-tuning.

    The weights that a criterion leaves are solved for anew, to compensate for the removed ones. A mask's
    training changes the weights; held-out images decide between these and the refitted dense ones.
    """
    setup = pruning_setup(data, options)
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
        kept, back = (_heldout_accuracy(network, data) for network in (trained, rewound))
        log.info("held-out accuracy %.4f with the trained weights, %.4f with the dense ones", kept, back)
        if kept >= back:
            return trained, False
    return rewound, True


def _heldout_accuracy(network: nn.Module, data: ImageData) -> float:
    precision = inference_precision()
    tested = copied(network).to(precision.device)
    return accuracy(tested, data.heldout, mean=data.mean, std=data.std, precision=precision)


def _applied(
    model: nn.Module, plan: CompressionPlan, data: ImageData, options: PruningOptions, calibration: Tensor
) -> nn.Module:
    """Apply a plan to the dense network's weights."""
    return apply_plan(
        model,
        plan,
        calibration,
        sequential=options.sequential,
        seed=options.seed,
        statistics=calibration_images(data, len(calibration), seed=options.seed, augmented=True),
    )


def _restore(path: Path, model: nn.Module, setup: Mapping[str, Any]) -> PrunedNetwork:
    tensors, content = read_pruning_state(path, "pruned network", setup)
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
