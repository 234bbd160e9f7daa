"""Networks in integers are traced by `torch.export`, rounded where they are when they run."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from decomposition import (
    DecompositionError,
    Quantise,
    apply_plan,
    load_compressed,
    make_plan,
    save_compressed,
    without_rounding,
)


class Residual(nn.Module):
    """A block whose sum is of integers, behind batch norms and activations of every spelling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.first, self.act = nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(inplace=True)
        self.second, self.head = nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = F.relu(self.norm(self.stem(x)))
        y = self.second(self.act(self.first(x)))
        x = (y + x).relu()
        return {"scores": self.head(F.adaptive_avg_pool2d(x, 1).flatten(1)), "map": self.second(x)}


@pytest.fixture(scope="module")
def network() -> nn.Module:
    torch.manual_seed(0)
    dense, x = Residual().eval(), torch.randn(40, 3, 8, 8)
    plan = make_plan(dense, x, "tucker", {"first": 6})
    layers = tuple(replace(e, operations=(*e.operations, Quantise()), reason=None) for e in plan.layers)
    return apply_plan(dense, replace(plan, layers=layers), x)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_network_computes_what_the_network_does(network: nn.Module, strict: bool) -> None:
    x = torch.randn(5, 3, 8, 8)
    free = ({0: torch.export.Dim("batch")},)
    with torch.no_grad():
        program = torch.export.export(network, (x[:2],), dynamic_shapes=free, strict=strict)
        found, expected = program.module()(x), network(x)
        plain = without_rounding(copy.deepcopy(network))(x)
    for name, output in expected.items():
        torch.testing.assert_close(found[name], output + 0.0, rtol=0, atol=1e-6)
        assert type(found[name]) is torch.Tensor
        assert (found[name] - plain[name]).abs().max() > 1e-4


def test_a_loaded_network_is_exported_and_one_inside_of_another(network: nn.Module, tmp_path: Path) -> None:
    x = torch.randn(2, 3, 8, 8)
    dense = Residual().eval()
    plan = make_plan(dense, x, "tucker", {"first": 6})
    layers = tuple(replace(e, operations=(*e.operations, Quantise()), reason=None) for e in plan.layers)
    plan = replace(plan, layers=layers)
    save_compressed(network, plan, tmp_path / "small.safetensors", dense=dense)
    loaded = load_compressed(dense, tmp_path / "small.safetensors")[0].eval()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = loaded

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)["scores"].softmax(1)

    with torch.no_grad():
        found = torch.export.export(Outer(), (x,)).module()(x)
    torch.testing.assert_close(found, network(x)["scores"].softmax(1).detach(), rtol=0, atol=1e-6)


def test_a_part_that_cannot_know_where_it_is_rounded_is_refused(network: nn.Module) -> None:
    with pytest.raises(DecompositionError, match="takes the whole network that apply_plan returned"):
        torch.export.export(network.stem, (torch.randn(2, 3, 8, 8),), strict=False)  # type: ignore[arg-type]
    assert without_rounding(copy.deepcopy(network))._forward_hooks == {}
    torch.export.export(network, (torch.randn(2, 3, 8, 8),), strict=False)
