"""Residual blocks: which there are, what a network computes without them, and which go first."""

from collections.abc import Callable

import pytest
import torch
import torchvision
from torch import nn

from pruning import PruningError, get_pruner, remove_blocks, require_blocks_suffice, residual_blocks
from rankrl.models import create_model

Build = Callable[[str], nn.Module]


def parameters(network: nn.Module) -> float:
    return float(sum(each.numel() for each in network.parameters()))


class Block(nn.Module):
    """A block whose output is made of its input `x` and of what a layer makes of it, in the way of `how`."""

    def __init__(self, how: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 3, padding=1)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.how(x, self.layer(x))


@pytest.mark.parametrize("option", ["resnet_option_a", "resnet_option_b"])
def test_the_blocks_of_a_resnet_that_keep_the_shape_can_be_removed(
    option: str, build: Build, images: torch.Tensor
) -> None:
    found = residual_blocks(build(option), images)
    assert [block.name for block in found] == ["layer1.0", "layer1.1", "layer2.1", "layer3.1"]
    assert found[0].layers == ("layer1.0.conv1", "layer1.0.bn1", "layer1.0.conv2", "layer1.0.bn2")


@pytest.mark.slow
def test_networks_of_torchvision() -> None:
    inputs = torch.randn(1, 3, 64, 64)
    resnet = torchvision.models.resnet18()
    assert [block.name for block in residual_blocks(resnet, inputs)] == [
        *("layer1.0", "layer1.1", "layer2.1", "layer3.1", "layer4.1")
    ]
    mobile = torchvision.models.mobilenet_v2()
    assert len(residual_blocks(mobile, inputs)) == sum(
        getattr(each, "use_res_connect", False) for each in mobile.modules()
    )
    assert residual_blocks(torchvision.models.vgg11(), inputs) == []


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (lambda x, y: x + y, True),
        (lambda x, y: y + x, True),
        (lambda x, y: torch.relu(torch.add(y, x)), True),
        (lambda x, y: y.add_(x), True),
        (lambda x, y: y + 1.0, False),
        (lambda x, y: x * y, False),
        (lambda x, y: torch.sigmoid(x + y), False),
        (lambda x, y: (x + y) * 2.0, False),
    ],
)
def test_a_block_adds_its_input_to_its_output(
    how: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], expected: bool
) -> None:
    network = nn.Sequential(Block(how), nn.Flatten())
    found = residual_blocks(network, torch.rand(2, 3, 4, 4))
    assert [block.name for block in found] == (["0"] if expected else [])


def test_without_a_block_a_network_computes_what_it_does_when_the_block_adds_nothing(
    build: Build, images: torch.Tensor
) -> None:
    network = build("resnet_option_a").eval()
    smaller = remove_blocks(network, ["layer1.1", "layer3.1"])
    assert not any(name.startswith(("layer1.1.", "layer3.1.")) for name in smaller.state_dict())
    for name in ("layer1.1", "layer3.1"):
        norm = network.get_submodule(name).bn2
        nn.init.zeros_(norm.weight)
        nn.init.zeros_(norm.bias)
    with torch.no_grad():
        torch.testing.assert_close(smaller(images), network(images))


def test_the_block_that_adds_least_goes_first(build: Build, images: torch.Tensor) -> None:
    network = build("resnet_option_a").eval()
    norm = network.get_submodule("layer2.1").bn2
    nn.init.constant_(norm.weight, 1e-3)
    nn.init.zeros_(norm.bias)
    blocks = residual_blocks(network, images)
    before = {key: value.clone() for key, value in network.state_dict().items()}
    choose = get_pruner("blocks").definition
    for fraction in (0.95, 0.6):
        gone = choose(network, blocks, images, parameters, fraction)
        assert gone[0] == "layer2.1"
        assert len(set(gone)) == len(gone)
        assert parameters(remove_blocks(network, gone)) <= fraction * parameters(network)
        assert parameters(remove_blocks(network, gone[:-1])) > fraction * parameters(network)
        assert gone == choose(network, blocks, images, parameters, fraction)
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())


def test_a_block_that_saves_nothing_stays(build: Build, images: torch.Tensor) -> None:
    network = build("resnet_option_a")

    def convolutions(model: nn.Module) -> float:
        layers = [each for each in model.modules() if isinstance(each, nn.Conv2d)]
        return float(sum(each.weight.numel() for each in layers if each.out_channels > 4))

    gone = get_pruner("blocks").definition(
        network, residual_blocks(network, images), images, convolutions, 0.6
    )
    assert gone
    assert not any(name.startswith("layer1") for name in gone)


def test_what_cannot_be_removed_is_refused(build: Build, images: torch.Tensor) -> None:
    network = build("resnet_option_a")
    blocks = residual_blocks(network, images)
    with pytest.raises(PruningError, match="needs calibration inputs"):
        get_pruner("blocks").definition(network, blocks, images[:0], parameters, 0.9)
    with pytest.raises(PruningError, match="without its 4 removable blocks the network still has"):
        require_blocks_suffice(network, blocks, parameters, 0.1)
    with pytest.raises(PruningError, match="no residual block that can be removed"):
        require_blocks_suffice(build("plain_chain"), [], parameters, 0.9)


def test_a_block_that_is_called_with_more_than_its_input_stays(images: torch.Tensor) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return x + scale * self.layer(x)

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain, self.scaled = Scaled(), Scaled()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scaled(self.plain(x), scale=0.5)

    assert [block.name for block in residual_blocks(Network().eval(), images)] == ["plain"]


def test_a_cifar_resnet_has_a_block_less_in_two_stages() -> None:
    network = create_model("resnet20", input_shape=(3, 32, 32), num_classes=10)
    found = [block.name for block in residual_blocks(network, torch.randn(2, 3, 32, 32))]
    assert found == [f"layer1.{j}" for j in range(3)] + [f"layer{s}.{j}" for s in (2, 3) for j in (1, 2)]
