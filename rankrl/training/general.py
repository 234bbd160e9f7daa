"""Training any network on any inputs, with a loss of the user's own or by imitating a teacher."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from decomposition import FactorisedLayer, Inputs, run_model
from decomposition.network.inputs import count_inputs, mapped, rows, tensors_in
from rankrl.device import Precision, model_device
from rankrl.errors import ConfigError, NonFiniteError
from rankrl.training.accuracy import training_loss
from rankrl.training.epochs import Epochs, TrainingProgress, TrainingResult, decayed_products, follow
from rankrl.training.recipe import TrainingRecipe
from rankrl.training.state import TrainingState

Loss = Callable[[Any, Any], Tensor]
"""From a network's outputs for a batch, and its labels, to a scalar."""


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
    """Train a network of any kind in place, in float32 on the device that it is on.

    Shapes: loss (N,).
    """
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
    """Refuse labels that say nothing of the loss, and a loss without labels."""
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


def imitation_loss(outputs: Any, taught: Any) -> Tensor:
    """Return |outputs - taught|^2 / |taught|^2, the mean over all tensors of floating-point numbers."""
    pairs = zip(tensors_in(outputs), tensors_in(taught), strict=True)
    shares = [
        (y.float() - t.float()).square().sum() / t.float().square().sum().clamp_min(1e-30)
        for y, t in pairs
        if y.is_floating_point()
    ]
    if not shares:
        raise ConfigError("the network returns no floating-point numbers, so there is nothing to imitate")
    return torch.stack(shares).mean()


def check_outputs(teacher: nn.Module, model: nn.Module, inputs: Inputs) -> None:
    """Refuse a teacher whose outputs for two inputs have other shapes than a network's."""
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
    """Return how many batches an epoch over `count` inputs has, the last one smaller but never of one.

    Batch normalisation cannot train on a single input; another order leaves out another one.
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

    def batches(self, seed: int) -> Iterator[tuple[Inputs, Any]]:
        """Walk through all inputs in random order; a last batch of a single input is left out."""
        order = torch.randperm(count_inputs(self.inputs), generator=torch.Generator().manual_seed(seed))
        device = self.precision.device
        for indices in order.split(self.batch_size)[: self.steps]:
            labels = tree_map_only(Tensor, partial(_rows_on, index=indices, device=device), self.labels)
            yield mapped(lambda x: x.to(device), rows(self.inputs, indices)), labels

    def loss(self, outputs: Any, labels: Any, taught: Any) -> Tensor:
        """Return the user's loss or cross-entropy, mixed with what the teacher's outputs are missed by."""
        recipe = self.recipe
        if labels is None:
            return imitation_loss(outputs, taught)
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
        return (1 - recipe.distillation) * loss + recipe.distillation * imitation_loss(outputs, taught)

    def score(self, model: nn.Module) -> float:
        """Return what the user's score says, as a number: it may be a tensor of one."""
        model.eval()
        with torch.no_grad():
            score = float(self._score(model))
        if not math.isfinite(score):
            raise NonFiniteError(f"score returned {score}; it must return a finite number")
        return score


def _rows_on(labels: Tensor, index: Tensor, device: torch.device) -> Tensor:
    return labels[index].to(device)
