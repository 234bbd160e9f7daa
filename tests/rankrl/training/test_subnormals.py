"""Numbers too small for float32's full precision are kept out of training and of what it leaves."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from torch import nn

from rankrl.data import ImageData
from rankrl.training import TrainingRecipe, train
from rankrl.training.epochs import clear_negligible, subnormals_as_zero

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
