"""What is known of a model's inputs: their shapes and types, and how that is written as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch

from decomposition.errors import DecompositionError

FLOAT = "float"
"""The type of a `TensorSpec` that stands for the model's own floating-point type."""


@dataclass(frozen=True)
class TensorSpec:
    """One input tensor.

    Attributes:
        shape: Its shape without the batch axis.
        dtype: Name of its type in torch, such as `int64`; `float` for the model's own floating-point type.
        value: What stands in for its values, where integers must mean something: one that really occurs.
    """

    shape: tuple[int, ...]
    dtype: str = FLOAT
    value: int | bool = 0

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """Describe a batch; its first integer, which is never padding, stands for all of them."""
        shape = tuple(tensor.shape[1:])
        if tensor.is_floating_point():
            return cls(shape)
        if tensor.is_complex() or not tensor.numel():
            return cls(shape, _name(tensor.dtype))
        value = tensor.flatten()[0].item()
        return cls(shape, _name(tensor.dtype), value if isinstance(value, bool) else int(value))

    def batch(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a batch of that many inputs, zeros where they are floating-point numbers."""
        own = dtype if self.dtype == FLOAT else getattr(torch, self.dtype)
        return torch.full((size, *self.shape), self.value, dtype=own, device=device)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        values = {} if self.dtype == FLOAT else {"value": self.value}
        return {"shape": list(self.shape), "dtype": self.dtype, **values}

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


@dataclass(frozen=True)
class InputSpec:
    """The inputs of a model that takes anything but one tensor of floating-point numbers.

    Attributes:
        tensors: At least one.
        names: The forward's parameters that take them; `None` where it takes them in order.
    """

    tensors: tuple[TensorSpec, ...]
    names: tuple[str, ...] | None = None

    def to_json(self) -> list[dict[str, Any]] | dict[str, dict[str, Any]]:
        """Return plain values for JSON: a list of tensors, or an object of them by name."""
        entries = [tensor.to_dict() for tensor in self.tensors]
        return entries if self.names is None else dict(zip(self.names, entries, strict=True))

    @classmethod
    def from_json(cls, content: Any) -> InputSpec:
        """Read what `to_json` returned; strict.

        Raises:
            DecompositionError: It is something else.
        """
        named = isinstance(content, dict)
        entries = list(content.values()) if named else content
        if not isinstance(entries, list) or not entries:
            raise DecompositionError(f"inputs must be a list or an object of tensors, got {content!r}")
        return cls(tuple(map(_tensor_spec, entries)), tuple(content) if named else None)

    def __str__(self) -> str:
        names = self.names or ("",) * len(self.tensors)
        return ", ".join(f"{name} {tensor}".strip() for name, tensor in zip(names, self.tensors, strict=True))


InputShape = tuple[int, ...] | InputSpec
"""The shape of a model's only input without the batch axis, or a specification of its inputs."""


def shape_to_json(shape: InputShape) -> Any:
    """Return what is known of a model's inputs as plain values for JSON."""
    return shape.to_json() if isinstance(shape, InputSpec) else list(shape)


def _tensor_spec(entry: Any) -> TensorSpec:
    shape = entry.get("shape") if isinstance(entry, dict) else None
    dtype, value = (entry.get("dtype"), entry.get("value", 0)) if isinstance(entry, dict) else (None, None)
    known = dtype == FLOAT or isinstance(getattr(torch, str(dtype), None), torch.dtype)
    sizes = isinstance(shape, list) and all(type(n) is int and n > 0 for n in shape)
    if not (sizes and known and isinstance(value, int) and set(entry) <= {"shape", "dtype", "value"}):
        raise DecompositionError(
            "an input must be an object of shape (positive integers), dtype (such as int64, or float) and "
            f"value (an integer), got {entry!r}"
        )
    return TensorSpec(tuple(cast(list[int], shape)), cast(str, dtype), value)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
