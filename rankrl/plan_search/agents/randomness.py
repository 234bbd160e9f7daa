"""Random numbers and threads of an agent, apart from everybody else's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass
class RandomState:
    """The states of torch's and numpy's global generators, as an agent sees them.

    stable-baselines3 draws from the global generators. While an agent works they are in its own state, and
    afterwards as they were: nothing else in the process can disturb its draws, nor it theirs.
    """

    torch_state: torch.Tensor
    numpy_state: np.ndarray

    @classmethod
    def seeded(cls, seed: int) -> RandomState:
        """Return the states that a seed brings."""
        numpy_state = np.random.RandomState(seed % 2**32).get_state(legacy=True)
        return cls(torch.Generator().manual_seed(seed).get_state(), _pack(numpy_state))

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Put the global generators into this state, and keep the state they are left in."""
        outside_torch, outside_numpy = torch.get_rng_state(), np.random.get_state(legacy=True)
        torch.set_rng_state(self.torch_state)
        np.random.set_state(_unpack(self.numpy_state))
        try:
            yield
        finally:
            self.torch_state = torch.get_rng_state()
            self.numpy_state = _pack(np.random.get_state(legacy=True))
            torch.set_rng_state(outside_torch)
            np.random.set_state(outside_numpy)


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread: tiny networks lose more to threads than they gain."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _pack(state: Any) -> np.ndarray:
    """Return numpy's Mersenne-Twister state as one float64 array, which holds 32-bit integers exactly."""
    _, keys, position, has_gauss, gauss = state
    return np.concatenate([np.asarray(keys, dtype=np.float64), [position, has_gauss, gauss]])


def _unpack(packed: np.ndarray) -> tuple[str, np.ndarray, int, int, float]:
    return ("MT19937", packed[:-3].astype(np.uint32), int(packed[-3]), int(packed[-2]), float(packed[-1]))
