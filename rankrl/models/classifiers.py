"""Register and build classifiers, check their outputs, and hash networks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from decomposition.cache import digest
from decomposition.network.cost import evaluation_mode
from decomposition.network.inputs import Inputs, run_model, tensors_in
from decomposition.registry import Registry
from rankrl.device import model_device
from rankrl.errors import ConfigError, ModelError, did_you_mean


def check_classifier(
    model: object, input_shape: tuple[int, int, int], num_classes: int, *, name: str = "model"
) -> None:
    """Run a network on two blank images and check that it returns class scores; it stays unchanged."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"{name} is a {type(model).__name__}, not a torch.nn.Module")
    images = torch.zeros(2, *input_shape, device=model_device(model))
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            output = model(images)
    except Exception as error:  # whatever the network's own code raises
        raise ModelError(
            f"{name} fails on images of shape {input_shape} (channels, height, width): {_first_line(error)}. "
            "Choose a model for this input, or a dataset with other images."
        ) from error
    finally:
        for module, training in modes.items():
            module.training = training
    if not isinstance(output, torch.Tensor):
        raise ModelError(
            f"{name} returns a {type(output).__name__}, but must return one tensor of class scores, "
            f"shape (N, {num_classes})"
        )
    if output.shape != (2, num_classes) or not output.is_floating_point():
        raise ModelError(
            f"{name} returns a {output.dtype} tensor of shape {tuple(output.shape)} for 2 images, but the "
            f"dataset has {num_classes} classes: it must be floating-point of shape (2, {num_classes}). "
            "A network of your own is told their number by its parameter num_classes, or by "
            f"+model.num_classes={num_classes}"
        )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def network_digest(model: nn.Module) -> str:
    """Return the hash of a network's modules and weights, 16 hexadecimal digits."""
    modules = [(name, type(module).__qualname__) for name, module in model.named_modules()]
    tensors = {
        name: value
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor) and value.layout == torch.strided
    }
    return digest(modules, tensors)[:16]


def behaviour_digest(model: nn.Module, inputs: Inputs) -> str:
    """Return a hash of modules, weights and outputs, which tells equally named networks apart."""
    with evaluation_mode(model), torch.no_grad():
        answers = tensors_in(run_model(model, inputs))
    return digest(network_digest(model), list(answers), torch.__version__)


Builder = Callable[..., nn.Module]
"""`build(input_shape, num_classes, **options)` -> an initialised network."""


@dataclass(frozen=True)
class ModelSource:
    name: str
    description: str
    build: Builder
    lr: float | None = None


_MODELS: Registry[ModelSource] = Registry("model", ConfigError)


def register_model(name: str, description: str, *, lr: float | None = None) -> Callable[[Builder], Builder]:
    """Register the decorated function `build(input_shape, num_classes, **options)` as the model `name`."""

    def register(build: Builder) -> Builder:
        _MODELS.add(name, ModelSource(name, description, build, lr), description)
        return build

    return register


def list_models(pattern: str = "*") -> list[str]:
    """Return the names of the registered models that match a wildcard pattern, sorted."""
    return _MODELS.names(pattern)


def model_source(name: str) -> ModelSource:
    return _MODELS[name]


def default_lr(name: str, network: nn.Module) -> float:
    """Return the learning rate of SGD with momentum 0.9 for training a network from scratch.

    It is the rate registered with the model, else 0.1 for a network with batch normalisation and 0.01 for one
    without, where larger steps soon make ReLUs die.
    """
    stated = model_source(name).lr
    if stated is not None:
        return stated
    normalised = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in network.modules())
    return 0.1 if normalised else 0.01


def create_model(
    name: str, /, *, input_shape: tuple[int, int, int], num_classes: int, **options: Any
) -> nn.Module:
    """Build an initialised network and check that it classifies images of the given shape."""
    return build_model(name, input_shape, num_classes, options)


def build_model(
    name: str, input_shape: tuple[int, int, int], num_classes: int, options: Mapping[str, Any]
) -> nn.Module:
    """Build a network like `create_model`, but with options of any name, even `num_classes`."""
    source = model_source(name)
    parameters = inspect.signature(source.build).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        allowed = [parameter.name for parameter in parameters][2:]
        for option in options:
            if option not in allowed:
                raise ConfigError(
                    f"model {name!r} has no option {option!r}; it has {', '.join(allowed) or 'none'}."
                    f"{did_you_mean(option, allowed)}"
                )
    for parameter in parameters:
        required = parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty
        if required and parameter.name not in options:
            raise ConfigError(f"model {name!r} needs model.{parameter.name}=...")
    model = source.build(input_shape, num_classes, **options)
    check_classifier(model, input_shape, num_classes, name=name)
    return model
