"""The accuracy of guessing, and whether a network exceeds it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_STANDARD_ERRORS = 3.0
_LOSS_FRACTION = 0.98
_WORSE = 1.005


def guessing_share(labels: Tensor) -> float:
    """Return the accuracy of one answer to all images, the commonest class: its share, in (0, 1].

    Shapes: labels (N,).
    """
    return int(torch.bincount(labels).max()) / len(labels)


def guessing_loss(labels: Tensor) -> float:
    """Return the least cross-entropy of scores that do not depend on the image, in nats.

    It is the entropy of the classes' shares, log(classes) where all are equal.

    Shapes: labels (N,).
    """
    shares = torch.bincount(labels).double() / len(labels)
    return float(torch.special.entr(shares).sum())


def near_guessing(accuracy: float, share: float, images: int) -> bool:
    """Return whether an accuracy is hardly better than guessing.

    It is when it lies within three standard errors of a binomial of `share`, or when it is below 1.5 times
    the share and less than a twentieth of the way from there to 1.
    """
    margin = max(guessing_noise(share, images), min(share / 2, (1 - share) / 20))
    return accuracy <= share + margin


def is_guessing(accuracy: float, loss: float, labels: Tensor, images: int) -> bool:
    """Return whether an epoch of training brought nothing that guessing does not.

    Both signs are needed. The loss of a network that is slow to begin stays near that of guessing while more
    of its answers become right than by chance; where one class is far commoner than the others, the loss
    falls before any other class is answered. With labels of one class there is nothing to guess.
    """
    share = guessing_share(labels)
    if share == 1:
        return False
    return accuracy <= share + guessing_noise(share, images) and loss >= _LOSS_FRACTION * guessing_loss(
        labels
    )


def worse_than_guessing(loss: float, labels: Tensor) -> bool:
    """Return whether scores that do not depend on the image would have a smaller loss.

    A network that is slow to begin comes near that loss and stays there for long: larger steps may free it,
    smaller ones do not. One whose steps are too large lies above it.
    """
    return loss > _WORSE * guessing_loss(labels)


def guessing_noise(share: float, images: int) -> float:
    """Return how far the accuracy of guessing may lie from its share by chance: three standard errors."""
    return _STANDARD_ERRORS * math.sqrt(share * (1 - share) / images)
