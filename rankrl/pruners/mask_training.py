"""Train channel masks on a dataset, and resume an interrupted mask training."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decomposition import count_macs, count_parameters
from decomposition.network.inputs import example_tensor
from decomposition.network.surgery import copied
from pruning import MaskedNetwork, MaskEpoch, MaskTrainingResult, MaskTrainingState, train_masks
from pruning.selection import Cost
from pruning.training import adam
from rankrl.data import ImageData, batches
from rankrl.device import in_layout, inference_precision, to_fastest_layout
from rankrl.progress import ProgressBar, progress_bar
from rankrl.pruners.options import Measure, PruningOptions
from rankrl.state_file import check_setup, read_state, write_state
from rankrl.training import accuracy

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

    setup = pruning_setup(data, options)

    def save(state: MaskTrainingState) -> None:
        if state_file is not None:
            write_state(state_file, state.tensors, {"setup": setup, "values": state.values}, STATE_VERSION)

    start = None
    if state_file is not None and state_file.exists():
        tensors, content = read_pruning_state(state_file, "mask training", setup)
        start = MaskTrainingState(tensors, content["values"])
    finished = 0 if start is None else len(start.epochs)
    epoch_steps = _steps_per_epoch(data, steps.batch_size)
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
    """Return the cost function of the target's measure."""
    return count_parameters if measure == "params" else lambda network: count_macs(network, input_shape)


def pruning_setup(data: ImageData, options: PruningOptions) -> dict[str, Any]:
    """Return everything that must be equal for a pruning to be resumed."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(options)))
    return {"dataset": data.name, "training images": len(data.train), **values}


def read_pruning_state(
    path: Path, what: str, setup: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
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
        return _steps_per_epoch(self.data, self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.epoch += 1
        seed = int(np.random.SeedSequence((self.options.seed, self.epoch)).generate_state(1)[0])
        torch.manual_seed(seed)  # for dropout and sampled gates
        walk = batches(
            self.data.train,
            self.batch_size,
            mean=self.data.mean,
            std=self.data.std,
            device=self.device,
            augmentation=self.data.augmentation if self.options.steps.augment else None,
            generator=torch.Generator().manual_seed(seed),
            shuffle=True,
            drop_last=True,
        )
        for x, y in walk:
            yield in_layout(x, self.layout), y
            self.bar.advance()


def _steps_per_epoch(data: ImageData, batch_size: int) -> int:
    return len(data.train) // min(batch_size, len(data.train))


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
