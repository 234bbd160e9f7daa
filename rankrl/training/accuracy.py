"""Scores and accuracies of a network on images."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from decomposition import contracted, factorised_layers
from decomposition.network.cost import evaluation_mode
from rankrl.data.batches import batches
from rankrl.data.images import Images, TestImages
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


def predict_logits(
    model: nn.Module,
    images: Images,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    precision: Precision | None = None,
    batch_size: int = 500,
) -> Tensor:
    """Return the class scores of a network in evaluation mode.

    Decomposed layers run contracted to dense weights: the same function, for whole datasets in less time.

    Shapes: returns (N, classes).
    """
    precision = inference_precision(model_device(model)) if precision is None else precision
    walk = batches(images, batch_size, mean=mean, std=std, device=precision.device)
    two = images.first(2)
    example = next(batches(two, 2, mean=mean, std=std, device=precision.device))[0]
    if factorised_layers(model):
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
    batch_size: int = 500,
) -> Tensor:
    """Return for every image whether its highest class score is that of its label, shape (N,), bool.

    The arguments are those of `predict_logits`.
    """
    if isinstance(images, Images) and len(images) == 0:
        raise DataError("cannot measure an accuracy on no images")
    logits = predict_logits(model, images, mean=mean, std=std, precision=precision, batch_size=batch_size)
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
    batch_size: int = 500,
) -> float:
    """Return the fraction of images whose highest class score is that of their label, 0 to 1.

    The arguments and errors are those of `correct_images`.
    """
    return share(
        correct_images(model, images, mean=mean, std=std, precision=precision, batch_size=batch_size)
    )


def share(correct: Tensor) -> float:
    """Return the fraction of true values."""
    return int(correct.sum()) / len(correct)


def correct_test_images(
    model: nn.Module,
    test: TestImages,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    batch_size: int = 500,
) -> Tensor:
    """Return for every image of the test set whether it is classified right, in full float32, for a report.

    Nothing may be chosen by it: that is what `accuracy` on held-out images is for.

    Shapes: returns (N,).
    """
    precision = Precision(model_device(model), torch.float32)
    with exact_float32():
        return correct_images(
            model, test.for_report(), mean=mean, std=std, precision=precision, batch_size=batch_size
        )


def report_accuracy(
    model: nn.Module,
    test: TestImages,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    batch_size: int = 500,
) -> float:
    """Return the accuracy on the test set, 0 to 1; see `correct_test_images`."""
    return share(correct_test_images(model, test, mean=mean, std=std, batch_size=batch_size))
