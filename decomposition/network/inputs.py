"""Describe, make and split inputs of networks, and collect the tensors in their outputs."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import SUPPORTED_NODES

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
    """Return the shape or specification of a model's inputs as plain values for JSON."""
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


Place = tuple[str | int, ...]
"""The keys, fields and positions that lead to something in an output; empty for the output itself."""


def leaves(output: Any) -> Iterator[tuple[Place, Any]]:
    """Yield the leaves of a model's output (containers, dataclasses, pytrees) in order, with their places."""
    for key, value in _parts(output):
        if key is None:
            yield (), value
        else:
            yield from (((key, *place), leaf) for place, leaf in leaves(value))


def tensors_in(output: Any) -> list[torch.Tensor]:
    return [leaf for _, leaf in leaves(output) if isinstance(leaf, torch.Tensor)]


def _parts(output: Any) -> list[tuple[str | int | None, Any]]:
    """Return the children of an output by key, field or position; a leaf is its own, under None."""
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


class Positional(tuple[torch.Tensor, ...]):
    """Several inputs that a model's forward takes in this order, one batch of them."""

    __slots__ = ()


Inputs = torch.Tensor | Positional | dict[str, torch.Tensor]
"""A batch of inputs; a dict's go to the forward by name."""


ExampleInputs = Sequence[int] | InputSpec | torch.Tensor | Sequence[torch.Tensor] | Mapping[str, torch.Tensor]
"""The shape of one input without the batch axis, or a batch of inputs: a tensor, a tuple or a dict."""


def input_shape_of(example: ExampleInputs) -> InputShape:
    """Return the shape or specification of a model's inputs from an example, a shape or a specification."""
    if isinstance(example, InputSpec):
        return example
    if isinstance(example, torch.Tensor):
        if example.ndim > 1 and example.is_floating_point():
            return tuple(example.shape[1:])
        return InputSpec((_described(example, "the example input"),))
    if isinstance(example, Mapping):
        inputs = as_inputs(example)
        return InputSpec(tuple(map(TensorSpec.of, tensors_of(inputs))), tuple(example))
    if holds_tensors(example):
        inputs = as_inputs(example)
        if isinstance(inputs, torch.Tensor):
            return input_shape_of(inputs)
        return InputSpec(tuple(map(TensorSpec.of, tensors_of(inputs))))
    try:
        return tuple(operator.index(cast(int, size)) for size in example)
    except TypeError as error:
        raise DecompositionError(
            "an example input must be the shape of one input without the batch axis, such as (3, 32, 32), "
            f"or a batch of inputs (a tensor, a tuple or a dict of tensors), got {example!r}"
        ) from error


def holds_tensors(example: ExampleInputs) -> bool:
    """Tell whether an example is a batch of inputs rather than a shape or a specification."""
    if isinstance(example, torch.Tensor | Mapping):
        return True
    return not isinstance(example, InputSpec) and any(isinstance(value, torch.Tensor) for value in example)


def example_batch(model: nn.Module, example: ExampleInputs, batch_size: int = 1) -> Inputs:
    """Return a batch of inputs on the model's device and in its type.

    Args:
        model: The model.
        example: What it takes; see `input_shape_of`.
        batch_size: Inputs in the batch.

    Returns:
        Zeros; in place of integers the value that stands for them (`TensorSpec`).
    """
    reference = _reference(model)
    shape = input_shape_of(example)
    spec = shape if isinstance(shape, InputSpec) else InputSpec((TensorSpec(shape),))
    dtype, device = reference.dtype, reference.device
    tensors = [tensor.batch(batch_size, dtype=dtype, device=device) for tensor in spec.tensors]
    return _assembled(tensors, spec.names)


def _reference(model: nn.Module) -> torch.Tensor:
    """Return a tensor of the inputs' type and device, those of the first of torch's own layers."""
    layers = [module for module in model.modules() if type(module).__module__.startswith("torch.nn.modules")]
    owned = (
        parameter for layer in layers for parameter in layer._parameters.values() if parameter is not None
    )
    floating = (parameter for parameter in (*owned, *model.parameters()) if parameter.is_floating_point())
    return next(floating, torch.empty(0))


def example_tensor(model: nn.Module, example: ExampleInputs) -> torch.Tensor:
    """Return an `example_batch` of two inputs of a model with one, to trace its channels with."""
    batch = example_batch(model, example, batch_size=2)
    if not isinstance(batch, torch.Tensor):
        raise DecompositionError(
            f"channels can be removed from networks with one input alone, this one takes "
            f"{input_shape_of(example)}; decompose it without removing channels"
        )
    return batch


def random_batch(model: nn.Module, example: ExampleInputs, batch_size: int) -> Inputs:
    """Return an `example_batch` whose floating-point tensors are drawn from a normal distribution."""
    generator = torch.Generator().manual_seed(0)

    def drawn(x: torch.Tensor) -> torch.Tensor:
        return torch.randn(x.shape, generator=generator).to(x) if x.is_floating_point() else x

    return mapped(drawn, example_batch(model, example, batch_size))


