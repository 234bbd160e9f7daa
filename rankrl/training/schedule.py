"""Learning-rate schedules as pure functions of the step, so that nothing has to be saved to resume one."""

from __future__ import annotations

import math
from collections.abc import Callable

from decomposition.registry import Registry
from rankrl.errors import ConfigError

Schedule = Callable[[int, int, float], float]
"""(step, steps, warmup) -> factor of the highest learning rate; step runs from 0 to steps - 1."""

_SCHEDULES: Registry[Schedule] = Registry("schedule", ConfigError)


def register_schedule(name: str) -> Callable[[Schedule], Schedule]:
    """Register the decorated function as the schedule `name`."""

    def register(schedule: Schedule) -> Schedule:
        return _SCHEDULES.add(name, schedule)

    return register


def list_schedules() -> list[str]:
    """Return the names of the schedules, sorted."""
    return _SCHEDULES.names()


def learning_rate_factor(schedule: str, step: int, steps: int, warmup: float) -> float:
    """Return the factor of the highest learning rate at a step."""
    return _SCHEDULES[schedule](step, steps, warmup)


@register_schedule("constant")
def constant(step: int, steps: int, warmup: float) -> float:
    """Rise linearly during the warm-up, then stay."""
    rising = round(warmup * steps)
    return (step + 1) / (rising + 1) if step < rising else 1.0


@register_schedule("cosine")
def cosine(step: int, steps: int, warmup: float) -> float:
    """Rise linearly during the warm-up, then fall to 0 along half a cosine (Loshchilov & Hutter 2017)."""
    rising = round(warmup * steps)
    if step < rising:
        return (step + 1) / (rising + 1)
    return (1 + math.cos(math.pi * (step - rising) / (steps - rising))) / 2


@register_schedule("one_cycle")
def one_cycle(step: int, steps: int, warmup: float) -> float:
    """Rise from 1/25 to 1 and fall to 4e-6, both along half a cosine (Smith & Topin 2018).

    The values are those of `torch.optim.lr_scheduler.OneCycleLR` with its defaults and `pct_start=warmup`;
    the momentum stays as it is.
    """
    start, end = 1 / 25, 1 / 25 / 1e4
    peak = warmup * steps - 1
    if step <= peak:
        return _half_cosine(start, 1.0, step / peak if peak > 0 else 1.0)
    first = max(peak, 0.0)
    return _half_cosine(1.0, end, (step - first) / (steps - 1 - first) if steps - 1 > first else 1.0)


def _half_cosine(start: float, end: float, progress: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * progress))
