"""A user's own network, by the dotted path of a function or class that returns it."""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Callable
from typing import Any

from torch import nn

from rankrl.errors import ConfigError, ModelError, RankrlError, did_you_mean
from rankrl.models.registry import register_model


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
    except (TypeError, ValueError):  # some callables written in C do not tell
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
