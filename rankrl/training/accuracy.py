"""Compute losses and accuracies of classifiers, and compare them with those of guessing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decomposition import contracted, factorised_layers
from decomposition.network.cost import evaluation_mode
from rankrl.data.images import Images, TestImages
from rankrl.data.sample import batches
from rankrl.device import (
    Precision,
    accepted_layout,
    exact_float32,
    in_layout,
    inference_precision,
    model_device,
    to_fastest_layout,
)
from rankrl.errors import DataError, NonFiniteError
from rankrl.options.training import RecipeOptions

_BATCH = 500
_STANDARD_ERRORS = 3.0
_LOSS_FRACTION = 0.98  # of guessing's loss: below it, the scores depend on the image
_WORSE = 1.005  # of guessing's loss: a network on the plateau of guessing fluctuates around it


def guessing_share(labels: Tensor) -> float:
    """Return the accuracy of always answering the commonest class of labels (N,), in (0, 1]."""
    return int(torch.bincount(labels).max()) / len(labels)


def guessing_loss(labels: Tensor) -> float:
    """Return the entropy of the classes' shares in nats: the least loss without looking at the images."""
    shares = torch.bincount(labels).double() / len(labels)
    return float(torch.special.entr(shares).sum())


def near_guessing(accuracy: float, share: float, images: int) -> bool:
    """Whether an accuracy is hardly better than guessing.

    True within three standard errors of a binomial of `share`, or below 1.5 times the share and less than a
    twentieth of the way from the share to 1.
    """
    margin = max(guessing_noise(share, images), min(share / 2, (1 - share) / 20))
    return accuracy <= share + margin


def is_guessing(accuracy: float, loss: float, labels: Tensor, images: int) -> bool:
    """Whether an epoch's accuracy and loss are no better than those of guessing."""
    share = guessing_share(labels)
    if share == 1:  # there is nothing to guess
        return False
    # While a network learns slowly, its accuracy leaves that of guessing before its loss does; where one
    # class is far commoner than the others, the loss falls before any other class is answered.
    large = loss >= _LOSS_FRACTION * guessing_loss(labels)
    return large and accuracy <= share + guessing_noise(share, images)


def worse_than_guessing(loss: float, labels: Tensor) -> bool:
    """Whether scores that do not depend on the image would have a smaller loss: steps are too large."""
    return loss > _WORSE * guessing_loss(labels)


def guessing_noise(share: float, images: int) -> float:
    """Return three standard errors of the accuracy of guessing."""
    return _STANDARD_ERRORS * math.sqrt(share * (1 - share) / images)


def distillation_loss(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return T^2 * KL(teacher || student) of the softened probabilities (Hinton et al. 2015, section 2)."""
    divergence = F.kl_div(
        F.log_softmax(student.float() / temperature, dim=1),
        F.log_softmax(teacher.float() / temperature, dim=1),
        log_target=True,
        reduction="batchmean",
    )
    return divergence * temperature**2


def training_loss(student: Tensor, labels: Tensor, teacher: Tensor | None, recipe: RecipeOptions) -> Tensor:
    """Return (1 - m) * cross-entropy + m * distillation of class scores, with m = `recipe.distillation`."""
    loss = F.cross_entropy(student.float(), labels.long(), label_smoothing=recipe.label_smoothing)
    if teacher is None:
        return loss
    taught = distillation_loss(student, teacher, recipe.temperature)
    return (1 - recipe.distillation) * loss + recipe.distillation * taught


def predict_logits(
    model: nn.Module,
    images: Images,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    precision: Precision | None = None,
) -> Tensor:
    """Return the class scores (N, classes) of a network in evaluation mode."""
    precision = inference_precision(model_device(model)) if precision is None else precision
    walk = batches(images, _BATCH, mean=mean, std=std, device=precision.device)
    two = images.first(2)
    example = next(batches(two, 2, mean=mean, std=std, device=precision.device))[0]
    if factorised_layers(model):  # as dense weights they compute the same, faster over whole datasets
        model = contracted(model)
        layout = to_fastest_layout(model, example)
    else:
        layout = accepted_layout(model, example)
    with evaluation_mode(model), torch.no_grad(), precision.autocast():
        parts = [model(in_layout(x, layout)).float() for x, _ in walk]
    return torch.cat(parts)


def correct_images(
    model: nn.Module,
    images: Images,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    precision: Precision | None = None,
) -> Tensor:
    """Return, for every image, whether its highest class score is that of its label, shape (N,), bool."""
    if isinstance(images, Images) and len(images) == 0:
        raise DataError("cannot measure an accuracy on no images")
    logits = predict_logits(model, images, mean=mean, std=std, precision=precision)
    finite = torch.isfinite(logits).all(dim=1)
    if not finite.all():
        raise NonFiniteError(
            f"the network's class scores are NaN or infinite for {int((~finite).sum())} of {len(images)} "
            f"images, first for image {int((~finite).nonzero()[0])}; its weights or batch-normalisation "
            "statistics diverged"
        )
    return logits.argmax(dim=1) == images.y.to(logits.device)


def accuracy(
    model: nn.Module,
    images: Images,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    precision: Precision | None = None,
) -> float:
    """Return the fraction of images whose highest class score is that of their label, 0 to 1."""
    return share(correct_images(model, images, mean=mean, std=std, precision=precision))


def share(correct: Tensor) -> float:
    return int(correct.sum()) / len(correct)


def correct_test_images(
    model: nn.Module, test: TestImages, *, mean: Sequence[float], std: Sequence[float]
) -> Tensor:
    """Return, for every test image, whether it is classified correctly in full float32, for a report."""
    precision = Precision(model_device(model), torch.float32)
    with exact_float32():
        return correct_images(model, test.for_report(), mean=mean, std=std, precision=precision)


def report_accuracy(
    model: nn.Module, test: TestImages, *, mean: Sequence[float], std: Sequence[float]
) -> float:
    return share(correct_test_images(model, test, mean=mean, std=std))
