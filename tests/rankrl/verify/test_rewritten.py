"""A network that would be compressed as another one than it is, is refused before the search."""

from __future__ import annotations

import copy

import pytest
import torch
from several_inputs import TwoInputs
from torch import Tensor, nn

from decomposition import DecompositionError
from rankrl.verify.fidelity import check_rewritten

IMAGES = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1))
NUMBERS = torch.randn(6, 5, generator=torch.Generator().manual_seed(2))


class Amplifier(nn.Module):
    """What depends on digits far behind the point."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(1e5 * x)


class Noisy(nn.Module):
    """A network whose outputs are different every time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y + torch.randn_like(y)


def test_the_same_network_passes() -> None:
    torch.manual_seed(0)
    model = TwoInputs().train()
    check_rewritten(model, copy.deepcopy(model), (IMAGES, NUMBERS))
    assert model.training


class Turned(nn.Module):
    """A network whose first axis counts no inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x)
        return y.T, y.mean()


def test_outputs_need_not_count_inputs_on_their_first_axis() -> None:
    torch.manual_seed(0)
    model = Turned()
    check_rewritten(model, copy.deepcopy(model), NUMBERS)
    wrong = copy.deepcopy(model)
    with torch.no_grad():
        wrong.layer.weight[0] *= 1.1
    with pytest.raises(DecompositionError, match="'layer'"):
        check_rewritten(model, wrong, NUMBERS)


def test_what_amplifies_rounding_is_no_departure() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), Amplifier()).double()
    nearly = copy.deepcopy(model)
    with torch.no_grad():
        nearly[0].weight *= 1 + 1e-7
    inputs = NUMBERS.double()
    change = model(inputs) - nearly(inputs)
    assert change.norm() > 1e-3 * model(inputs).norm()
    check_rewritten(model, nearly, inputs)


def test_noise_of_its_own_is_no_departure() -> None:
    model = Noisy().eval()
    check_rewritten(model, copy.deepcopy(model), NUMBERS)


def test_a_copy_that_computes_something_else_is_refused_by_its_layer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 4)).eval()
    wrong = copy.deepcopy(model)
    with torch.no_grad():
        wrong[2].bias[0] += 0.1
    with pytest.raises(DecompositionError, match=r"Sequential would be .*first of all that of the layer '2'"):
        check_rewritten(model, wrong, NUMBERS)
    assert not any(each._forward_hooks for each in (*model.modules(), *wrong.modules()))
