"""Shuffle, augment and normalise images in batches; read and split a user's inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from decomposition import Inputs
from decomposition.calibration.calibration_set import (
    CalibrationInputs,
    accepted,
    check_finite,
    gaps,
    labelled_batches,
)
from decomposition.choose.listing import changing_layers
from decomposition.network.cost import evaluation_mode
from decomposition.network.inputs import (
    count_inputs,
    input_shape_of,
    joined,
    mapped,
    plain,
    rows,
    run_model,
    tensors_in,
)
from rankrl.data.images import Augmentation, ImageData, Images, check_normalisation, scale_and_offset
from rankrl.device import model_device
from rankrl.errors import ConfigError, DataError
from rankrl.options.search import check_calibration

CALIBRATION_BATCH = 256
"""Inputs that pass through a network at a time."""


def batches(
    images: Images,
    batch_size: int,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    device: torch.device | None = None,
    augmentation: Augmentation | None = None,
    generator: torch.Generator | None = None,
    shuffle: bool = False,
    drop_last: bool = False,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield one epoch of batches: normalised images (B, C, H, W), float32, and labels (B,).

    All randomness comes from `generator` and is drawn on the CPU before the first batch, so that equal
    generators give equal batches on every device.
    """
    if not isinstance(images, Images):
        raise TypeError(
            f"expected Images, got {type(images).__name__}; test images choose nothing, use report_accuracy"
        )
    if batch_size < 1:
        raise ConfigError(f"the batch size must be at least 1, got {batch_size}")
    if generator is None and (shuffle or augmentation is not None):
        raise ConfigError("shuffling and augmentation need a torch.Generator, so that a run can be repeated")

    def walk() -> Iterator[tuple[Tensor, Tensor]]:
        target = images.x.device if device is None else device
        count = len(images)
        order = torch.randperm(count, generator=generator) if shuffle else torch.arange(count)
        order = order.to(images.x.device)
        crops = (
            augmentation.draw(count, generator).to(target)
            if augmentation is not None and generator is not None
            else None
        )
        check_normalisation(mean, std, images.x.shape[1])
        scale, offset = (tensor.view(1, -1, 1, 1).to(target) for tensor in scale_and_offset(mean, std))
        for start in range(0, count - batch_size + 1 if drop_last else count, batch_size):
            stop = min(start + batch_size, count)
            indices = order[start:stop]
            x = images.x[indices].to(target, non_blocking=True)
            if crops is not None:
                x = crops.part(start, stop).apply(x)
            yield (
                x.to(torch.float32, memory_format=torch.channels_last).mul_(scale).add_(offset),
                images.y[indices].to(target, non_blocking=True),
            )

    return walk()


def augmented_copy(images: Images, augmentation: Augmentation, seed: int) -> Images:
    """Return a copy with every image randomly cropped and flipped once."""
    generator = torch.Generator().manual_seed(seed)
    crops = augmentation.draw(len(images), generator).to(images.x.device)
    x = torch.empty_like(images.x, memory_format=torch.channels_last)
    for start in range(0, len(images), 1000):  # the gather's index takes 8 bytes a pixel: keep it small
        stop = min(start + 1000, len(images))
        x[start:stop] = crops.part(start, stop).apply(images.x[start:stop])
    return Images(x, images.y)


UNLABELLED = -100
"""The class of an input that has none, as torch's cross-entropy ignores it."""


@dataclass(frozen=True)
class Sample:
    """Inputs, with their labels if there are any."""

    inputs: Inputs
    labels: Any = None

    @classmethod
    def read(cls, data: CalibrationInputs, model: nn.Module, what: str) -> Sample:
        """Read inputs into memory: a tensor, a tuple or a dict of tensors, batches of such, or a dataset."""
        batches = labelled_batches(data, model)
        if not batches or sum(count_inputs(batch) for batch, _ in batches) == 0:
            raise DataError(f"{what} holds no inputs; give a few hundred")
        taken = accepted(model, [batch for batch, _ in batches], what, device=model_device(model))
        inputs = mapped(Tensor.cpu, joined(taken))
        sample = cls(inputs, _joined([labels for _, labels in batches], what))
        for leaf in tree_flatten(sample.labels)[0]:
            if leaf is not None and len(leaf) != len(sample):
                raise DataError(f"{what} holds {len(sample)} inputs, but {len(leaf)} labels")
        return sample

    def __len__(self) -> int:
        return count_inputs(self.inputs)

    def scores_classes(self, model: nn.Module) -> bool:
        """Whether labels are classes and the model returns class scores."""
        return self.has_classes and classes_of(model, self.inputs) is not None

    def part(self, index: Tensor) -> Sample:
        labels = None if self.labels is None else tree_map(lambda y: y[index], self.labels)
        return Sample(rows(self.inputs, index), labels)

    def parted(self, heldout: float, seed: int) -> tuple[Sample, Sample]:
        """Hold out a random share (below 1) or number of inputs; return the rest and the held-out ones."""
        count = len(self)
        if count < 2:
            raise DataError(f"{count} inputs are too few to hold some out; give a few hundred")
        if heldout >= count:
            raise DataError(f"heldout is {heldout}, of {count} inputs; give more inputs, or hold fewer out")
        share = heldout / count if heldout >= 1 else heldout
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        held = min(max(1, round(share * count)), count - 1)  # neither part may be empty
        return self.part(order[held:].sort().values), self.part(order[:held].sort().values)

    @property
    def has_classes(self) -> bool:
        labels = self.labels
        is_vector = isinstance(labels, Tensor) and labels.ndim == 1
        return is_vector and not (labels.is_floating_point() or labels.is_complex())

    def labelled(self) -> Sample:
        """Leave out inputs without a class, if labels are classes."""
        if not self.has_classes or not bool((self.labels == UNLABELLED).any()):
            return self
        return self.part((self.labels != UNLABELLED).nonzero().flatten())

    def of_classes(self, classes: int, what: str) -> Sample:
        """Convert class labels to int64 and check their range; whole numbers in floats count as classes."""
        labels = self.labels
        if not isinstance(labels, Tensor) or labels.ndim != 1 or not bool((labels == labels.round()).all()):
            return self
        sample = replace(self, labels=labels.long())
        known = sample.labels[sample.labels != UNLABELLED]
        if not len(known):
            raise DataError(f"{what}: no input has a label, all are {UNLABELLED}; give some, or none at all")
        lowest, highest = int(known.min()), int(known.max())
        if lowest < 0 or highest >= classes:
            remedy = "give labels - 1" if (lowest, highest) == (1, classes) else "number the classes from 0"
            raise DataError(
                f"{what}: labels run from {lowest} to {highest}, the network has {classes} outputs: 0 to "
                f"{classes - 1}; {remedy}, with {UNLABELLED} for inputs without one, or, if they are no "
                "classes, give score= and loss="
            )
        return sample


