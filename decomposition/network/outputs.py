"""What comes out of a model: the tensors in its output, wherever they are in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import SUPPORTED_NODES

Place = tuple[str | int, ...]
"""The keys, fields and positions that lead to something in an output; empty for the output itself."""


def leaves(output: Any) -> Iterator[tuple[Place, Any]]:
    """Yield everything in a model's output that holds nothing else, in order, each with its place.

    The search goes into mappings, lists, tuples (named ones by their fields), dataclasses, and everything
    that is registered with torch as a pytree.
    """
    for key, value in _parts(output):
        if key is None:
            yield (), value
        else:
            yield from (((key, *place), leaf) for place, leaf in leaves(value))


def tensors_in(output: Any) -> list[torch.Tensor]:
    """Return all tensors in a model's output, in order."""
    return [leaf for _, leaf in leaves(output) if isinstance(leaf, torch.Tensor)]


def _parts(output: Any) -> list[tuple[str | int | None, Any]]:
    """Return what an output holds by key, field or position; itself under None if it holds nothing."""
    if isinstance(output, torch.Tensor):
        return [(None, output)]
    if isinstance(output, Mapping):
        return [(key if isinstance(key, int) else str(key), value) for key, value in output.items()]
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return list(zip(output._fields, output, strict=True))
    if isinstance(output, list | tuple):
        return list(enumerate(output))
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return [(field.name, getattr(output, field.name)) for field in dataclasses.fields(output)]
    if type(output) in SUPPORTED_NODES:
        return list(enumerate(SUPPORTED_NODES[type(output)].flatten_fn(output)[0]))
    return [(None, output)]
