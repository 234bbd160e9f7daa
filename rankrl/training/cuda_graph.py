"""Replay training steps from a CUDA graph, and flush subnormal numbers to zero."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# Beside the largest weight of a tensor, these vanish in any float32 sum: its resolution is 6e-8.
_NEGLIGIBLE = 1e-10


@contextmanager
def subnormals_as_zero() -> Iterator[None]:
    """Flush subnormal operands and results to zero on the calling thread.

    Threads that PyTorch starts in this context do so, too; those already running do not, so the command line
    enters it first of all. Processors that cannot flush them compute as before.
    """
    if _taken_as_zero():
        yield
        return
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@torch.no_grad()
def clear_negligible(model: nn.Module) -> None:
    """Set weights to zero that are at most 1e-10 times the largest of their tensor, in place.

    They change no output, but products with them may be subnormal and slow down other runtimes.
    """
    for weights in model.parameters():
        if weights.is_floating_point() and weights.numel():
            size = weights.abs()
            weights.masked_fill_(size <= _NEGLIGIBLE * size.amax(), 0.0)


def _taken_as_zero() -> bool:
    return not torch.full((1,), 1e-39).mul(0.5).any()  # 1e-39 is subnormal in float32


Pass = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From inputs and labels to loss and outputs; adds the gradients to the parameters' `.grad`."""

# PyTorch requires runs on a side stream before a capture: libraries allocate handles and workspaces there.
_WARM_UPS = 2


class CannotCaptureError(Exception):
    """A pass cannot be replayed from a graph; the message says why."""


class GraphedPass:
    """A pass that is captured once and then replayed, for batches of one shape.

    The kernels are those that run without the graph, so results are equal. The constructor leaves buffers and
    PyTorch's random generators unchanged, even where it fails: a resumed training captures again, and must
    continue as if it had not.
    """

    def __init__(self, compute: Pass, model: nn.Module, x: Tensor, y: Tensor) -> None:
        self._x, self._y = x.clone(), y.clone()
        self._graph = torch.cuda.CUDAGraph()
        buffers = dict(model.named_buffers())
        values = {name: buffer.clone() for name, buffer in buffers.items()}
        current, stream = torch.cuda.current_stream(x.device), torch.cuda.Stream(x.device)
        stream.wait_stream(current)
        try:
            with torch.random.fork_rng([x.device]):
                self._warm_up(compute, model, stream)
                if any(buffers.get(name) is not buffer for name, buffer in model.named_buffers()):
                    raise CannotCaptureError("it replaces its buffers")
                # With no gradients before it, the captured backward pass overwrites instead of accumulating.
                model.zero_grad(set_to_none=True)
                with torch.cuda.device(x.device), torch.cuda.graph(self._graph, stream=stream):
                    self._loss, self._outputs = compute(self._x, self._y)
            self._gradients = [(each, each.grad) for each in model.parameters() if each.grad is not None]
        finally:
            current.wait_stream(stream)
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    if name in values:
                        buffer.copy_(values[name])
            model.zero_grad(set_to_none=True)

    def _warm_up(self, compute: Pass, model: nn.Module, stream: torch.cuda.Stream) -> None:
        """Run the pass as often as a capture requires, and check that it can be captured."""
        device, host = self._x.device, _host_randomness()
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                model.zero_grad(set_to_none=True)
                compute(self._x, self._y)
            torch.cuda.reset_peak_memory_stats(device)
            held = torch.cuda.memory_allocated(device)
            # A failed capture leaves PyTorch's generators unusable, so its causes are looked for first.
            with _refusing_to_wait():
                compute(self._x, self._y)
        if host != _host_randomness():
            raise CannotCaptureError("it draws random numbers on the host")
        torch.cuda.empty_cache()
        if torch.cuda.max_memory_allocated(device) - held > torch.cuda.mem_get_info(device)[0] / 2:
            raise CannotCaptureError("it needs more than half of the free memory, which a graph keeps")

    def __call__(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return a batch's loss and outputs, which the next call overwrites; gradients are in `.grad`."""
        self._x.copy_(x)
        self._y.copy_(y)
        self._graph.replay()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        return self._loss, self._outputs


@contextmanager
def _refusing_to_wait() -> Iterator[None]:
    """Raise `CannotCaptureError` if code in the block synchronises with the device."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        raise CannotCaptureError(f"its code waits for the device ({error})") from error
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _host_randomness() -> tuple[Any, ...]:
    """Return the states of the host's random generators, in comparable form."""
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), repr(np.random.get_state())
