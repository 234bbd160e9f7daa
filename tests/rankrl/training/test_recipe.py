"""A recipe refuses what cannot be meant."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from rankrl.data import ImageData
from rankrl.errors import ConfigError
from rankrl.training import TrainingRecipe, train
from rankrl.training.epochs import clear_negligible, subnormals_as_zero
from rankrl.training.recipe import learning_rate_factor, list_schedules, register_schedule


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs must be a whole number >= 1, got 0"),
        ({"epochs": 1.5}, "epochs"),
        ({"batch_size": True}, "batch_size"),
        ({"seed": -1}, "seed"),
        ({"halvings": -1}, "halvings must be a whole number >= 0"),
        ({"lr": 0}, "lr must be positive"),
        ({"lr": float("nan")}, "lr must be positive, got nan"),
        ({"lr": float("inf")}, "lr"),
        ({"lr": "fast"}, "lr must be positive, got 'fast'"),
        ({"warmup": 1.0}, "warmup must be at least 0 and below 1"),
        ({"label_smoothing": -0.1}, "label_smoothing"),
        ({"gradient_clip": 0.0}, "gradient_clip"),
        ({"ema_decay": 1.0}, "ema_decay"),
        ({"distillation": 1.1}, "distillation must be between 0 and 1"),
        ({"temperature": 0.0}, "temperature"),
        ({"early_stop_patience": 0}, "early_stop_patience"),
        ({"schedule": "cosin"}, "Did you mean 'cosine'"),
        ({"optimizer_options": {"lr": 1.0}}, "give the learning rate as lr"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainingRecipe(**options)  # type: ignore[arg-type]


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


SUBNORMAL = float(np.finfo(np.float32).smallest_subnormal) * 100


def halved_is_zero() -> bool:
    return not torch.full((1,), SUBNORMAL).mul(0.5).any()


def test_taken_as_zero_inside_and_kept_outside() -> None:
    assert not halved_is_zero()
    with subnormals_as_zero():
        assert halved_is_zero()
        with subnormals_as_zero():
            assert halved_is_zero()
        assert halved_is_zero()
    assert not halved_is_zero()


def test_restored_after_an_error() -> None:
    with pytest.raises(ValueError, match="stop"), subnormals_as_zero():
        raise ValueError("stop")
    assert not halved_is_zero()


def test_threads_started_inside_inherit_it() -> None:
    seen: list[bool] = []
    with subnormals_as_zero():
        thread = threading.Thread(target=lambda: seen.append(halved_is_zero()))
        thread.start()
        thread.join()
    assert seen == [True]


def test_clears_what_no_sum_notices() -> None:
    layer = nn.Linear(4, 1)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[2.0, -1e-3, 1e-11, -1e-39]]))
        layer.bias.fill_(1e-30)  # the largest of its tensor
    clear_negligible(layer)
    assert layer.weight.tolist() == [[2.0, pytest.approx(-1e-3), 0.0, 0.0]]
    assert layer.bias.item() == pytest.approx(1e-30)


def test_clears_a_tensor_of_zeros_and_an_empty_one() -> None:
    layer = nn.Module()
    layer.zeros, layer.empty = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(0))
    clear_negligible(layer)
    assert layer.zeros.tolist() == [0.0, 0.0, 0.0]


def test_training_leaves_none(digits: ImageData) -> None:
    """Weights of a unit that is never active, and that no gradient reaches: decay brings such ones there."""
    hidden = nn.Linear(int(np.prod(digits.input_shape)), 4)
    with torch.no_grad():
        hidden.weight[0].fill_(1e-20)
        hidden.bias[0] = -1e3
    model = nn.Sequential(nn.Flatten(), hidden, nn.ReLU(), nn.Linear(4, digits.classes))
    inside: list[bool] = []
    recipe = TrainingRecipe(epochs=1, batch_size=64, ema_decay=0.9, restore_best=False)
    train(model, digits, recipe, on_step=lambda _: inside.append(halved_is_zero()))
    assert inside
    assert all(inside)
    assert not hidden.weight[0].any()
    assert hidden.weight[1].all()
