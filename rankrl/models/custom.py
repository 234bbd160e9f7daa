"""A user's own network, by the dotted path of a function or class that returns it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from rankrl.errors import ConfigError, ModelError
from rankrl.models.registry import register_model


@register_model("custom", "your own network: model._target_=package.module.function")
def custom(
    input_shape: tuple[int, int, int], num_classes: int, *, _target_: str, **options: Any
) -> nn.Module:
    """Call a user's function.

    A parameter of the callable that is named `input_shape` or `num_classes` gets the dataset's.

    Args:
        input_shape: (channels, height, width) of one image.
        num_classes: Number of classes.
        _target_: Dotted path of a callable that returns a `torch.nn.Module`, such as
            "package.module.function".
        **options: Passed on to the callable.

    Raises:
        ConfigError: There is no such module or callable.
        ModelError: It returns no `torch.nn.Module`.
    """
    build = _import(_target_)
    of_dataset = {"input_shape": input_shape, "num_classes": num_classes}
    wanted = {key: value for key, value in of_dataset.items() if key in _parameter_names(build)}
    model = build(**wanted, **options)
    if not isinstance(model, nn.Module):
        raise ModelError(f"{_target_} returned a {type(model).__name__}, but must return a torch.nn.Module")
    return model


def _parameter_names(build: Callable[..., object]) -> set[str]:
    try:
        return set(inspect.signature(build).parameters)
    except (TypeError, ValueError):  # some callables written in C do not tell
        return set()


def _import(path: str) -> Callable[..., object]:
    module_name, _, attribute = str(path).rpartition(".")
    if not module_name:
        raise ConfigError(f"model._target_ must be a dotted path like package.module.function, got {path!r}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A module that is there but lacks something itself is the user's to see in full.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"model._target_={path}: there is no module {error.name!r}. Install it, or add its folder to the "
            "environment variable PYTHONPATH (PYTHONPATH=. for the current folder)."
        ) from error
    target = getattr(module, attribute, None)
    if not callable(target):
        raise ConfigError(f"model._target_={path}: module {module_name!r} has no callable {attribute!r}")
    result: Callable[..., object] = target
    return result
