"""Run public calls in fixed modes of torch, whatever their caller switched on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import ParamSpec, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pruning.errors import PruningError

P = ParamSpec("P")
R = TypeVar("R")

_AUTOCAST = ("cpu", "cuda", "mps", "xpu")


def public_call(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function: it computes in `own_modes`, on networks that have values."""

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        for value in (*args, *options.values()):
            if isinstance(value, nn.Module):
                check_values(value)
        with own_modes():
            return function(*args, **options)

    return call


@contextmanager
def own_modes() -> Iterator[None]:
    """Enable gradients, compute in the tensors' own types, and make new tensors on the CPU."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.enable_grad())
        for device in filter(torch.is_autocast_enabled, _AUTOCAST):
            stack.enter_context(torch.autocast(device, enabled=False))
        if torch.get_default_device() != torch.device("cpu"):
            stack.enter_context(torch.device("cpu"))
        yield


def check_values(network: nn.Module) -> None:
    """Refuse a network with lazy parameters or tensors on the device `meta`, which have no values."""
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        if is_lazy(tensor):
            raise PruningError(
                f"{name} of the {type(network).__name__} has no shape yet, as a lazy layer's that was never "
                "called; call the network once on real inputs, and load its trained weights, before this"
            )
        if tensor.is_meta:
            raise PruningError(
                f"{name} of the {type(network).__name__} is on the device meta and has no values; load its "
                "weights first, with network.to_empty(device='cpu') and network.load_state_dict(weights)"
            )
