"""Define runtimes and sessions of ONNX files, and register runtimes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from decomposition.registry import Registry
from rankrl.errors import ConfigError, ExportError
from rankrl.options.timing import DEFAULT_RUNTIME, LatencyOptions

Batch = np.ndarray[Any, Any] | Mapping[str, np.ndarray[Any, Any]]
"""Inputs of a file: the array for its only input, or one array for each input by name."""


class Session(ABC):
    """An ONNX file, opened in a runtime; of several inputs it describes the first.

    Args:
        input_name: The input's name in the file.
        input_type: Its type in the runtime's own words, for messages.
        input_dtype: The type of the arrays it takes, such as float32 (normalised images) or uint8 (bytes);
            None where numpy has no such type.
        input_shape: Its shape, the batch first; None for a size that is free.
    """

    def __init__(
        self,
        input_name: str,
        input_type: str,
        input_dtype: np.dtype[Any] | None,
        input_shape: Sequence[int | None],
    ) -> None:
        self.input_name, self.input_type, self.input_dtype = input_name, input_type, input_dtype
        self.input_shape = tuple(input_shape)

    @property
    def fixed_batch(self) -> int | None:
        """The batch size that the file was exported with, or None where it is free."""
        return self.input_shape[0] if self.input_shape else None

    def run(self, batch: Batch) -> Sequence[np.ndarray[Any, Any]]:
        """Run the model on a batch and return all its outputs.

        Raises:
            ExportError: The batch does not fit the model's inputs.
        """
        feed = dict(batch) if isinstance(batch, Mapping) else {self.input_name: batch}
        feed = {name: np.asarray(array, order="C") for name, array in feed.items()}
        try:
            return self.outputs(feed)
        except Exception as error:  # the error classes of runtimes have no common base of their own
            arrays = ", ".join(f"{array.dtype} of shape {array.shape}" for array in feed.values())
            raise ExportError(
                f"the ONNX model takes {self.input_type} of shape {self.input_shape} and fails on "
                f"{arrays}: {error}"
            ) from error

    @abstractmethod
    def outputs(self, feed: dict[str, np.ndarray[Any, Any]]) -> Sequence[np.ndarray[Any, Any]]:
        """Return the outputs for contiguous arrays by input name; the runtime's exceptions pass through."""


class Runtime(ABC):
    """A runtime on this machine.

    Attributes:
        name: What it is chosen by.
        description: One line for listings.
        in_calling_thread: Whether a session of one thread computes in the thread that calls it, so that this
            thread's processor time is all that a pass takes.
        runs_nncf: Whether it runs the networks that NNCF quantises.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    in_calling_thread: ClassVar[bool] = True
    runs_nncf: ClassVar[bool] = False

    @abstractmethod
    def obstacle(self) -> str | None:
        """Return the reason why the runtime cannot be used here, with what to install; None where it can."""

    def check(self) -> None:
        """Check that the runtime can be used here.

        Raises:
            ConfigError: It cannot; the message says what to install.
        """
        obstacle = self.obstacle()
        if obstacle is not None:
            raise ConfigError(f"the runtime {self.name!r} cannot be used here: {obstacle}")

    @property
    @abstractmethod
    def version(self) -> str:
        """The version that is installed."""

    def open(self, path: str | Path, *, threads: int | None = None) -> Session:
        """Open an ONNX file for inference.

        Args:
            path: The file.
            threads: Number of threads that compute one operator; None for the runtime's default (all cores).

        Raises:
            ConfigError: The runtime cannot be used here.
            ExportError: The file is missing, or the runtime cannot load it.
        """
        self.check()
        if threads is not None and threads < 1:
            raise ExportError(f"threads is {threads}; it must be at least 1.")
        if not Path(path).is_file():
            raise ExportError(f"there is no ONNX file at {path}; export the model first.")
        try:
            return self.load(str(path), threads)
        except Exception as error:  # the error classes of runtimes have no common base of their own
            raise ExportError(f"{self.name} cannot load {path}: {error}") from error

    @abstractmethod
    def load(self, path: str, threads: int | None) -> Session:
        """Open an existing file; the runtime's own exceptions pass through."""


_RUNTIMES: Registry[Runtime] = Registry("runtime", ConfigError)


def register_runtime(runtime: type[Runtime]) -> type[Runtime]:
    """Register the decorated class under its `name`.

    Raises:
        ConfigError: The name is taken.
    """
    _RUNTIMES.add(runtime.name, runtime(), runtime.description)
    return runtime


def list_runtimes() -> list[str]:
    """Return the names of the runtimes, sorted, whether or not they can be used here."""
    return _RUNTIMES.names()


def get_runtime(name: str) -> Runtime:
    return _RUNTIMES[name]


def check_runtimes(options: LatencyOptions) -> None:
    for option, names in (("export.runtime", (options.runtime,)), ("export.runtimes", options.runtimes)):
        try:
            for name in names:
                get_runtime(name).check()
        except ConfigError as error:
            raise ConfigError(f"{option}: {error}") from error


def open_session(path: str | Path, *, threads: int | None = None, runtime: str = DEFAULT_RUNTIME) -> Session:
    """Open an ONNX file in a runtime; arguments and errors are those of `get_runtime` and `Runtime.open`."""
    return get_runtime(runtime).open(path, threads=threads)
