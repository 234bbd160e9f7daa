"""Count parameters and multiply-accumulates (MACs): the one definition of model cost."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from decomposition.network.inputs import ExampleInputs, example_batch, run_model
from decomposition.network.surgery import unwrapped
from decomposition.public_calls import ProcessSetting, public_call

_PRODUCTS = {torch.ops.aten.addmm: 1, torch.ops.aten.mm: 0}
"""Products of two matrices, and where among the arguments the first of them is."""
_FAST_PATH = ProcessSetting(
    torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, value=False
)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put `model` into eval mode without gradients and restore every module's mode afterwards.

    torch's fast path for attention and Transformer layers is off meanwhile: it computes a whole layer in one
    operation without calling the modules inside, so nothing could be watched, counted or replaced.
    """
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with _FAST_PATH.held(), torch.no_grad():
            yield
    finally:
        for module, mode in training.items():
            module.training = mode


@contextmanager
def watching(model: nn.Module, handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Put a model into `evaluation_mode` with these hooks, which are removed at the end."""
    try:
        with evaluation_mode(model):
            yield
    finally:
        for handle in handles:
            handle.remove()


def count_parameters(model: nn.Module) -> int:
    """Count every parameter of `model` once, batch normalisation's scale and shift included."""
    return sum(parameter.numel() for parameter in model.parameters())


@public_call(values=False)
def count_macs(model: nn.Module, input_shape: ExampleInputs) -> int:
    """Count the multiply-accumulates of convolutions and linear layers for one input.

    Counting happens below the module level, where `torch.utils.flop_counter` counts the same, so that layers
    made of several stages count as what they execute. Element-wise operations, normalisation, and the
    contraction of small cores into a weight, which does not grow with the image, are left out.

    The projections of attention (`nn.MultiheadAttention`, on queries, keys, values and outputs) are linear
    layers and counted; what attention does between them, the scaled dot products, is not. Recurrent layers
    are counted at every step. The `LayerSpec`s of `inspect_layers` add up to this number.

    Args:
        model: Any module.
        input_shape: Shape of one input without the batch axis, for example `(3, 32, 32)`, or a batch of
            inputs (`decomposition.network.inputs`).

    Returns:
        The number of multiply-accumulates (half the floating-point operations).
    """
    model = unwrapped(model)
    example, counter = example_batch(model, input_shape), _Counter()
    # Nothing is compiled unless torch._dynamo is loaded; loading it would take a second.
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with evaluation_mode(model), _recurrence_in_steps(model), eager, counter:
        run_model(model, example)
    return counter.macs


def stage_sizes(layer: nn.Module, x: torch.Tensor) -> list[int]:
    """Return the numbers that each convolution and product of matrices in a layer gives, in order."""
    counter = _Counter()
    with torch.no_grad(), counter:
        layer(x)
    return counter.sizes


class _Counter(TorchDispatchMode):
    """Adds up the multiply-accumulates of all convolutions and products of matrices that are called."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.macs = 0
        self.sizes: list[int] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping torch.compile would load it, which takes a second

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operator = getattr(func, "overloadpacket", None)
        counted = operator is torch.ops.aten.convolution or operator in _PRODUCTS
        if operator is not None and not counted:
            with self:  # count the operations it decomposes into, in inference mode
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if counted:
            self.sizes.append(result.numel())
        if operator in _PRODUCTS:
            left, right = args[_PRODUCTS[operator] :][:2]
            self.macs += left.shape[0] * right.shape[0] * right.shape[1]
        elif counted:
            x, weight, transposed = args[0], args[1], args[6]
            positions = (x if transposed else result).shape
            self.macs += positions[0] * math.prod(positions[2:]) * weight.numel()
        return result


@contextmanager
def _recurrence_in_steps(model: nn.Module) -> Iterator[None]:
    """Make recurrent layers multiply matrices, which are counted, instead of calling a library's kernel."""
    if not any(isinstance(module, nn.RNNBase) for module in model.modules()):
        yield
        return
    with warnings.catch_warnings():
        # Setting the flags warns about their effect on a GPU.
        warnings.filterwarnings("ignore", message=".*oneDNN.*")
        with torch.backends.mkldnn.flags(enabled=False), torch.backends.cudnn.flags(enabled=False):
            yield
