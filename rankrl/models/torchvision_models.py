"""torchvision's classification networks, randomly initialised; nothing is downloaded."""

from __future__ import annotations

import difflib
from typing import Any

from torch import nn

from rankrl.errors import ConfigError, ModelError
from rankrl.models.registry import register_model


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
