"""Ranks that a processor computes fastest: the width of the steps in which time grows with the rank."""

from __future__ import annotations

import logging
from functools import lru_cache
from pathlib import Path

from torch import nn

from decomposition.cache import Cache, digest
from rankrl.options.timing import DEFAULT_RUNTIME, LatencyOptions
from rankrl.timing.layer_timing import LayerTimer
from rankrl.timing.passes import measuring_conditions

log = logging.getLogger(__name__)

STEPS = (32, 16, 8, 4)
"""Widths to try, the widest first."""
_ALIKE = 0.93
"""A rank that takes this part of the time at the step's end, or more, is no faster than that."""
_SHAPE = (16, 64, 32, 32)
_ELSEWHERE = 8
"""For processors that are not at hand: two registers of floats with NEON, one with AVX2."""
_RUNS = 60  # steps and a straight line differ by little


@lru_cache(maxsize=4)
def fast_multiple(folder: Path | None = None, runtime: str = DEFAULT_RUNTIME) -> int:
    """Return the number whose multiples are the fastest ranks, in a runtime on this processor.

    It is the width of the widest step whose ranks halfway up cost as much as those at its end, by the
    times of a few convolutions (16 with AVX-512, which computes 16 channels at a time).
    """
    conditions = measuring_conditions(_SHAPE[0], 1, runtime)
    key = digest(conditions, STEPS, _SHAPE, _RUNS)
    return Cache(folder).value("rank-multiple", key, lambda: _measured(runtime))


def suited_multiple(timing: LatencyOptions) -> int:
    """Return what ranks are multiples of in plans for the device that is timed."""
    return fast_multiple(timing.folder, timing.runtime) if not timing.tables else _ELSEWHERE


def _measured(runtime: str) -> int:
    ranks = sorted({rank for step in STEPS for start in (step, 2 * step) for rank in _step(start, step)})
    timer = LayerTimer(batch=_SHAPE[0], threads=1, runs=_RUNS, runtime=runtime)
    times = timer.alone([nn.Conv2d(_SHAPE[1], rank, 1) for rank in ranks], _SHAPE)
    multiple = step_of(dict(zip(ranks, times.tolist(), strict=True)))
    log.info("ranks are multiples of %d: as many as this processor computes at a time", multiple)
    return multiple


def step_of(times: dict[int, float]) -> int:
    """Return the width of the widest steps in which times grow, the least width if there are none."""
    for step in STEPS:
        pairs = [_step(start, step) for start in (step, 2 * step)]
        if all(times[middle] / times[end] >= _ALIKE for middle, end in pairs):
            return step
    return STEPS[-1]


def _step(start: int, step: int) -> tuple[int, int]:
    """Return the rank halfway up the step behind `start`, and its end."""
    return start + step // 2, start + step
