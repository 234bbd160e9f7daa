"""Which ranks a processor likes: the width of the stairs in which time falls with a rank."""

from __future__ import annotations

import logging
from functools import lru_cache
from pathlib import Path

from torch import nn

from decomposition.cache import Cache, digest
from rankrl.timing.layer_timing import LayerTimer
from rankrl.timing.passes import measuring_conditions

log = logging.getLogger(__name__)

STEPS = (32, 16, 8, 4)
"""Widths that are tried, the widest first."""
_ALIKE = 0.93
"""A rank this close in time to the next step's end is no faster than that."""
_SHAPE = (16, 64, 32, 32)
_RUNS = 60  # what stairs and a straight line differ by is small


@lru_cache(maxsize=4)
def fast_multiple(folder: Path | None = None) -> int:
    """Return the number that ranks had better be multiples of, in onnxruntime on this processor.

    A few convolutions to neighbouring numbers of channels are timed: the widest step is taken whose ranks
    halfway up cost as much as those at its end (16 with AVX-512, which computes 16 channels at a time).

    Args:
        folder: Where the answer is kept for later runs on this machine; None keeps none.
    """
    conditions = measuring_conditions(_SHAPE[0], 1)
    return Cache(folder).value("rank-multiple", digest(conditions, STEPS, _SHAPE, _RUNS), _measured)


def _measured() -> int:
    ranks = sorted({rank for step in STEPS for start in (step, 2 * step) for rank in _stair(start, step)})
    timer = LayerTimer(batch=_SHAPE[0], threads=1, runs=_RUNS)
    times = timer.alone([nn.Conv2d(_SHAPE[1], rank, 1) for rank in ranks], _SHAPE)
    multiple = step_of(dict(zip(ranks, times.tolist(), strict=True)))
    log.info("ranks are multiples of %d: what this processor computes at a time", multiple)
    return multiple


def step_of(times: dict[int, float]) -> int:
    """Return the widest step that times fall in, the narrowest if there is none.

    Args:
        times: Time by rank, for the ranks of `_stair` of every step.
    """
    for step in STEPS:
        pairs = [_stair(start, step) for start in (step, 2 * step)]
        if all(times[middle] / times[end] >= _ALIKE for middle, end in pairs):
            return step
    return STEPS[-1]


def _stair(start: int, step: int) -> tuple[int, int]:
    """Return the rank halfway up the stair behind `start`, and its end."""
    return start + step // 2, start + step
