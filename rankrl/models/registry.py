"""The registry of networks and the one function that builds them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from decomposition.registry import Registry
from rankrl.errors import ConfigError, did_you_mean
from rankrl.models.classifier import check_classifier
from rankrl.option_types import parameter_types, takes_any_option

Builder = Callable[..., nn.Module]
"""`build(input_shape, num_classes, **options)` -> an initialised network."""


@dataclass(frozen=True)
class ModelSource:
    """A registered network."""

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
    """Return the registered model `name`."""
    return _MODELS[name]


def model_option_types(name: str) -> tuple[dict[str, Any], bool]:
    """Return the types of a model's options, and whether it passes other options on."""
    build = model_source(name).build
    shape_and_classes = list(inspect.signature(build).parameters)[:2]
    return parameter_types(build, without=shape_and_classes), takes_any_option(build)


def default_lr(name: str, network: nn.Module) -> float:
    """Return the learning rate of SGD with momentum 0.9 at which a network is trained from scratch.

    It is what the model states at its registration; for one that states none, 0.1 for a network with batch
    normalisation and 0.01 for one without, in which larger steps soon let ReLUs die.
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
    """Do what `create_model` does, with options of any name: a user's function may have its `num_classes`."""
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
