"""What goes into a model: one tensor, several in order, or several by name; and what is known of them.

A batch of inputs (`Inputs`) is a tensor, `Positional` tensors that the forward takes in order, or a dict of
tensors that it takes by name; the first axis of all of them counts the inputs. Wherever a function takes an
`ExampleInputs`, give the shape of one input if the model has a single input of floating-point numbers, and
otherwise a batch of real inputs, which it describes by an `InputSpec`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from decomposition.errors import DecompositionError
from decomposition.network.input_specs import InputShape, InputSpec, TensorSpec


class Positional(tuple[torch.Tensor, ...]):
    """Several inputs that a model's forward takes in this order, one batch of them."""

    __slots__ = ()


Inputs = torch.Tensor | Positional | dict[str, torch.Tensor]
"""A batch of inputs; a dict's go to the forward by name."""


ExampleInputs = Sequence[int] | InputSpec | torch.Tensor | Sequence[torch.Tensor] | Mapping[str, torch.Tensor]
"""The shape of one input without the batch axis, or a batch of inputs: a tensor, a tuple or a dict."""


def input_shape_of(example: ExampleInputs) -> InputShape:
    """Return what is known of a model's inputs, from an example or from what is known already."""
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
    """Tell whether an example is a batch of inputs, and not what is known of them."""
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
    """Return a tensor of the type and on the device of a model's inputs.

    The first of torch's own layers decides: it takes the type of its own parameters. Parameters of a user's
    modules (position embeddings, say) may be of another type.
    """
    layers = [module for module in model.modules() if type(module).__module__.startswith("torch.nn.modules")]
    owned = (
        parameter for layer in layers for parameter in layer._parameters.values() if parameter is not None
    )
    floating = (parameter for parameter in (*owned, *model.parameters()) if parameter.is_floating_point())
    return next(floating, torch.empty(0))


def example_tensor(model: nn.Module, example: ExampleInputs) -> torch.Tensor:
    """Return an `example_batch` of two inputs of a model with one, to trace its channels with.

    The batch axis of a single example could be mistaken for one that is broadcast.
    """
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
    """Return a tensor's numbers as a `torch.Tensor` without a graph, in the same memory.

    Results computed from a subclass (a torchvision image, a parameter) would be of that class, too.
    """
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
    """Return the tensors of a batch in order."""
    if isinstance(inputs, torch.Tensor):
        return (inputs,)
    return tuple(inputs.values()) if isinstance(inputs, dict) else tuple(inputs)


def mapped(function: Callable[..., torch.Tensor], inputs: Inputs, *others: Inputs) -> Inputs:
    """Apply a function to the tensors of a batch, together with those of other batches like it."""
    tensors = [function(*row) for row in zip(*map(tensors_of, (inputs, *others)), strict=True)]
    if isinstance(inputs, torch.Tensor):
        return tensors[0]
    return dict(zip(inputs, tensors, strict=True)) if isinstance(inputs, dict) else Positional(tensors)


def count_inputs(inputs: Inputs) -> int:
    """Return how many inputs a batch holds."""
    return len(tensors_of(inputs)[0])


def numbers_in_one(inputs: Inputs) -> int:
    """Return how many numbers one input of a batch holds."""
    return sum(math.prod(tensor.shape[1:]) for tensor in tensors_of(inputs))


def rows(inputs: Inputs, index: slice | torch.Tensor) -> Inputs:
    """Return some inputs of a batch."""
    return mapped(lambda x: x[index], inputs)


def split(inputs: Inputs, size: int) -> list[Inputs]:
    """Split a batch into parts of `size` inputs; the last part holds what is left."""
    if isinstance(inputs, torch.Tensor):
        return list(inputs.split(size))
    return [rows(inputs, slice(first, first + size)) for first in range(0, count_inputs(inputs), size)]


def joined(batches: Sequence[Inputs]) -> Inputs:
    """Join batches of one kind, at least one, into a single batch."""
    return mapped(lambda *tensors: torch.cat(tensors), *batches)


def described(inputs: Inputs) -> str:
    """Return a batch's shapes and types, for messages."""
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
