"""The contract of every network here: images in, one row of class scores per image out."""

from __future__ import annotations

import torch
from torch import nn

from rankrl.device import model_device
from rankrl.errors import ModelError


def check_classifier(
    model: object, input_shape: tuple[int, int, int], num_classes: int, *, name: str = "model"
) -> None:
    """Run a network on two blank images and check what comes out.

    The network runs in evaluation mode; its mode and values stay as they were.
    """
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
