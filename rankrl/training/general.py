"""Train any network on tensors in memory, with a user's loss or by imitating a teacher."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from decomposition import FactorisedLayer, Inputs, evaluation_mode, run_model
from decomposition.calibration.units import find_units, known_answers
from decomposition.network.inputs import count_inputs, mapped, rows, tensors_in
from rankrl.device import Precision, model_device
from rankrl.errors import ConfigError, NonFiniteError
from rankrl.training.accuracy import training_loss
from rankrl.training.epochs import Epochs, TrainingProgress, TrainingResult, decayed_products, follow
from rankrl.training.recipe import TrainingRecipe
from rankrl.training.state import TrainingState

_ANSWERED = 64
"""Inputs whose answers tell the quantities of an output."""

Loss = Callable[[Any, Any], Tensor]
"""(outputs of a batch, labels) -> scalar."""


def train_on(
    model: nn.Module,
    inputs: Inputs,
    labels: Any,
    recipe: TrainingRecipe,
    *,
    score: Callable[[nn.Module], float],
    loss: Loss | None = None,
    teacher: nn.Module | None = None,
    on_step: Callable[[TrainingProgress], None] | None = None,
) -> TrainingResult:
    """Train a network of any kind in place, in float32 on its own device."""
    check_loss(labels, loss)
    if labels is None and teacher is None:
        raise ConfigError("there are neither labels nor a teacher to learn from")
    products = decayed_products(model, recipe)
    precision = Precision(model_device(model), torch.float32)
    taught = teacher if labels is None or recipe.distillation > 0 else None
    epochs = _GeneralEpochs(inputs, labels, recipe, precision, score, loss, taught, products, on_step)
    with torch.random.fork_rng([precision.device] if precision.device.type == "cuda" else []):
        result = follow(TrainingState(model, recipe, {}), epochs, recipe, None)
    model.eval()
    return result


def check_loss(labels: Any, loss: Loss | None) -> None:
    """Refuse a loss without labels, and labels that are no classes without a loss."""
    if labels is None:
        if loss is not None:
            raise ConfigError("loss= needs labels; give data in pairs of inputs and labels, or leave it out")
    elif loss is None:
        tensor = isinstance(labels, Tensor)
        if not tensor or labels.ndim != 1 or labels.is_floating_point():
            kind = (
                f"{labels.dtype} of shape {tuple(labels.shape)}" if tensor else f"a {type(labels).__name__}"
            )
            raise ConfigError(
                f"labels are {kind}, which says nothing of the loss; give loss=, a function from outputs and "
                "labels to a scalar"
            )


def imitation_loss(outputs: Any, taught: Any, weights: Sequence[Tensor | None] | None = None) -> Tensor:
    """Return |outputs - taught|^2 / |taught|^2, averaged over all floating-point tensors.

    With weights (`quantity_weights`) a tensor of several quantities is their mean, each relative to its
    variance.
    """
    known, expected = tensors_in(outputs), tensors_in(taught)
    shares = []
    for y, t, weight in zip(known, expected, weights or [None] * len(known), strict=True):
        if not y.is_floating_point():
            continue
        lost = (y.float() - t.float()).square()
        if weight is None:
            # Clamped, since a teacher's output may be all zeros.
            shares.append(lost.sum() / t.float().square().sum().clamp_min(1e-30))
        else:
            shares.append((lost * weight.to(lost.device).square()).mean())
    if not shares:
        raise ConfigError("the network returns no floating-point numbers, so there is nothing to imitate")
    return torch.stack(shares).mean()


def quantity_weights(teacher: nn.Module, inputs: Inputs) -> list[Tensor | None]:
    """Return the factors of each output by which its quantities count alike; None for a single quantity."""
    device, weights = model_device(teacher), list[Tensor | None]()
    with evaluation_mode(teacher), torch.no_grad():
        few = mapped(lambda x: x.to(device), rows(inputs, slice(0, _ANSWERED)))
        outputs = tensors_in(run_model(teacher, few))
    for y in outputs:
        units = find_units(known_answers([y.float().cpu().numpy()])) if y.is_floating_point() else None
        weights.append(None if units is None else torch.from_numpy(units.weights(y.ndim)).float())
    return weights


def check_outputs(teacher: nn.Module, model: nn.Module, inputs: Inputs) -> None:
    """Refuse a teacher whose outputs for two inputs differ in shape from the network's."""
    two = mapped(lambda x: x.to(model_device(model)), rows(inputs, slice(0, 2)))
    with torch.no_grad():
        expected = [tuple(each.shape) for each in tensors_in(run_model(model, two))]
        try:
            shapes = [tuple(each.shape) for each in tensors_in(run_model(teacher, two))]
        except Exception as error:  # whatever the network's own code raises
            raise ConfigError(
                f"the teacher fails on the network's inputs: {error}; give one that takes "
                "inputs of this shape"
            ) from error
    if shapes != expected:
        raise ConfigError(
            f"the teacher returns {shapes} for two inputs, the network {expected}; give a teacher with "
            "the same classes in the same order"
        )


