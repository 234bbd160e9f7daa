"""An input of a network in an ONNX file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class GraphInput:
    """An input of a network."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]
    names: tuple[str, ...]

    def __str__(self) -> str:
        sizes = ", ".join("any" if size is None else str(size) for size in self.shape)
        return f"{self.name!r} ({self.dtype}, {sizes})"
