"""Schedules equal torch's own where it has them, and stay within [0, 1]."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from rankrl.errors import ConfigError
from rankrl.training.recipe import learning_rate_factor, list_schedules, register_schedule


def optimizer() -> torch.optim.SGD:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0, momentum=0.9)


@pytest.mark.parametrize(("steps", "warmup"), [(100, 0.3), (40, 0.25), (7, 0.5)])
def test_one_cycle_is_torchs(steps: int, warmup: float) -> None:
    sgd = optimizer()
    scheduler = OneCycleLR(sgd, max_lr=1.0, total_steps=steps, pct_start=warmup)
    for step in range(steps):
        assert learning_rate_factor("one_cycle", step, steps, warmup) == pytest.approx(
            sgd.param_groups[0]["lr"]
        )
        sgd.step()
        if step + 1 < steps:
            scheduler.step()


def test_cosine_without_warmup_is_torchs() -> None:
    sgd = optimizer()
    scheduler = CosineAnnealingLR(sgd, T_max=50)
    for step in range(50):
        assert learning_rate_factor("cosine", step, 50, 0.0) == pytest.approx(sgd.param_groups[0]["lr"])
        sgd.step()
        scheduler.step()


@pytest.mark.parametrize("name", list_schedules())
@given(steps=st.integers(1, 300), warmup=st.floats(0, 0.99))
def test_every_schedule_rises_to_its_peak_once_and_then_never_rises(
    name: str, steps: int, warmup: float
) -> None:
    factors = [learning_rate_factor(name, step, steps, warmup) for step in range(steps)]
    assert all(0 <= factor <= 1 + 1e-12 for factor in factors)
    peak = factors.index(max(factors))
    assert factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    assert peak <= warmup * steps + 1


@pytest.mark.parametrize("name", ["constant", "cosine"])
def test_warmup_is_linear_and_reaches_the_full_rate(name: str) -> None:
    factors = [learning_rate_factor(name, step, 40, 0.1) for step in range(5)]
    assert factors == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ConfigError, match=r"there is a schedule .* already"):
        register_schedule("cosine")(lambda step, steps, warmup: 1.0)
