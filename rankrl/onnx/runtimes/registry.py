"""The registry of runtimes."""

from __future__ import annotations

from pathlib import Path

from decomposition.registry import Registry
from rankrl.errors import ConfigError
from rankrl.onnx.runtimes.base import Runtime, Session
from rankrl.options.timing import DEFAULT_RUNTIME, LatencyOptions

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
    """Return a runtime."""
    return _RUNTIMES[name]


def check_runtimes(options: LatencyOptions) -> None:
    """Refuse runtimes that cannot be used here."""
    for option, names in (("export.runtime", (options.runtime,)), ("export.runtimes", options.runtimes)):
        try:
            for name in names:
                get_runtime(name).check()
        except ConfigError as error:
            raise ConfigError(f"{option}: {error}") from error


def open_session(path: str | Path, *, threads: int | None = None, runtime: str = DEFAULT_RUNTIME) -> Session:
    """Open an ONNX file in a runtime; arguments and errors are those of `get_runtime` and `Runtime.open`."""
    return get_runtime(runtime).open(path, threads=threads)
