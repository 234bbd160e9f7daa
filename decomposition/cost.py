"""The one definition of model cost: parameters and multiply-accumulates (MACs)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from decomposition.inputs import ExampleInputs, example_batch, run_model
from decomposition.wrappers import unwrapped

_COUNTED = (torch.ops.aten.convolution, torch.ops.aten.addmm, torch.ops.aten.mm)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put `model` into eval mode without gradients and restore every module's mode afterwards.

    torch's fast path for attention and Transformer layers is off meanwhile: it computes a whole layer in one
    operation from the weights of the modules inside, none of which is called, so that nothing could be
    watched, counted or stood in for.
    """
    training = {module: module.training for module in model.modules()}
    fast_path = torch.backends.mha.get_fastpath_enabled()
    model.eval()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for module, mode in training.items():
            module.training = mode


def count_parameters(model: nn.Module) -> int:
    """Count every parameter of `model` once, batch normalisation's scale and shift included."""
    return sum(parameter.numel() for parameter in model.parameters())


def count_macs(model: nn.Module, input_shape: ExampleInputs) -> int:
    """Count the multiply-accumulates of convolutions and linear layers for one input.

    Counting happens below the module level (`torch.utils.flop_counter`), so that layers made of several
    stages count as what they execute. Element-wise operations, normalisation, and the contraction of small
    cores into a weight, which does not grow with the image, are left out.

    The projections of attention (`nn.MultiheadAttention`, on queries, keys, values and outputs) are linear
    layers and counted; what attention does between them, the scaled dot products, is not. Recurrent layers
    are counted at every step. The `LayerSpec`s of `inspect_layers` add up to this number.

    Args:
        model: Any module.
        input_shape: Shape of one input without the batch axis, for example `(3, 32, 32)`, or a batch of
            inputs (`decomposition.inputs`).

    Returns:
        The number of multiply-accumulates (half the floating-point operations).
    """
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton where it is installed

    model = unwrapped(model)
    counter = FlopCounterMode(display=False)
    with evaluation_mode(model), _recurrence_in_steps(model), counter:
        run_model(model, example_batch(model, input_shape))
    counts: dict[Any, int] = counter.get_flop_counts().get("Global", {})
    return sum(flops for operator, flops in counts.items() if operator in _COUNTED) // 2


@contextmanager
def _recurrence_in_steps(model: nn.Module) -> Iterator[None]:
    """Let recurrent layers multiply matrices, which is counted, instead of calling a library's kernel."""
    if not any(isinstance(each, nn.RNNBase) for each in model.modules()):
        yield
        return
    with warnings.catch_warnings():
        # Setting flags warns of what they do on a GPU.
        warnings.filterwarnings("ignore", message=".*oneDNN.*")
        with torch.backends.mkldnn.flags(enabled=False), torch.backends.cudnn.flags(enabled=False):
            yield
