"""Build networks by name: small ones, users' own and torchvision's; register the name of ONNX files."""

from __future__ import annotations

import difflib
import importlib
import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from rankrl.errors import ConfigError, ModelError, RankrlError, did_you_mean
from rankrl.models.classifiers import register_model


class Conv4(nn.Module):
    """conv, conv, pool, conv, conv, pool, flatten, dropout 0.5, dense, dense, with ReLU between.

    The widths 64, 64, 128, 128 are those of Conv-4 in Frankle & Carbin 2019, figure 2.

    Args:
        input_shape: (channels, height, width); at least 4 pixels high and wide.
        num_classes: Number of classes.
    """

    def __init__(self, input_shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__()
        channels, height, width = input_shape
        if min(height, width) < 4:
            raise ModelError(f"conv4 needs images of at least 4x4 pixels, got {height}x{width}")
        self.conv1 = nn.Conv2d(channels, 64, 3, padding=1)
        self.conv2 = nn.Conv2d(64, 64, 3, padding=1)
        self.conv3 = nn.Conv2d(64, 128, 3, padding=1)
        self.conv4 = nn.Conv2d(128, 128, 3, padding=1)
        self.relu1, self.relu2, self.relu3 = nn.ReLU(), nn.ReLU(), nn.ReLU()
        self.relu4, self.relu5 = nn.ReLU(), nn.ReLU()
        self.pool1, self.pool2 = nn.MaxPool2d(2), nn.MaxPool2d(2)
        self.flatten = nn.Flatten()
        self.dropout = nn.Dropout(0.5)
        self.fc1 = nn.Linear(128 * (height // 4) * (width // 4), 256)
        self.fc2 = nn.Linear(256, num_classes)

    def forward(self, input: Tensor) -> Tensor:
        """Map images (N, C, H, W) to class scores (N, num_classes)."""
        x = self.pool1(self.relu2(self.conv2(self.relu1(self.conv1(input)))))
        x = self.pool2(self.relu4(self.conv4(self.relu3(self.conv3(x)))))
        x = self.dropout(self.flatten(x))
        return self.fc2(self.relu5(self.fc1(x)))


@register_model(
    "conv4", "four 3x3 convolutions, dropout, two dense layers (Frankle & Carbin's Conv-4)", lr=0.05
)
def conv4(input_shape: tuple[int, int, int], num_classes: int) -> Conv4:
    """Build a Conv4 for images of at least 4x4."""
    return Conv4(input_shape, num_classes)


class LeNet5(nn.Module):
    """Two 5x5 convolutions (20 and 50 channels), each with ReLU and 2x2 max pooling, then dense 500.

    431,080 parameters for 1x28x28 images and 10 classes: the baseline of the pruning and tensor-ring papers.
    LeCun et al. 1998 had 6 and 16 channels.

    Args:
        input_shape: (channels, height, width); at least 16 pixels high and wide.
        num_classes: Number of classes.
    """

    def __init__(self, input_shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__()
        channels, height, width = input_shape
        if min(height, width) < 16:
            raise ModelError(f"lenet5 needs images of at least 16x16 pixels, got {height}x{width}; try conv4")
        height, width = (((side - 4) // 2 - 4) // 2 for side in (height, width))
        self.conv1 = nn.Conv2d(channels, 20, 5)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.relu1, self.relu2, self.relu3 = nn.ReLU(), nn.ReLU(), nn.ReLU()
        self.pool1, self.pool2 = nn.MaxPool2d(2), nn.MaxPool2d(2)
        self.flatten = nn.Flatten()
        self.fc1 = nn.Linear(50 * height * width, 500)
        self.fc2 = nn.Linear(500, num_classes)

    def forward(self, input: Tensor) -> Tensor:
        """Map images (N, C, H, W) to class scores (N, num_classes)."""
        x = self.pool1(self.relu1(self.conv1(input)))
        x = self.pool2(self.relu2(self.conv2(x)))
        return self.fc2(self.relu3(self.fc1(self.flatten(x))))


@register_model(
    "lenet5", "LeNet-5 (20-50-500), 0.43 M parameters on MNIST; images of 16x16 at least", lr=0.01
)
def lenet5(input_shape: tuple[int, int, int], num_classes: int) -> LeNet5:
    """Build a LeNet-5 for images of at least 16x16."""
    return LeNet5(input_shape, num_classes)


SHORTCUTS = ("A", "B")


class ZeroPadShortcut(nn.Module):
    """Option A: every second row and column, and zero channels before and after. It has no parameters."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.before = (out_channels - in_channels) // 2
        self.after = out_channels - in_channels - self.before

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in_channels, H, W) to (N, out_channels, ceil(H / stride), ceil(W / stride))."""
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.before, self.after))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut around them."""

    def __init__(self, in_channels: int, channels: int, stride: int, shortcut: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=1, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module
        if stride == 1 and in_channels == channels:
            self.shortcut = nn.Identity()
        elif shortcut == "A":
            self.shortcut = ZeroPadShortcut(in_channels, channels, stride)
        else:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride=stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in_channels, H, W) to (N, channels, ceil(H / stride), ceil(W / stride))."""
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.shortcut(x))


class CifarResNet(nn.Module):
    """A stem of 16 channels, three stages of 16, 32 and 64 channels, mean over the map, one dense layer.

    Args:
        blocks: Basic blocks in a stage; the depth is 6 * blocks + 2.
        in_channels: Channels of the images.
        num_classes: Number of classes.
        shortcut: Shortcuts where the shape changes: "A" (subsampled, zero-padded, no parameters) or "B" (1x1
            convolution).
    """

    def __init__(self, blocks: int, in_channels: int, num_classes: int, shortcut: str = "A") -> None:
        super().__init__()
        if shortcut not in SHORTCUTS:
            raise ConfigError(f"model.shortcut must be one of {', '.join(SHORTCUTS)}, got {shortcut!r}")
        self.conv1 = nn.Conv2d(in_channels, 16, 3, stride=1, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = self._stage(16, 16, blocks, 1, shortcut)
        self.layer2 = self._stage(16, 32, blocks, 2, shortcut)
        self.layer3 = self._stage(32, 64, blocks, 2, shortcut)
        self.linear = nn.Linear(64, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    @staticmethod
    def _stage(in_channels: int, channels: int, blocks: int, stride: int, shortcut: str) -> nn.Sequential:
        first = BasicBlock(in_channels, channels, stride, shortcut)
        return nn.Sequential(first, *(BasicBlock(channels, channels, 1, shortcut) for _ in range(blocks - 1)))

    def forward(self, input: Tensor) -> Tensor:
        """Map images (N, in_channels, H, W) to class scores (N, num_classes)."""
        out = F.relu(self.bn1(self.conv1(input)))
        out = self.layer3(self.layer2(self.layer1(out)))
        return self.linear(F.adaptive_avg_pool2d(out, 1).flatten(1))


def _register_resnet(depth: int, params: str) -> None:
    about = f"CIFAR ResNet-{depth}, {params} M parameters (He et al. 2016)"

    @register_model(f"resnet{depth}", about, lr=0.1)
    def resnet(input_shape: tuple[int, int, int], num_classes: int, *, shortcut: str = "A") -> CifarResNet:
        return CifarResNet((depth - 2) // 6, input_shape[0], num_classes, shortcut)


for _depth, _params in ((20, "0.27"), (32, "0.46"), (44, "0.66"), (56, "0.85")):
    _register_resnet(_depth, _params)


_LEAST_SIDE = 8  # ResNet-9 halves its images three times
_SCALE_OF_SCORES = 0.125


class _Block(nn.Module):
    """Two 3x3 convolutions of equal width, each with batch norm and ReLU, added to their input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = _convolution(channels, channels)
        self.conv2 = _convolution(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(self.conv1(x))


class ResNet9(nn.Module):
    """Four 3x3 convolutions, pooling after the last three, a block after the second and the fourth.

    The network of Page, "How to train your ResNet" (2018, part 4), which won the DAWNBench of CIFAR-10, with
    its layers in the order convolution, batch norm, ReLU, pooling, block. Class scores are an eighth of the
    last layer's outputs: its inputs are maxima, so that without the factor its steps are too long at the rate
    that suits the convolutions (three epochs of 12,000 images: 49.8 instead of 70.2 % on other images).

    Args:
        input_shape: (channels, height, width); height and width multiples of 8.
        num_classes: Number of classes.
        width: Channels of the first convolution; the others have 2, 4 and 8 times as many.
    """

    def __init__(self, input_shape: tuple[int, int, int], num_classes: int, width: int = 64) -> None:
        super().__init__()
        channels, height, width_of_image = input_shape
        if height % _LEAST_SIDE or width_of_image % _LEAST_SIDE or min(height, width_of_image) < _LEAST_SIDE:
            raise ModelError(
                f"resnet9 halves its images three times and needs sides that are multiples of {_LEAST_SIDE}, "
                f"got {height}x{width_of_image}"
            )
        if isinstance(width, bool) or not isinstance(width, int) or width < 1:
            raise ModelError(f"resnet9 needs a width of at least 1 channel, got {width!r}")
        self.prepare = _convolution(channels, width)
        self.layer1 = nn.Sequential(_convolution(width, 2 * width), nn.MaxPool2d(2), _Block(2 * width))
        self.layer2 = nn.Sequential(_convolution(2 * width, 4 * width), nn.MaxPool2d(2))
        self.layer3 = nn.Sequential(_convolution(4 * width, 8 * width), nn.MaxPool2d(2), _Block(8 * width))
        self.pool = nn.MaxPool2d((height // _LEAST_SIDE, width_of_image // _LEAST_SIDE))
        self.fc = nn.Linear(8 * width, num_classes)

    def forward(self, input: Tensor) -> Tensor:
        """Map images (N, C, H, W) to class scores (N, num_classes)."""
        x = self.layer3(self.layer2(self.layer1(self.prepare(input))))
        return self.fc(self.pool(x).flatten(1)) * _SCALE_OF_SCORES


def _convolution(inputs: int, outputs: int) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


@register_model(
    "resnet9", "eight wide 3x3 convolutions, trained in minutes (Page 2018); option width", lr=0.1
)
def resnet9(input_shape: tuple[int, int, int], num_classes: int, *, width: int = 64) -> ResNet9:
    """Build a ResNet-9 for images whose sides are multiples of 8."""
    return ResNet9(input_shape, num_classes, width)


@register_model("custom", "your own network: model._target_=package.module.function")
def custom(
    input_shape: tuple[int, int, int], num_classes: int, /, *, _target_: str, **options: Any
) -> nn.Module:
    """Call a user's function.

    A parameter of the callable that is named `input_shape` or `num_classes` gets the dataset's, unless an
    option gives it.

    Args:
        input_shape: (channels, height, width) of one image.
        num_classes: Number of classes.
        _target_: Dotted path of a callable that returns a `torch.nn.Module`, such as
            "package.module.function". Its further arguments are given as +model.width=64; one that hides them
            behind **kwargs, such as timm.create_model, needs +model.num_classes=10.
        **options: Passed on to the callable.

    Raises:
        ConfigError: There is no such module or callable.
        ModelError: It fails, or returns no `torch.nn.Module`.
    """
    build = _import(_target_)
    of_dataset = {"input_shape": input_shape, "num_classes": num_classes}
    defaults = {key: value for key, value in of_dataset.items() if key in _parameter_names(build)}
    arguments = defaults | options
    try:
        model = build(**arguments)
    except RankrlError:
        raise
    except Exception as error:  # whatever the user's own code raises
        listed = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raise ModelError(
            f"model._target_={_target_} failed with {_described(error)}. It was called with ({listed}); its "
            "arguments are given as model.NAME=VALUE, +model.NAME=VALUE where they are new"
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{_target_} returned a {type(model).__name__}, but must return a torch.nn.Module")
    return model


def _parameter_names(build: Callable[..., object]) -> set[str]:
    try:
        return set(inspect.signature(build).parameters)
    except (TypeError, ValueError):  # some callables written in C have no signature
        return set()


def _import(path: str) -> Callable[..., object]:
    module_name, _, attribute = str(path).rpartition(".")
    if not module_name:
        raise ConfigError(f"model._target_ must be a dotted path like package.module.function, got {path!r}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise _broken(module_name, error) from error
        raise ConfigError(
            f"model._target_={path}: there is no module {error.name!r}. Install it, or add its folder to the "
            "environment variable PYTHONPATH (PYTHONPATH=. for the current folder)."
        ) from error
    except Exception as error:  # whatever the user's own code raises
        raise _broken(module_name, error) from error
    target = getattr(module, attribute, None)
    if not callable(target):
        raise ConfigError(
            f"model._target_={path}: module {module_name!r} has no callable {attribute!r}."
            f"{did_you_mean(attribute, vars(module))}"
        )
    result: Callable[..., object] = target
    return result


def _broken(module_name: str, error: Exception) -> ModelError:
    return ModelError(f"the module {module_name} of model._target_ cannot be imported: {_described(error)}")


def _described(error: Exception) -> str:
    """Return an error's type, first line, and the place in the user's code where it was raised."""
    lines = str(error).strip().splitlines()
    frames = traceback.extract_tb(error.__traceback__)
    places = [frame for frame in frames if frame.filename != __file__ and "importlib" not in frame.filename]
    place = f" ({places[-1].filename}, line {places[-1].lineno})" if places else ""
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}{place}"


@register_model("torchvision", "any classification network of torchvision, such as model.name=mobilenet_v2")
def torchvision_model(
    input_shape: tuple[int, int, int], num_classes: int, /, *, name: str, **options: Any
) -> nn.Module:
    """Build a network of `torchvision.models`.

    Args:
        input_shape: (channels, height, width); torchvision's networks take 3 channels.
        num_classes: Number of classes.
        name: torchvision's name, for example "resnet18".
        **options: Passed on to torchvision's builder, for example `aux_logits=False` for googlenet.

    Raises:
        ConfigError: torchvision has no such network or option.
        ModelError: torchvision cannot be imported, or the images have other than 3 channels.
    """
    try:
        from torchvision import models  # only this model needs torchvision
    except (ImportError, RuntimeError) as error:  # a torchvision of another torch fails with RuntimeError
        raise ModelError(
            f"model=torchvision needs a torchvision that fits the installed torch ({error}); "
            "install both together"
        ) from error
    known = models.list_models(module=models)
    if name not in known:
        near = difflib.get_close_matches(str(name), known, n=3)
        raise ConfigError(
            f"torchvision has no classification network {name!r}. "
            f"Near names: {', '.join(near) or ', '.join(known[:10])}."
        )
    if input_shape[0] != 3:
        raise ModelError(
            f"torchvision's {name} takes images of 3 channels, the dataset's have {input_shape[0]}"
        )
    if options.get("weights") is not None:
        raise ConfigError("model.weights is not accepted, nothing is downloaded; give model.checkpoint=PATH")
    try:
        model: nn.Module = models.get_model(name, num_classes=num_classes, **{"weights": None, **options})
    except TypeError as error:
        raise ConfigError(
            f"torchvision's {name} does not take the options {sorted(options)}: {error}"
        ) from error
    return model


@register_model("onnx", "a network in an ONNX file: model.path=net.onnx, with dataset=inputs")
def onnx(input_shape: tuple[int, int, int], num_classes: int, /, *, path: str | Path) -> nn.Module:
    """Refuse to build a PyTorch network.

    Args:
        input_shape: Not used.
        num_classes: Not used.
        path: The ONNX file; it is only read.

    Raises:
        ConfigError: Always.
    """
    raise ConfigError(
        f"model=onnx is compressed as the file that it is ({path}), not as a PyTorch network; give "
        "dataset=inputs dataset.path=inputs.npz with task=pipeline or task=inspect"
    )
