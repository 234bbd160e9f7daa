"""Read how much memory is free, and refuse requests for more than half of it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path

from decomposition.errors import DecompositionError

log = logging.getLogger(__name__)

_KILOBYTE = 1024
_FITTING, _HELD = 4, 3
"""Copies in float64 of a layer's weight, and of what its inputs are known by, that a fit takes, and that a
search holds of every layer, its candidates among them (7.4 together of a convolution of 1024 x 1024 x 64)."""


def free_memory() -> int | None:
    """Return the bytes that this process may still allocate (cgroups, `ulimit`), or None if unknown."""
    if not sys.platform.startswith("linux"):
        return None
    import resource

    free = [_KILOBYTE * available] if (available := _figure("/proc/meminfo", "MemAvailable")) else []
    limit, used = (Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory.current"))
    if limit.is_file() and (most := limit.read_text().strip()) != "max":
        free.append(int(most) - int(used.read_text()))
    for kind, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            free.append(soft - _KILOBYTE * _figure("/proc/self/status", name))
    return max(0, min(free)) if free else None


def held_memory() -> int:
    """Return the bytes that this process holds; 0 where the system does not tell."""
    return _KILOBYTE * _figure("/proc/self/status", "VmRSS")


def check_room(wanted: int, what: str, remedy: str) -> None:
    """Raise an error if `wanted` bytes exceed half of the free memory."""
    if lack := shortage(wanted):
        raise DecompositionError(f"{what} take {lack}; {remedy}")


def shortage(wanted: float) -> str | None:
    """Say that `wanted` bytes exceed half of the free memory; None if they do not."""
    free = free_memory()
    if free is None or wanted <= free / 2:
        return None
    return f"{wanted / 1e9:.1f} GB, more than half of the {free / 1e9:.1f} GB of memory that are free"


def fit_bytes(outputs: int, columns: int, rows: int) -> int:
    """Return the bytes that a fit of a weight (outputs, columns) to `rows` inputs takes besides these."""
    return 8 * _FITTING * columns * (outputs + min(columns, rows))


def without_room(layers: Mapping[str, tuple[int, int, int]]) -> dict[str, str]:
    """Choose the largest layers to leave dense, with reasons; `layers` are outputs, columns and rows."""
    left: dict[str, str] = {}
    taken = {name: fit_bytes(*sizes) for name, sizes in layers.items()}
    held = sum(taken.values()) * _HELD // _FITTING
    for name in sorted(taken, key=lambda name: taken[name], reverse=True):
        lack = shortage(held + taken[name])
        if lack is None:
            break
        left[name] = f"its fit takes {lack}"
        log.warning("%s: %s, so this layer stays dense", name, left[name])
        held -= taken[name] * _HELD // _FITTING
    return left


def _figure(path: str, name: str) -> int:
    """Read a figure in kB from a file of /proc; 0 if it is absent."""
    if not sys.platform.startswith("linux"):
        return 0
    lines = Path(path).read_text(encoding="ascii", errors="replace").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)
