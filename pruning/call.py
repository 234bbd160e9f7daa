"""Describe a watched call of a torch operation: its function, its arguments and the line that calls it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

_TORCH = str(Path(torch.__file__).parent / "_")[:-1]
_HERE = str(Path(__file__).parent / "_")[:-1]

CHANGING = frozenset({"__setitem__", "__set__", "__delitem__"})
"""Operations that change a tensor and give nothing out."""


@dataclass
class Call:
    """A watched call of a torch operation."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    owner: str
    module: nn.Module
    arrays: dict[int, tuple[Tensor, torch.Size]] = field(default_factory=dict)

    @property
    def own_arrays(self) -> list[Tensor]:
        """The label arrays of the arguments."""
        return [array for array, _ in self.arrays.values()]

    @property
    def title(self) -> str:
        """The operation, its module and its line, for messages."""
        if type(self.module).__module__.startswith("torch.nn.modules."):
            return f"the layer {self.owner!r} ({type(self.module).__name__})"
        name = self.name.strip("_") or self.name
        return f"{name} in {self.owner or 'the network'}.forward{line_of(calling_frame())}"


def calling_frame() -> FrameType | None:
    """Return the innermost running frame outside this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return frame


def is_networks_own(frame: FrameType) -> bool:
    """Tell whether a frame runs the code of a network: neither this package's nor torch's."""
    return not (is_of_torch(frame) or frame.f_code.co_filename.startswith(_HERE))


def is_of_torch(frame: FrameType) -> bool:
    """Tell whether a frame runs torch's own code, whose checks do not depend on the network."""
    return frame.f_code.co_filename.startswith(_TORCH)


def line_of(frame: FrameType | None) -> str:
    """Return the line of the network's own code that a frame runs or was called from, in brackets."""
    while frame is not None and is_of_torch(frame):
        frame = frame.f_back
    if frame is None or not is_networks_own(frame):
        return ""
    return f" ({Path(frame.f_code.co_filename).name}, line {frame.f_lineno})"
