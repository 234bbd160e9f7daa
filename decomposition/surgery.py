"""Copying a model and replacing modules inside it."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import nn

Module = TypeVar("Module", bound=nn.Module)


def copied(model: Module) -> Module:
    """Return a deep copy of `model`.

    Tensors that its forward computed and kept, which torch refuses to copy (the weight of
    `torch.nn.utils.weight_norm`), are copied by value.
    """
    computed = {
        id(value): value.detach().clone()
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, torch.Tensor) and not value.is_leaf
    }
    return copy.deepcopy(model, computed)


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
