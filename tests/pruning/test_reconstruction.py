"""The criterion that asks what the other channels make up for."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from pruning import PruningError, channel_groups, get_pruner, removable_groups

Build = Callable[[str], nn.Module]


def scores_of(network: nn.Module, images: torch.Tensor, seed: int = 0) -> dict[str, torch.Tensor]:
    groups = removable_groups(channel_groups(network, images[:2]))
    generator = torch.Generator().manual_seed(seed)
    scores: dict[str, torch.Tensor] = get_pruner("reconstruction").definition(
        network, groups, images, generator
    )
    return scores


def hidden(units: int, outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, units), nn.Tanh(), nn.Linear(units, outputs))


def test_what_another_channel_repeats_costs_nothing_once() -> None:
    network = hidden(5)
    with torch.no_grad():
        network[0].weight[3], network[0].bias[3] = network[0].weight[1], network[0].bias[1]
    scores = scores_of(network, torch.randn(500, 6))["0"]
    first, second = sorted((float(scores[1]), float(scores[3])))
    others = float(scores[[0, 2, 4]].min())
    assert first < 0.02 * others
    assert second > 10 * first


def test_what_is_constant_or_never_read_costs_nothing() -> None:
    network = hidden(5)
    with torch.no_grad():
        network[0].weight[2] = 0
        network[2].weight[:, 4] = 0
    scores = scores_of(network, torch.randn(500, 6))["0"]
    # The ridge stands for what a finite sample cannot tell.
    assert scores[[2, 4]].max() < 0.01 * scores[[0, 1, 3]].min()


def test_scores_do_not_depend_on_how_far_from_zero_the_units_are() -> None:
    network = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    images, scores = torch.randn(500, 6), []
    for far in (30.0, 3000.0):  # no unit is ever cut off
        with torch.no_grad():
            network[0].bias.fill_(far)
        scores.append(scores_of(network, images)["0"])
    torch.testing.assert_close(scores[1], scores[0], rtol=0.01, atol=0.0)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_scores_are_the_errors_of_the_best_combinations_of_what_stays(seed: int) -> None:
    """With one linear output the change is w'e; every step is checked by solving for the combination anew."""
    network = hidden(6, outputs=1)
    torch.manual_seed(seed)
    images = torch.randn(300, 6) @ torch.randn(6, 6)
    features = network[:2](images).detach().double()
    covariance = torch.cov(features.T, correction=0)
    covariance += 1e-3 * covariance.diagonal().mean() * torch.eye(6, dtype=torch.float64)
    weight = network[2].weight.detach().double()[0]

    def error(staying: list[int]) -> float:
        gone = [unit for unit in range(6) if unit not in staying]
        combination = torch.linalg.solve(
            covariance[staying][:, staying], covariance[staying][:, gone]
        )  # empty when nothing stays
        rest = covariance[gone][:, gone] - covariance[gone][:, staying] @ combination
        return float(weight[gone] @ rest @ weight[gone])

    staying, expected, spent = list(range(6)), torch.zeros(6, dtype=torch.float64), 0.0
    while staying:
        errors = {unit: error([other for other in staying if other != unit]) for unit in staying}
        unit = min(errors, key=errors.__getitem__)
        expected[unit] = max(float(expected.max()), errors[unit] - spent)
        spent = errors[unit]
        staying.remove(unit)
    found = scores_of(network, images, seed)["0"]
    # The random directions of one output give its weights a common factor.
    torch.testing.assert_close(found / found.max(), expected / expected.max(), rtol=1e-4, atol=1e-9)


def test_every_position_of_a_flattened_channel_counts(build: Build, images: torch.Tensor) -> None:
    network = build("plain_chain")
    with torch.no_grad():
        network.dense1.weight[:, 9:18] = 0  # all that reads the second channel of conv2, 3 x 3 positions
    scores = scores_of(network, torch.randn(64, *images.shape[1:]))["conv2"]
    assert scores.argmin() == 1
    assert float(scores[1]) < 1e-9 * float(scores.sort().values[1])


def test_a_stream_counts_all_that_read_it() -> None:
    """Equal heads that read the same channels make equal errors, and these add up."""

    class Branches(nn.Module):
        def __init__(self, branches: int) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first = nn.Linear(6, 4)
            heads = nn.Linear(4, 3)
            self.heads = nn.ModuleList(nn.Linear(4, 3) for _ in range(branches))
            for head in self.heads:
                head.load_state_dict(heads.state_dict())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            read = torch.tanh(self.first(x))
            return torch.stack([head(read) for head in self.heads]).sum(0)

    images = torch.randn(300, 6)
    one, three = scores_of(Branches(1), images)["first"], scores_of(Branches(3), images)["first"]
    torch.testing.assert_close(three, 3**2 * one)


def test_what_it_cannot_do_is_said(build: Build, images: torch.Tensor) -> None:
    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.relu(self.first(x))).sign().detach()

    with pytest.raises(PruningError, match="no gradient can be sent back through Detached"):
        scores_of(Detached(), torch.randn(8, 6))
    network = build("plain_chain")
    groups = removable_groups(channel_groups(network, images))
    for calibration in (None, images[:0]):
        with pytest.raises(PruningError, match="needs calibration inputs"):
            get_pruner("reconstruction").definition(network, groups, calibration, None)


def test_the_network_is_left_as_it_was(build: Build, images: torch.Tensor) -> None:
    network = build("resnet_option_b").train()
    network.conv1.weight.requires_grad_(False)
    network.linear.weight.grad = torch.ones_like(network.linear.weight)
    before = {name: parameter.requires_grad for name, parameter in network.named_parameters()}
    scores_of(network, images)
    assert {name: parameter.requires_grad for name, parameter in network.named_parameters()} == before
    assert torch.equal(network.linear.weight.grad, torch.ones_like(network.linear.weight))
    assert network.training
    assert not network.conv1._forward_pre_hooks
