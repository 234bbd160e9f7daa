"""What the outputs of a network are worth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Outputs = Sequence[Array]
Score = Callable[[Sequence[Outputs], Sequence[Any], Sequence[Outputs]], float]
"""From outputs, what is known of each input, and the original's outputs to a number, higher is better."""


def correlation(outputs: Sequence[Outputs], _: Sequence[Any], originals: Sequence[Outputs]) -> float:
    """Return the correlation with the original's outputs, the mean over the outputs.

    Each number is compared by how it differs from its mean over the inputs. Where all lie between 0 and 1
    they are taken for probabilities, and compared by their logits.
    """
    correlations = []
    for new, old in zip(zip(*outputs, strict=True), zip(*originals, strict=True), strict=True):
        if old[0].dtype.kind != "f":
            continue
        sides = [np.stack([np.asarray(each, np.float64).ravel() for each in side]) for side in (new, old)]
        if sides[1].min() >= 0 and sides[1].max() <= 1:
            sides = [side.clip(1e-7, 1 - 1e-7) for side in sides]
            sides = [np.log(side / (1 - side)) for side in sides]
        sides = [(side - side.mean(0)).ravel() for side in sides]
        if sides[1].std() > 0:
            correlations.append(float(np.corrcoef(*sides)[0, 1]) if sides[0].std() > 0 else 0.0)
    return float(np.mean(correlations))


def first_output(outputs: Sequence[Outputs], known: Sequence[Any], originals: Sequence[Outputs]) -> float:
    """Return the correlation of the first output: the others are states, which follow from what is heard."""
    return correlation([each[:1] for each in outputs], known, [each[:1] for each in originals])


def accuracy(outputs: Sequence[Outputs], known: Sequence[Any], _: Sequence[Outputs]) -> float:
    """Return the share of inputs whose largest output is that of their class."""
    return float(np.mean(np.concatenate([each[0].argmax(1) for each in outputs]) == np.asarray(known)))


def strings(
    characters: Sequence[str], outputs: Sequence[Outputs], known: Sequence[Any], _: Sequence[Outputs]
) -> float:
    """Return the share of lines that are read without an error, blanks apart (greedy decoding of CTC)."""
    right = []
    for each, text in zip(outputs, known, strict=True):
        best = each[0][0].argmax(1)
        kept = best[np.append(True, best[1:] != best[:-1]) & (best != 0)]
        read = "".join(characters[index - 1] for index in kept)
        right.append(read.replace(" ", "") == text.replace(" ", ""))
    return float(np.mean(right))


def boxes(outputs: Sequence[Outputs], known: Sequence[Any], _: Sequence[Outputs]) -> float:
    """Return the F1 of the boxes that a map of probabilities stands for: right where the IoU is above 0.5."""
    hits = found_count = known_count = 0
    for each, places in zip(outputs, known, strict=True):
        predicted = _boxes_of(each[0][0, 0])
        open_places = list(places)
        for box in predicted:
            best = max(open_places, key=lambda place: _iou(box, place), default=None)
            if best is not None and _iou(box, best) > 0.5:
                open_places.remove(best)
                hits += 1
        found_count, known_count = found_count + len(predicted), known_count + len(places)
    return 2 * hits / max(1, found_count + known_count)


def _boxes_of(scores: Array) -> list[tuple[float, ...]]:
    """Return upright boxes around the patches above 0.3, made larger as DB does (Liao et al., AAAI 2020)."""
    from scipy import ndimage

    labels, _ = ndimage.label(scores > 0.3)
    corners = []
    for index, (rows, columns) in enumerate(ndimage.find_objects(labels), 1):
        height, width = rows.stop - rows.start, columns.stop - columns.start
        if min(height, width) < 3 or scores[rows, columns][labels[rows, columns] == index].mean() < 0.5:
            continue
        border = 1.6 * height * width / (2 * (height + width))
        corners.append(
            (columns.start - border, rows.start - border, columns.stop + border, rows.stop + border)
        )
    return corners


def _iou(first: Sequence[float], second: Sequence[float]) -> float:
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    shared = max(0.0, width) * max(0.0, height)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (first, second)]
    return shared / (sum(areas) - shared)