def as_inputs(batch: Any) -> Inputs:
    """Turn a tensor, or a sequence or mapping of tensors, into a batch of inputs."""
    if isinstance(batch, torch.Tensor):
        return plain(_batched(batch, "an input"))
    named = isinstance(batch, Mapping)
    tensors = list(batch.values()) if named else list(batch) if isinstance(batch, list | tuple) else []
    if not tensors or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        held = f" of {', '.join(sorted({type(tensor).__name__ for tensor in tensors}))}" if tensors else ""
        raise DecompositionError(
            f"model inputs are given as a {type(batch).__name__}{held}; pass a tensor, a tuple of tensors in "
            "the order in which the model's forward takes them, or a dict of tensors by its parameters' names"
        )
    lengths = {len(_batched(tensor, "an input")) for tensor in tensors}
    if len(lengths) > 1:
        raise DecompositionError(
            "the input tensors hold different numbers of inputs on their first axis, "
            f"{sorted(lengths)}; give as many of each"
        )
    return _assembled([plain(tensor) for tensor in tensors], tuple(batch) if named else None)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's numbers as a `torch.Tensor` without a graph, in the same memory."""
    wraps_others = bool(is_traceable_wrapper_subclass(tensor))
    if tensor.layout is not torch.strided or tensor.is_quantized or wraps_others:
        kind = f"{type(tensor).__name__} ({tensor.layout}, {tensor.dtype})"
        raise DecompositionError(
            f"an input is a {kind}; give a dense tensor of numbers (x.to_dense(), x.dequantize(), or padded)"
        )
    if type(tensor) is torch.Tensor and not tensor.requires_grad:
        return tensor
    return tensor.detach().as_subclass(torch.Tensor)


def run_model(model: nn.Module, inputs: Inputs) -> Any:
    """Return the model's output for a batch of inputs and leave the inputs as they are.

    The model gets copies, since it may change its inputs in place (to normalise them, say). A copy costs
    about a thousandth of a pass through a ResNet.
    """
    own = mapped(torch.clone, inputs)
    if isinstance(own, torch.Tensor):
        return model(own)
    return model(**own) if isinstance(own, dict) else model(*own)


def tensors_of(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    if isinstance(inputs, torch.Tensor):
        return (inputs,)
    return tuple(inputs.values()) if isinstance(inputs, dict) else tuple(inputs)


def mapped(function: Callable[..., torch.Tensor], inputs: Inputs, *others: Inputs) -> Inputs:
    """Apply a function to the tensors of a batch, paired with those of further batches of its kind."""
    tensors = [function(*row) for row in zip(*map(tensors_of, (inputs, *others)), strict=True)]
    if isinstance(inputs, torch.Tensor):
        return tensors[0]
    return dict(zip(inputs, tensors, strict=True)) if isinstance(inputs, dict) else Positional(tensors)


def count_inputs(inputs: Inputs) -> int:
    return len(tensors_of(inputs)[0])


def numbers_in_one(inputs: Inputs) -> int:
    return sum(math.prod(tensor.shape[1:]) for tensor in tensors_of(inputs))


def rows(inputs: Inputs, index: slice | torch.Tensor) -> Inputs:
    """Select inputs of a batch by index."""
    return mapped(lambda x: x[index], inputs)


def split(inputs: Inputs, size: int) -> list[Inputs]:
    """Split a batch into parts of `size` inputs; the last part holds the remainder."""
    if isinstance(inputs, torch.Tensor):
        return list(inputs.split(size))
    return [rows(inputs, slice(first, first + size)) for first in range(0, count_inputs(inputs), size)]


def joined(batches: Sequence[Inputs]) -> Inputs:
    return mapped(lambda *tensors: torch.cat(tensors), *batches)


def described(inputs: Inputs) -> str:
    names = list(inputs) if isinstance(inputs, dict) else [""] * len(tensors_of(inputs))
    return "; ".join(
        f"{name} shape {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}".strip()
        for name, tensor in zip(names, tensors_of(inputs), strict=True)
    )


def _assembled(tensors: Sequence[torch.Tensor], names: Sequence[str] | None) -> Inputs:
    if names is not None:
        return dict(zip(names, tensors, strict=True))
    return tensors[0] if len(tensors) == 1 else Positional(tensors)


def _described(tensor: torch.Tensor, what: str) -> TensorSpec:
    return TensorSpec.of(_batched(tensor, what))


def _batched(tensor: torch.Tensor, what: str) -> torch.Tensor:
    if tensor.ndim == 0:
        raise DecompositionError(
            f"{what} is a single number; give a batch, its first axis counting the inputs"
        )
    return tensor
