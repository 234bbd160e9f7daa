"""Copies of networks that keep what they computed, by every library that copies networks."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from decomposition.network.surgery import copied
from pruning.copies import copied as copied_to_prune

COPIES = [copied, copied_to_prune]
KEPT: dict[str, Any] = {}


@dataclass
class Record:
    """A hook with a state of its own."""

    seen: list[torch.Tensor] = field(default_factory=list)

    def __call__(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self.seen.append(output)


def _in_a_list(network: nn.Sequential) -> Callable[[nn.Sequential], torch.Tensor]:
    network.features = []
    network.register_forward_hook(lambda module, _, output: module.features.append(output))
    return lambda copy: copy.features[0]


def _deep_inside(network: nn.Sequential) -> Callable[[nn.Sequential], torch.Tensor]:
    network.kept = {"features": [(0, Record())]}
    network[1].register_forward_hook(
        lambda module, _, output: network.kept["features"][0][1].seen.append(output)
    )
    return lambda copy: copy.kept["features"][0][1].seen[0]


def _in_a_hook(network: nn.Sequential) -> Callable[[nn.Sequential], torch.Tensor]:
    network[0].register_forward_hook(Record())
    return lambda copy: next(iter(copy[0]._forward_hooks.values())).seen[0]


def _old_weight_norm(network: nn.Sequential) -> Callable[[nn.Sequential], torch.Tensor]:
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(network[0])
    return lambda copy: copy[0].weight


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("keep", [_in_a_list, _deep_inside, _in_a_hook, _old_weight_norm])
def test_what_a_forward_computed_is_copied_by_value(
    copy: Callable[[nn.Module], nn.Module],
    keep: Callable[[nn.Sequential], Callable[[nn.Module], torch.Tensor]],
) -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    kept = keep(network)
    x = torch.randn(2, 3, 6, 6)
    y = network(x)
    twin = copy(network)
    assert not kept(network).is_leaf
    assert kept(twin).is_leaf
    assert kept(twin).data_ptr() != kept(network).data_ptr()
    torch.testing.assert_close(kept(twin), kept(network).detach(), rtol=0, atol=0)
    torch.testing.assert_close(twin(x), y, rtol=0, atol=0)
    twin(x).sum().backward()
    assert all(parameter.grad is None for parameter in network.parameters())


@pytest.mark.parametrize("copy", COPIES)
def test_tensors_stay_shared_inside_a_copy(copy: Callable[[nn.Module], nn.Module]) -> None:
    network = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    network[1].weight = network[0].weight
    network.kept = [network(torch.randn(1, 3))]
    network.again = network.kept[0]
    twin: Any = copy(network)
    assert twin[0].weight is twin[1].weight
    assert twin.again is twin.kept[0]


@pytest.mark.parametrize("copy", COPIES)
def test_hooks_that_are_functions_go_on_writing_where_they_wrote(
    copy: Callable[[nn.Module], nn.Module],
) -> None:
    network = nn.Sequential(nn.Linear(3, 2))
    network[0].register_forward_hook(lambda module, _, output: KEPT.update(last=output))
    network(torch.randn(1, 3))
    copy(network)(torch.zeros(5, 3))
    assert len(KEPT["last"]) == 5


@pytest.mark.parametrize("copy", COPIES)
def test_an_attribute_that_cannot_be_copied_is_named(copy: Callable[[nn.Module], nn.Module]) -> None:
    network = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    network[1].lock = threading.Lock()
    with pytest.raises(ValueError, match=r"layer '1' holds 'lock', a lock .*__getstate__"):
        copy(network)
