"""Train classifiers of images and networks of any kind, from scratch or to fine-tune."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from decomposition import Inputs, evaluation_mode, run_model
from decomposition.calibration.units import find_units, known_answers
from decomposition.network.inputs import count_inputs, mapped, rows, tensors_in
from rankrl.data.images import ImageData, Images
from rankrl.data.sample import batches
from rankrl.device import (
    Precision,
    deterministic_kernels,
    in_layout,
    inference_precision,
    model_device,
    to_fastest_layout,
)
from rankrl.errors import ConfigError, NonFiniteError
from rankrl.models.classifiers import check_classifier, network_digest
from rankrl.training.accuracy import accuracy, is_guessing, training_loss, worse_than_guessing
from rankrl.training.epochs import (
    CannotCaptureError,
    DivergedError,
    Epochs,
    GraphedPass,
    TrainingProgress,
    TrainingResult,
    TrainingState,
    decayed_products,
    follow,
)
from rankrl.training.recipe import TrainingRecipe

log = logging.getLogger(__name__)

# After fewer steps, a network that learned nothing so far may still begin to.
_FEWEST_STEPS_JUDGED = 100


def _taken(indices: Tensor, device: torch.device, values: Tensor) -> Tensor:
    return values[indices].to(device)


def train(
    model: nn.Module,
    data: ImageData,
    recipe: TrainingRecipe,
    *,
    precision: Precision | None = None,
    teacher: nn.Module | None = None,
    state_file: str | Path | None = None,
    resume: bool = False,
    on_step: Callable[[TrainingProgress], None] | None = None,
) -> TrainingResult:
    """Train a network in place.

    Parameters stay float32; with bfloat16 precision the network runs under autocast. Images held out of the
    training file score every epoch; the test set is never read. Equal arguments give equal weights on the
    same machine with the same number of threads.

    A training that diverges restarts from its first weights with half the learning rate, at most
    `recipe.halvings` times, as if the recipe had this rate. It diverges when a loss or a score is not finite;
    when an epoch falls back to guessing (`rankrl.training.accuracy`) after a better one; and when, after the
    warm-up and at least 100 steps, no epoch did better than guessing and the loss is above that of guessing.
    A network on the plateau of guessing, with no larger loss, trains on.
    """
    precision = inference_precision() if precision is None else precision
    path = None if state_file is None else Path(state_file)
    if recipe.distillation > 0 and (teacher is None or teacher is model):
        raise ConfigError("distillation above 0 needs a teacher: another network, usually the dense one")
    if resume and path is None:
        raise ConfigError("resuming needs the state_file of the run to resume")
    networks = [model] if recipe.distillation == 0 or teacher is None else [model, teacher]
    setup = _setup(data, recipe, *networks[1:])
    example = torch.zeros(2, *data.input_shape, device=precision.device)
    layouts = set()
    for network, name in zip(networks, ("the network", "the teacher"), strict=False):
        check_classifier(network.to(precision.device), data.input_shape, data.classes, name=name)
        layouts.add(to_fastest_layout(network, example))
    layout = torch.contiguous_format if torch.contiguous_format in layouts else torch.channels_last

    teacher = networks[1] if len(networks) == 2 else None
    images, heldout = (_near(some, precision.device) for some in (data.train, data.heldout))
    size, steps = min(recipe.batch_size, len(images)), steps_per_epoch(data, recipe.batch_size)
    epochs = _ImageEpochs(
        recipe=recipe,
        precision=precision,
        batches=partial(
            training_batches,
            data,
            images,
            size,
            device=precision.device,
            layout=layout,
            augment=recipe.augment,
        ),
        loss=partial(_loss, recipe),
        score=partial(accuracy, images=heldout, mean=data.mean, std=data.std, precision=precision),
        steps=steps,
        teacher=teacher,
        products=decayed_products(model, recipe),
        on_step=on_step,
        labels=images.y,
        images=steps * size,
    )
    state = TrainingState(model, recipe, setup)
    if resume and path is not None:
        state.restore(path)
    with deterministic_kernels() if precision.device.type == "cuda" else nullcontext():
        result = follow(state, epochs, path)
    for network in networks:
        network.to(memory_format=torch.contiguous_format)
        network.eval()
    return result


def steps_per_epoch(data: ImageData, batch_size: int) -> int:
    """Return the number of whole batches of the training images; a smaller set makes one."""
    return len(data.train) // min(batch_size, len(data.train))


def training_batches(
    data: ImageData,
    images: Images,
    batch_size: int,
    seed: int,
    *,
    device: torch.device,
    layout: torch.memory_format,
    augment: bool,
) -> Iterator[tuple[Tensor, Tensor]]:
    walk = batches(
        images,
        batch_size,
        mean=data.mean,
        std=data.std,
        device=device,
        augmentation=data.augmentation if augment else None,
        generator=torch.Generator().manual_seed(seed),
        shuffle=True,
        drop_last=True,
    )
    return ((in_layout(x, layout), y) for x, y in walk)


@dataclass(kw_only=True)
class _ImageEpochs(Epochs):
    """Epochs of a classifier, of which those no better than guessing are noticed."""

    labels: Tensor
    images: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._graph: GraphedPass | None = None
        self._tried_graph = False
        self._entropies: list[Tensor] = []
        self._right = torch.zeros((), dtype=torch.int64, device=self.precision.device)

    def run(self, state: TrainingState) -> None:
        """Train for one epoch; one that diverged may have left counts."""
        self._entropies = []
        self._right.zero_()
        super().run(state)

    def watch(self, outputs: Any, labels: Any) -> None:
        """Count the correct answers and record the cross-entropy."""
        scores = outputs.float()
        self._entropies.append(F.cross_entropy(scores, labels))
        self._right += (scores.argmax(1) == labels).sum()

    def passes(self, model: nn.Module, x: Inputs, y: Any) -> tuple[Tensor, Any]:
        """Run a batch forward and backward; on a GPU, replay the graph captured with the first batch."""
        if not isinstance(x, Tensor) or self.precision.device.type != "cuda":
            return super().passes(model, x, y)
        if not self._tried_graph:
            self._tried_graph = True
            try:
                self._graph = GraphedPass(partial(super().passes, model), model, x, y)
            except CannotCaptureError as error:
                log.info("the network is trained without a CUDA graph, which takes longer: %s", error)
        return super().passes(model, x, y) if self._graph is None else self._graph(x, y)

    def judge(self, state: TrainingState, epoch: int, loss: float) -> None:
        """Raise `DivergedError` for an epoch no better than guessing while the rate can still be halved."""
        entropy, right = float(torch.stack(self._entropies).mean()), int(self._right)
        if not is_guessing(right / self.images, entropy, self.labels, self.images):
            state.learned = True
            return
        recipe, done = self.recipe, epoch * self.steps
        over = done >= max(recipe.warmup * recipe.epochs * self.steps, _FEWEST_STEPS_JUDGED)
        worse = worse_than_guessing(entropy, self.labels)
        if state.halvings < recipe.halvings and (state.learned or (over and worse)):
            what = "fell back to guessing" if state.learned else "had learned nothing"
            raise DivergedError(
                f"the network {what} by the end of epoch {epoch} (training loss {loss:.3g}, highest "
                f"learning rate {state.lr:.3g})"
            )


def _near(images: Images, device: torch.device) -> Images:
    """Move the images to the device if they take at most half of its free memory."""
    if device.type != "cuda":
        return images
    free, _ = torch.cuda.mem_get_info(device)
    return images.to(device) if images.x.numel() <= free // 2 else images


def _setup(data: ImageData, recipe: TrainingRecipe, teacher: nn.Module | None = None) -> dict[str, object]:
    return {
        "dataset": data.name,
        "training images": len(data.train),
        "held-out images": len(data.heldout),
        "classes": data.classes,
        "teacher": None if teacher is None else network_digest(teacher),
        **asdict(recipe),
        "optimizer_options": dict(recipe.optimizer_options),
    }


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
    taught = teacher if labels is None or recipe.distillation > 0 else None
    count, size = count_inputs(inputs), min(recipe.batch_size, count_inputs(inputs))
    steps, device = steps_of_an_epoch(count, recipe.batch_size), model_device(model)

    def walk(seed: int) -> Iterator[tuple[Inputs, Any]]:
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        for indices in order.split(size)[:steps]:
            taken = partial(_taken, indices, device)
            yield mapped(lambda x: x.to(device), rows(inputs, indices)), tree_map_only(Tensor, taken, labels)

    weights = None if taught is None else quantity_weights(taught, inputs)
    epochs = Epochs(
        recipe=recipe,
        precision=Precision(device, torch.float32),
        batches=walk,
        loss=partial(_loss, recipe, own=loss, weights=weights),
        score=partial(_finite_score, score),
        steps=steps,
        teacher=taught,
        products=decayed_products(model, recipe),
        on_step=on_step,
    )
    result = follow(TrainingState(model, recipe, {}), epochs)
    model.eval()
    return result


def _loss(
    recipe: TrainingRecipe,
    outputs: Any,
    labels: Any,
    taught: Any,
    own: Loss | None = None,
    weights: Sequence[Tensor | None] | None = None,
) -> Tensor:
    """Return cross-entropy mixed with distillation, or the user's loss mixed with `imitation_loss`."""
    if labels is None:
        return imitation_loss(outputs, taught, weights)
    if own is None:
        return training_loss(outputs, labels, taught, recipe)
    loss = own(outputs, labels)
    if taught is None:
        return loss
    imitation = imitation_loss(outputs, taught, weights)
    return (1 - recipe.distillation) * loss + recipe.distillation * imitation


def _finite_score(score: Callable[[nn.Module], float], model: nn.Module) -> float:
    """Return the user's score as a float; it may come as a tensor of one element."""
    model.eval()
    with torch.no_grad():
        found = float(score(model))
    if not math.isfinite(found):
        raise NonFiniteError(f"score returned {found}; it must return a finite number")
    return found


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
    """Return the number of batches of an epoch over `count` inputs; a last batch of one is left out."""
    size = min(batch_size, count)  # batch normalisation cannot train on a single input
    return count // size + (count % size > 1)
