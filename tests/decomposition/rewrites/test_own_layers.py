"""Subclasses that compute as plain layers do are let in, others refused; layers that alone may change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from decomposition import (
    DecompositionError,
    apply_plan,
    count_parameters,
    inspect_layers,
    make_plan,
    plain_layers,
    plan_by_heuristic,
)
from decomposition.network.layers import skipping

IMAGES = torch.randn(16, 3, 10, 10, generator=torch.Generator().manual_seed(1))


class Named(nn.Conv2d):
    purpose = "seeing"


class Commented(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.contiguous())


class Standardised(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return self._conv_forward(x, weight, self.bias)


class Noisy(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y + torch.randn_like(y) if self.training else y


class Adapted(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.adapter = nn.Parameter(torch.zeros(outputs, inputs))


class Shorter(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[..., :1]


def network(conv: nn.Module, linear: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(conv, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear).eval()


@pytest.mark.parametrize("layers", [["0", "4"], ["?"], ["Named", "Commented"], ["Named", "4"]])
@pytest.mark.parametrize(
    "options", [{}, {"stride": 2, "padding": 1, "bias": False}, {"padding_mode": "reflect"}]
)
def test_layers_that_compute_the_same_are_let_in(layers: list[str], options: dict[str, Any]) -> None:
    model = network(Named(3, 8, 3, **options), Commented(8, 10))
    assert all(spec.refusal is not None for spec in inspect_layers(model, IMAGES))
    plain = plain_layers(model, layers, IMAGES)
    assert [type(plain[j]) for j in (0, 4)] == [nn.Conv2d, nn.Linear]  # type: ignore[index]
    assert type(model[0]) is Named  # type: ignore[index]
    assert all(spec.refusal is None for spec in inspect_layers(plain, IMAGES))
    assert torch.equal(plain(IMAGES), model(IMAGES))
    assert plain.state_dict().keys() == model.state_dict().keys()
    small = apply_plan(plain, make_plan(plain, (3, 10, 10), "tucker", 2), IMAGES)
    assert count_parameters(small) < count_parameters(model)


def test_grouped_convolution_stays_grouped() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Named(4, 8, 3, groups=2), nn.Conv2d(8, 2, 1)).eval()
    plain = plain_layers(model, ["Named"], (4, 6, 6))
    assert type(plain[0]) is nn.Conv2d
    assert plain[0].groups == 2


@pytest.mark.parametrize(
    ("conv", "linear", "entry", "message"),
    [
        (
            Standardised(3, 8, 3),
            nn.Linear(8, 10),
            "Standardised",
            "'0', a Standardised, computes something else",
        ),
        (nn.Conv2d(3, 8, 3), Noisy(8, 10), "4", "outputs differ by up to .* in training mode"),
        (nn.Conv2d(3, 8, 3), Adapted(8, 10), "4", "has adapter besides weight and bias"),
        (nn.Conv2d(3, 8, 3), Shorter(8, 10), "4", r"shape \(16, 1\) instead of \(16, 10\)"),
        (Named(3, 8, 3), nn.Linear(8, 10), "4", "no layer of a subclass matches '4'; there are 0, Named"),
        (Named(3, 8, 3), nn.Linear(8, 10), "Namd", "Did you mean 'Named'?"),
        (nn.Conv2d(3, 8, 3), nn.Linear(8, 10), "4", "the model has none"),
    ],
)
def test_layers_that_are_no_such_ones_are_refused(
    conv: nn.Module, linear: nn.Module, entry: str, message: str
) -> None:
    with pytest.raises(DecompositionError, match=message):
        plain_layers(network(conv, linear), [entry], IMAGES)


def test_layer_that_is_never_called_is_refused() -> None:
    model = network(Named(3, 8, 3), nn.Linear(8, 10))
    model.add_module("spare", nn.ModuleList([Commented(3, 3)]))
    model.forward = lambda x: model[4](model[3](model[2](model[0](x))))  # type: ignore[index, method-assign, assignment]
    with pytest.raises(DecompositionError, match=r"'spare.0', a Commented, is not called"):
        plain_layers(model, ["spare.*"], IMAGES)


def test_only_some_layers_change(small_net: nn.Module) -> None:
    specs = inspect_layers(small_net, IMAGES)
    names = [spec.name for spec in specs]
    refused = {spec.name: spec.refusal for spec in skipping(specs, [names[0]], names[:2])}
    assert "as asked (skip)" in (refused[names[0]] or "")
    assert refused[names[1]] is None
    assert "others alone may change (only)" in (refused[names[2]] or "")
    assert skipping(specs, []) == list(specs)
    plan = plan_by_heuristic(small_net, IMAGES, "tucker", "uniform", 0.9, only=[names[1]])
    assert [layer.name for layer in plan if layer.operations] == [names[1]]
    with pytest.raises(DecompositionError, match="only: no layer matches 'head'"):
        skipping(specs, [], ["head"])
