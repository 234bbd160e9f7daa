"""Small networks of every shape that channel pruning must understand."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pruning import ChannelGroup, channel_groups, removable_groups


class LambdaLayer(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class BasicBlock(nn.Module):
    """The block of the classic CIFAR ResNet implementation, with shortcuts of type A or B."""

    def __init__(self, in_planes: int, planes: int, stride: int, option: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.shortcut: nn.Module = nn.Sequential()
        if stride != 1 or in_planes != planes:
            if option == "A":
                self.shortcut = LambdaLayer(
                    lambda x: F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, planes // 4, planes // 4), "constant", 0)
                )
            else:
                self.shortcut = nn.Sequential(
                    nn.Conv2d(in_planes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes)
                )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class CifarResNet(nn.Module):
    def __init__(self, option: str = "A", blocks: int = 2, width: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        planes = width
        for stage in range(3):
            layers = []
            for block in range(blocks):
                out = width * 2**stage
                layers.append(BasicBlock(planes, out, 2 if stage and not block else 1, option))
                planes = out
            setattr(self, f"layer{stage + 1}", nn.Sequential(*layers))
        self.linear = nn.Linear(planes, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.layer3(self.layer2(self.layer1(out)))
        out = F.avg_pool2d(out, out.size()[3])
        return self.linear(out.view(out.size(0), -1))


class DenseLayer(nn.Module):
    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(channels)
        self.conv = nn.Conv2d(channels, growth, 3, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.conv(F.relu(self.bn(x)))], 1)


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Conv2d(3, 8, 3, padding=1)
        self.squeeze = nn.Conv2d(8, 4, 1)
        self.excite = nn.Conv2d(4, 8, 1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.silu(self.expand(x))
        scale = torch.sigmoid(self.excite(F.relu(self.squeeze(x.mean((2, 3), keepdim=True)))))
        return self.head((x * scale).mean([2, 3]))


class DoubledStream(nn.Module):
    """Concatenates a stream with a silent copy of itself, another parameter-free shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1)
        self.conv2 = nn.Conv2d(4, 8, 3, padding=1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv1(x)
        return self.head((self.conv2(F.relu(x)) + torch.cat((x, x.mul(0)), dim=1)).mean((2, 3)))


class ShuffleBlock(nn.Module):
    """Splits its channels, works on one half and shuffles both, with sizes read from shapes."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels // 2, channels // 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *rest = list(x.chunk(2, 1))
        y = torch.cat([first, F.relu(self.conv(rest[0]))], 1)
        n, c = y.size(0), y.size(1)
        return y.view(n, 2, c // 2, *y.shape[2:]).transpose(1, 2).reshape(n, -1, *y.shape[2:])


class NormedBlock(nn.Module):
    """A residual bottleneck with group norms and a grouped convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(channels, 6, 1, bias=False)
        self.norm1 = nn.GroupNorm(3, 6)
        self.conv = nn.Conv2d(6, 12, 3, padding=1, groups=3)
        self.norm2 = nn.GroupNorm(6, 12)
        self.expand = nn.Conv2d(12, channels, 1)
        self.norm3 = nn.GroupNorm(4, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm2(self.conv(F.relu(self.norm1(self.reduce(x))))))
        return F.relu(x + self.norm3(self.expand(y)))


class UNet(nn.Module):
    """Encoder and decoder with a concatenation between them."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.InstanceNorm2d(6, affine=True)
        self.bottom = nn.Conv2d(6, 8, 3, padding=1)
        self.act = nn.PReLU(8)
        self.up = nn.Conv2d(14, 5, 3, padding=1)
        self.out = nn.Conv2d(5, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = F.gelu(self.norm(self.down(x)))
        deep = self.act(self.bottom(F.max_pool2d(skip, 2)))
        deep = F.interpolate(deep, size=skip.shape[-2:], mode="bilinear")
        return self.out(F.relu(self.up(torch.cat((deep, skip), dim=1)))).mean((2, 3))


class InvertedBottleneck(nn.Module):
    """The block of ConvNeXt with a norm that keeps channels apart, and its scale of each channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.norm = nn.BatchNorm2d(channels)
        self.expand = nn.Linear(channels, 10)
        self.contract = nn.Linear(10, channels)
        self.scale = nn.Parameter(torch.rand(channels, 1, 1) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.depthwise(x)).permute(0, 2, 3, 1)
        y = self.contract(F.gelu(self.expand(y)))
        return x + self.scale * y.permute(0, 3, 1, 2)


class ChannelNorm(nn.LayerNorm):
    """A layer norm over axis 1, as torchvision's ConvNeXt has it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.layer_norm(x.movedim(1, -1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.movedim(-1, 1)


class Tokens(nn.Module):
    """Tokens in a residual stream with norms over the channels: of the stream, and of an MLP's inside."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, 4)
        self.stem_norm = ChannelNorm(8)
        self.norm = nn.LayerNorm(8, eps=0.1)
        self.expand = nn.Linear(8, 12)
        self.inner = nn.RMSNorm(12)
        self.contract = nn.Linear(12, 8)
        self.last = nn.LayerNorm(8, elementwise_affine=False)
        self.head = nn.Linear(8, 5)
        for norm in (self.stem_norm, self.norm, self.inner):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(self.norm.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem_norm(self.stem(x)).flatten(2).transpose(1, 2)
        x = x + self.contract(F.gelu(self.inner(self.expand(self.norm(x)))))
        return self.head(self.last(x).mean(1))


def classifier(channels: int, block: nn.Module) -> nn.Module:
    return nn.Sequential(
        OrderedDict(
            stem=nn.Conv2d(3, channels, 3, padding=1),
            block=block,
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            head=nn.Linear(channels, 5),
        )
    )


def plain_chain() -> nn.Module:
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(3, 6, 3, padding=1),
            bn1=nn.BatchNorm2d(6),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(6, 8, 3, bias=False),
            bn2=nn.BatchNorm2d(8, affine=False),
            relu2=nn.ReLU(),
            pool2=nn.AvgPool2d(2),
            flatten=nn.Flatten(),
            dropout=nn.Dropout(0.5),
            dense1=nn.Linear(8 * 3 * 3, 10),
            relu3=nn.ReLU(),
            dense2=nn.Linear(10, 5),
        )
    )


