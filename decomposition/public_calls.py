"""Run public calls in fixed modes of torch, whatever their caller switched on."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Generic, ParamSpec, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from decomposition.errors import DecompositionError

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

log = logging.getLogger(__name__)

_AUTOCAST = ("cpu", "cuda", "mps", "xpu")
_SECONDS = 2.0  # waiting longer for another thread's call is logged


class ProcessSetting(Generic[T]):
    """A process-wide setting, held at one value while any thread needs it and then restored."""

    def __init__(self, read: Callable[[], T], write: Callable[[T], object], value: T) -> None:
        self._read, self._write, self._value = read, write, value
        self._lock, self._holders, self._own = threading.Lock(), 0, value

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the setting while the block runs."""
        with self._lock:
            if not self._holders:
                self._own = self._read()
                self._write(self._value)
            self._holders += 1
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
                if not self._holders:
                    self._write(self._own)


_DEFAULT_TYPE = ProcessSetting(torch.get_default_dtype, torch.set_default_dtype, torch.float32)


@contextmanager
def own_modes() -> Iterator[None]:
    """Enable gradients, leave inference mode and autocast, and default to float32 on the CPU."""
    with ExitStack() as stack:
        stack.enter_context(_DEFAULT_TYPE.held())
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.enable_grad())
        for device in filter(torch.is_autocast_enabled, _AUTOCAST):
            stack.enter_context(torch.autocast(device, enabled=False))
        if torch.get_default_device() != torch.device("cpu"):
            stack.enter_context(torch.device("cpu"))
        yield


class PublicCalls:
    """Decorator of public functions: they run in `own_modes`, one at a time over all threads."""

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def __call__(self, *, values: bool = True) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Return the decorator of functions that read networks' values or, without `values`, only shapes."""

        def decorated(function: Callable[P, R]) -> Callable[P, R]:
            @functools.wraps(function)
            def call(*args: P.args, **options: P.kwargs) -> R:
                for value in (*args, *options.values()):
                    if isinstance(value, nn.Module):
                        check_values(value, shapes_do=not values)
                with self._alone(function.__name__), own_modes():
                    return function(*args, **options)

            return call

        return decorated

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        if not self.lock.acquire(timeout=_SECONDS):
            log.warning("%s waits until a call in another thread is done", name)
            self.lock.acquire()
        try:
            yield
        finally:
            self.lock.release()


def check_values(network: nn.Module, *, shapes_do: bool = False) -> None:
    """Refuse a network with lazy parameters or tensors on the device `meta`, which have no values."""
    tensors = [*network.named_parameters(), *network.named_buffers()]
    for name, tensor in tensors:
        if is_lazy(tensor):
            raise DecompositionError(
                f"{name} of the {type(network).__name__} has no shape yet, as a lazy layer's that was never "
                "called; call the network once on real inputs, and load its trained weights, before this"
            )
    missing = [name for name, tensor in tensors if tensor.is_meta]
    if missing and not (shapes_do and len(missing) == len(tensors)):
        raise DecompositionError(
            f"{missing[0]} of the {type(network).__name__} is on the device meta and has no values "
            f"({len(missing)} of {len(tensors)} tensors); load its weights first, with "
            "network.to_empty(device='cpu') and network.load_state_dict(weights)"
        )


public_call = PublicCalls()
"""The decorator of this package's own functions."""
