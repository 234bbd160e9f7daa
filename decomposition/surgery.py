"""Replacing modules inside a model."""

from __future__ import annotations

from torch import nn


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put `new` everywhere in `model` where `old` is, under all its names."""
    places = [
        (parent, attribute)
        for parent in model.modules()
        for attribute, child in parent._modules.items()
        if child is old
    ]
    for parent, attribute in places:
        setattr(parent, attribute, new)
