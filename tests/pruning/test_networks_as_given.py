"""Networks that are wrapped, scripted, or change what they are given."""

import logging
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from pruning import (
    GroupLassoMask,
    MaskedNetwork,
    PruningError,
    channel_groups,
    get_pruner,
    keep_share,
    kept_inputs,
    remove_blocks,
    remove_channels,
    residual_blocks,
    untrained_copy,
)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class Normalising(nn.Module):
    """Normalises its input in place, before anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = plain()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.sub_(0.5).div_(0.25))


def plain() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), Residual(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    ).eval()


@pytest.fixture
def images() -> torch.Tensor:
    return torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def twice_wrapped(network: nn.Module) -> nn.Module:
    return torch.compile(AveragedModel(network), backend="eager")


@pytest.mark.parametrize(
    "wrap",
    [nn.DataParallel, AveragedModel, lambda network: torch.compile(network, backend="eager"), twice_wrapped],
)
def test_wrapped_networks_are_unwrapped_with_a_word(
    wrap: Callable[[nn.Module], nn.Module], images: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    network = plain()
    wrapped = wrap(network).eval()
    with caplog.at_level(logging.INFO, "pruning"):
        groups = channel_groups(wrapped, images)
    assert f"the network inside the {type(wrapped).__name__} is taken" in caplog.text
    assert groups == channel_groups(network, images)
    for name in ("magnitude", "apoz", "reconstruction"):
        criterion = get_pruner(name).definition
        theirs, ours = (
            criterion(each, groups[:1], images, torch.manual_seed(0)) for each in (wrapped, network)
        )
        assert torch.equal(theirs["0"], ours["0"])
    kept = keep_share(groups[:1], theirs, 0.5)
    smaller = remove_channels(wrapped, kept, images)
    assert type(smaller) is nn.Sequential
    torch.testing.assert_close(smaller(images), remove_channels(network, kept, images)(images))
    assert kept_inputs(wrapped, kept, images).keys() == {"2.inner", "5"}
    assert [block.name for block in residual_blocks(wrapped, images)] == ["2"]
    assert type(remove_blocks(wrapped, ["2"])) is type(untrained_copy(wrapped)) is nn.Sequential
    torch.testing.assert_close(MaskedNetwork(wrapped, images, GroupLassoMask)(images), network(images))


def test_a_compiled_part_is_followed(images: torch.Tensor) -> None:
    network = plain()
    network[2] = torch.compile(network[2], backend="eager")
    assert [g.obstacle for g in channel_groups(network, images)] == [
        None,
        "its channels are the network's output",
    ]


def scripted(network: nn.Module, images: torch.Tensor) -> nn.Module:
    return torch.jit.script(network)


def traced(network: nn.Module, images: torch.Tensor) -> nn.Module:
    return torch.jit.trace(network, images)


def exported(network: nn.Module, images: torch.Tensor) -> nn.Module:
    return torch.export.export(network, (images,)).module()


def partly_scripted(network: nn.Module, images: torch.Tensor) -> nn.Module:
    return nn.Sequential(torch.jit.script(network[:3]), *network[3:])


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (scripted, r"the network is a scripted .*torch\.jit"),
        (traced, r"the network is a traced module .*torch\.jit\.trace"),
        (exported, r"the network is an exported module .*torch\.export"),
        (partly_scripted, r"0 is a scripted"),
    ],
)
def test_networks_without_layers_are_refused_with_the_remedy(
    make: Callable[[nn.Module, torch.Tensor], nn.Module], kind: str, images: torch.Tensor
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network = make(plain(), images)
    for act in (
        channel_groups,
        residual_blocks,
        lambda n, x: remove_channels(n, {}, x),
        lambda n, x: untrained_copy(n),
    ):
        with pytest.raises(PruningError, match=f"{kind}.*prune the nn.Module that it was made from"):
            act(network, images)


class Recorded(torch.Tensor):
    """A tensor subclass, as datasets hand them out."""


@pytest.mark.parametrize("kind", [torch.Tensor, Recorded])
def test_inputs_stay_as_they_are(kind: type[torch.Tensor], images: torch.Tensor) -> None:
    network, given = Normalising().eval(), images.clone().as_subclass(kind)
    version = given._version
    groups = channel_groups(network, given)
    for name in ("apoz", "reconstruction"):
        get_pruner(name).definition(network, groups[:1], given, None)
    blocks = residual_blocks(network, given)
    get_pruner("blocks").definition(
        network, blocks, given, lambda n: float(sum(p.numel() for p in n.parameters())), 0.9
    )
    masked = MaskedNetwork(network, given, GroupLassoMask)
    assert type(masked(given)) is torch.Tensor
    assert type(masked.removed()(images.clone())) is torch.Tensor
    assert given._version == version
    assert torch.equal(given.as_subclass(torch.Tensor), images)