def is_number_of_inputs(heldout: object) -> bool:
    """Whether `heldout` is a number of inputs rather than a share."""
    return isinstance(heldout, int) and not isinstance(heldout, bool) and heldout >= 1


def classes_of(model: nn.Module, inputs: Inputs) -> int | None:
    """Return the number of classes if the model returns scores (N, classes), else None."""
    device = model_device(model)
    with evaluation_mode(model):
        outputs = tensors_in(run_model(model, mapped(lambda x: x.to(device), rows(inputs, slice(1)))))
    scores = outputs[0] if len(outputs) == 1 else None
    is_classifier = scores is not None and scores.ndim == 2 and scores.is_floating_point()
    return scores.shape[1] if scores is not None and is_classifier and scores.shape[1] > 1 else None


def read_samples(
    data: CalibrationInputs,
    heldout: float | CalibrationInputs,
    test: CalibrationInputs | None,
    model: nn.Module,
    seed: int,
    *,
    skip: Sequence[str],
    only: Sequence[str],
    score_reads_classes: bool,
    loss_reads_classes: bool,
) -> tuple[Sample, Sample, Sample | None]:
    """Read and check the samples for fitting, for held-out scores and for the test."""
    sets: dict[str, CalibrationInputs | None] = {"data": data, "heldout": None, "test": test}
    if not isinstance(heldout, int | float):
        sets["heldout"] = heldout
    elif not (0 < heldout < 1 or is_number_of_inputs(heldout)):
        raise ConfigError(
            f"heldout is {heldout}; it is a share of the inputs, between 0 and 1, a number of them, or inputs"
        )
    samples = {what: Sample.read(inputs, model, what) for what, inputs in sets.items() if inputs is not None}
    fitted = samples["data"]
    for what, sample in samples.items():
        layers: list[str] = []
        if sample is fitted and len(gaps(sample.inputs)):
            layers = [s.name for s in changing_layers(model, input_shape_of(sample.inputs), skip, only)]
        check_finite(model, sample.inputs, layers, what, device=model_device(model))
    classes = classes_of(model, fitted.inputs)
    if loss_reads_classes and fitted.labels is not None and classes is None:
        raise ConfigError(
            "the network does not return one tensor of class scores (N, classes), so that labels say nothing "
            "of the loss; give loss=, or leave labels out to let it imitate the dense network"
        )
    if classes is not None and (score_reads_classes or loss_reads_classes):
        for what, sample in samples.items():
            if loss_reads_classes or sample.has_classes:
                samples[what] = sample.of_classes(classes, what)
    if not isinstance(heldout, int | float):
        return samples["data"], samples["heldout"], samples.get("test")
    return *samples["data"].parted(heldout, seed), samples.get("test")


def _joined(labels: Sequence[Any], what: str) -> Any:
    """Join the labels of all batches on the CPU; return None if there are none."""
    if all(batch_labels is None for batch_labels in labels):
        return None
    refusal = (
        f"{what}: labels must be one tensor for each batch (or a dict or tuple of tensors), or be left out"
    )
    flat = [tree_flatten(batch_labels) for batch_labels in labels]
    if any(batch_labels is None for batch_labels in labels) or any(spec != flat[0][1] for _, spec in flat):
        raise DataError(f"{refusal} of all of them")
    for leaf in (leaf for leaves, _ in flat for leaf in leaves):
        if not isinstance(leaf, Tensor) or leaf.ndim == 0:
            kind = "a single number" if isinstance(leaf, Tensor) else type(leaf).__name__
            raise DataError(f"{refusal}; they hold {kind}; torch.as_tensor reads lists of numbers and arrays")
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return flat[0][1].unflatten([torch.cat([plain(y).cpu() for y in column]) for column in columns])


def calibration_images(data: ImageData, count: int, *, seed: int, augmented: bool = False) -> Tensor:
    """Draw normalised training images (count, C, H, W), float32, for fitting layers."""
    check_calibration(count)
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(seed))
    images: Images = data.train.subset(order[:count])
    if augmented and data.augmentation is not None:
        images = augmented_copy(images, data.augmentation, seed)
    walk = batches(images, CALIBRATION_BATCH, mean=data.mean, std=data.std)
    return torch.cat([x for x, _ in walk])