def depthwise() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 1),
        nn.ReLU6(),
        nn.Conv2d(6, 12, 3, padding=1, groups=6),
        nn.BatchNorm2d(12),
        nn.ReLU6(),
        nn.Conv2d(12, 7, 1),
        nn.BatchNorm2d(7),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(7, 5),
    )


def densenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1),
        DenseLayer(5, 4),
        DenseLayer(9, 3),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.MaxPool2d(4),
        nn.Flatten(),
        nn.Linear(12 * 16, 5),
    )


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "plain_chain": plain_chain,
    "resnet_option_a": lambda: CifarResNet("A"),
    "resnet_option_b": lambda: CifarResNet("B"),
    "densenet": densenet,
    "depthwise": depthwise,
    "squeeze_excite": SqueezeExcite,
    "doubled_stream": DoubledStream,
    "shuffle": lambda: classifier(12, ShuffleBlock(12)),
    "group_norm": lambda: classifier(8, NormedBlock(8)),
    "unet": UNet,
    "tokens": Tokens,
    "inverted_bottleneck": lambda: classifier(6, InvertedBottleneck(6)),
}


def randomised(network: nn.Module, seed: int = 0) -> nn.Module:
    """Give batch norms statistics and parameters that do not leave a silent channel silent by themselves."""
    generator = torch.Generator().manual_seed(seed)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.5, generator=generator)
            module.running_var.uniform_(0.5, 2, generator=generator)
            if module.affine:
                module.weight.data.uniform_(0.5, 1.5, generator=generator)
                module.bias.data.normal_(0, 0.5, generator=generator)
    return network.eval()


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return randomised(NETWORKS[name]())


def some_images() -> torch.Tensor:
    return torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))


@cache
def groups_of(name: str) -> tuple[ChannelGroup, ...]:
    return tuple(removable_groups(channel_groups(built(name), some_images())))


@pytest.fixture
def build() -> Callable[[str], nn.Module]:
    """Build one of the networks by name, in evaluation mode, with batch norms that are not trivial."""
    return built


@pytest.fixture(params=sorted(NETWORKS))
def network_name(request: pytest.FixtureRequest) -> str:
    """The name of every network in turn."""
    name: str = request.param
    return name


@pytest.fixture
def network(network_name: str) -> nn.Module:
    return built(network_name)


@pytest.fixture
def groups(network_name: str) -> Sequence[ChannelGroup]:
    return groups_of(network_name)


@pytest.fixture
def images() -> torch.Tensor:
    """A batch of inputs that all of them accept."""
    return some_images()