def steps_of_an_epoch(count: int, batch_size: int) -> int:
    """Return the number of batches of an epoch over `count` inputs; a last batch of one is left out.

    Batch normalisation cannot train on a single input; each epoch's order leaves out another one.
    """
    size = min(batch_size, count)
    return count // size + (count % size > 1)


class _GeneralEpochs(Epochs):
    """Epochs over tensors in memory."""

    def __init__(
        self,
        inputs: Inputs,
        labels: Any,
        recipe: TrainingRecipe,
        precision: Precision,
        score: Callable[[nn.Module], float],
        loss: Loss | None,
        teacher: nn.Module | None,
        products: Sequence[FactorisedLayer],
        on_step: Callable[[TrainingProgress], None] | None,
    ) -> None:
        count = count_inputs(inputs)
        size = min(recipe.batch_size, count)
        super().__init__(
            recipe,
            precision,
            teacher=teacher,
            products=products,
            batch_size=size,
            steps=steps_of_an_epoch(count, recipe.batch_size),
            on_step=on_step,
        )
        self.inputs, self.labels = inputs, labels
        self._score, self._loss = score, loss
        self._weights = None if teacher is None else quantity_weights(teacher, inputs)

    def batches(self, seed: int) -> Iterator[tuple[Inputs, Any]]:
        """Yield batches of all inputs in random order; a last batch of a single input is left out."""
        order = torch.randperm(count_inputs(self.inputs), generator=torch.Generator().manual_seed(seed))
        device = self.precision.device
        for indices in order.split(self.batch_size)[: self.steps]:
            labels = tree_map_only(Tensor, partial(_rows_on, index=indices, device=device), self.labels)
            yield mapped(lambda x: x.to(device), rows(self.inputs, indices)), labels

    def loss(self, outputs: Any, labels: Any, taught: Any) -> Tensor:
        """Return the user's loss or cross-entropy, mixed with `imitation_loss`."""
        recipe = self.recipe
        if labels is None:
            return imitation_loss(outputs, taught, self._weights)
        if self._loss is None:
            return training_loss(
                outputs.float(),
                labels.long(),
                taught,
                label_smoothing=recipe.label_smoothing,
                distillation=recipe.distillation,
                temperature=recipe.temperature,
            )
        loss = self._loss(outputs, labels)
        if taught is None:
            return loss
        imitation = imitation_loss(outputs, taught, self._weights)
        return (1 - recipe.distillation) * loss + recipe.distillation * imitation

    def score(self, model: nn.Module) -> float:
        """Return the user's score as a float; it may come as a tensor of one element."""
        model.eval()
        with torch.no_grad():
            score = float(self._score(model))
        if not math.isfinite(score):
            raise NonFiniteError(f"score returned {score}; it must return a finite number")
        return score


def _rows_on(labels: Tensor, index: Tensor, device: torch.device) -> Tensor:
    return labels[index].to(device)
