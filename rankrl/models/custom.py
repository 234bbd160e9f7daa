"""Build networks from users' functions and torchvision; register the name of ONNX files."""

from __future__ import annotations

import difflib
import importlib
import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from rankrl.errors import ConfigError, ModelError, RankrlError, did_you_mean
from rankrl.models.classifiers import register_model


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
