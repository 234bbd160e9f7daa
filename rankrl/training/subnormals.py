"""Numbers too small for float32's full precision, which processors compute with a hundred times slower.

Weights that decay towards zero pass through them: terms of a factorised layer that a decay of the product
has switched off, dead channels. Products of two such weights are there sooner still. A training step of
ResNet-20 in CP at 1/4 of its parameters took 3.8 s instead of 0.35 s after seven epochs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

# Beside the largest weight of a tensor, these vanish in any float32 sum: its resolution is 6e-8.
_NEGLIGIBLE = 1e-10


@contextmanager
def subnormals_as_zero() -> Iterator[None]:
    """Take subnormal numbers as zero, in operands and results, on the calling thread.

    Threads that PyTorch starts in this context take them so, too; those it has already started do not, so the
    command line enters it first of all. What cannot do this (some processors) goes on as before.
    """
    if _taken_as_zero():
        yield
        return
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@torch.no_grad()
def clear_negligible(model: nn.Module) -> None:
    """Set weights to zero that are at most 1e-10 times the largest of their tensor, in place.

    They change no output; what runs the network elsewhere would be slowed by their products all the same.
    """
    for weights in model.parameters():
        if weights.is_floating_point() and weights.numel():
            size = weights.abs()
            weights.masked_fill_(size <= _NEGLIGIBLE * size.amax(), 0.0)


def _taken_as_zero() -> bool:
    return not torch.full((1,), 1e-39).mul(0.5).any()
