"""Reinitialise a pruned network: the baseline of the same widths, trained from scratch."""

from __future__ import annotations

import torch
from torch import nn

from pruning.copies import copied, plain_network
from pruning.errors import PruningError
from pruning.public_calls import public_call


@public_call
def untrained_copy(network: nn.Module, seed: int = 0) -> nn.Module:
    """Return a copy with all weights drawn anew, for training from scratch (Liu et al. 2019).

    Args:
        network: a network, usually the result of `remove_channels`; it is left as it is.
        seed: of the initial weights; torch's global generator stays as it was.

    Raises:
        PruningError: if a module holds parameters and has no `reset_parameters` to draw them again.
    """
    fresh = copied(plain_network(network))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for name, module in fresh.named_modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
            elif module._parameters:
                raise PruningError(
                    f"{name or 'the network'} ({type(module).__name__}) cannot be drawn anew: it holds "
                    "parameters of its own; give its class a method reset_parameters"
                )
    return fresh
