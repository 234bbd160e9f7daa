"""Stratified splits: every class keeps its share on both sides."""

from __future__ import annotations

import torch
from torch import Tensor


def stratified_split(labels: Tensor, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw `size` indices so that each class is drawn in proportion to how often it occurs.

    Quotas are rounded by largest remainder, so exactly `size` indices are drawn.

    Shapes: labels (N,).
    """
    if not 0 <= size <= len(labels):
        raise ValueError(f"cannot draw {size} of {len(labels)} images")
    counts = torch.bincount(labels)
    shares = counts.double() * size / max(len(labels), 1)
    quotas = shares.floor().long()
    remainders = torch.argsort(shares - quotas, descending=True, stable=True)
    quotas[remainders[: size - int(quotas.sum())]] += 1

    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(labels), generator=generator)
    by_class = shuffled[torch.argsort(labels[shuffled], stable=True)]
    # by_class holds class 0 in random order, then class 1, ...: the first `quota` of each block are drawn.
    rank_in_class = torch.arange(len(labels)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    drawn = rank_in_class < quotas.repeat_interleave(counts)
    return by_class[~drawn].sort().values, by_class[drawn].sort().values
