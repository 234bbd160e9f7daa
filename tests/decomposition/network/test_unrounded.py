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
    CompressionPlan,
    DecompositionError,
    Quantise,
    apply_plan,
    load_compressed,
    make_plan,
    save_compressed,
    without_rounding,
)
from decomposition.network.rounding import marked, settled, taken


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


class Sum(nn.Module):
    """The shortest network with a sum of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = torch.relu(self.first(x))
        return {"map": self.second(x) + x}


def in_integers(dense: nn.Module, x: torch.Tensor, ranks: dict[str, int]) -> CompressionPlan:
    plan = make_plan(dense, x, "tucker", ranks)
    layers = tuple(replace(e, operations=(*e.operations, Quantise()), reason=None) for e in plan.layers)
    return replace(plan, layers=layers)


@pytest.fixture(scope="module")
def network() -> nn.Module:
    torch.manual_seed(0)
    dense, x = Residual().eval(), torch.randn(40, 3, 8, 8)
    return apply_plan(dense, in_integers(dense, x, {"first": 6}), x)


@pytest.fixture(scope="module")
def small() -> nn.Module:
    torch.manual_seed(0)
    dense, x = Sum().eval(), torch.randn(8, 3, 8, 8)
    return apply_plan(dense, in_integers(dense, x, {}), x)


@pytest.mark.parametrize(
    ("name", "strict"),
    [("network", False), ("small", True), pytest.param("network", True, marks=pytest.mark.slow)],
)
def test_an_exported_network_computes_what_the_network_does(
    request: pytest.FixtureRequest, name: str, strict: bool
) -> None:
    network: nn.Module = request.getfixturevalue(name)
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
    plan = in_integers(dense, x, {"first": 6})
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


def test_a_part_that_cannot_know_where_it_is_rounded_is_refused(small: nn.Module) -> None:
    with pytest.raises(DecompositionError, match="takes the whole network that apply_plan returned"):
        torch.export.export(small.first, (torch.randn(2, 3, 8, 8),), strict=False)  # type: ignore[arg-type]
    assert without_rounding(copy.deepcopy(small))._forward_hooks == {}
    torch.export.export(small, (torch.randn(2, 3, 8, 8),), strict=False)


def test_a_sum_of_integers_is_rounded_in_the_range_of_the_layer_that_takes_it_first() -> None:
    summands = [marked(torch.tensor([0.3]), lambda x, _: x.clone()) for _ in range(2)]
    total = summands[0] + summands[1]
    assert settled(total).item() == pytest.approx(0.6)  # nothing has taken it yet
    for where in (lambda x, _: x.ceil(), lambda x, _: x.floor()):
        assert type(taken(total, where)) is torch.Tensor
    assert settled(total).item() == 1
