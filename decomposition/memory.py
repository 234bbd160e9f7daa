"""Read how much memory is free, and keep stages within half of it and within `RANKRL_MEMORY`."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from decomposition.errors import DecompositionError

log = logging.getLogger(__name__)

_KILOBYTE = 1024
_VARIABLE = "RANKRL_MEMORY"
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_PARTS = 4
"""A stage holds a few arrays of the size that it asks for."""
_SMALLEST = 2**22
"""Bytes below which smaller batches free next to nothing."""
_LEAST_ROOM = 2**27
"""Bytes that a stage may take although RANKRL_MEMORY is used up: small fits go on."""
_WORTH_RELEASING = 10**8
_after_release = 0
_said: set[str] = set()
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


def memory_limit() -> int | None:
    """Read the bytes that this process may hold from RANKRL_MEMORY, such as 3GB; None if it is not set."""
    text = os.environ.get(_VARIABLE, "").strip()
    if not text:
        return None
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([KMGT]?)B?", text.upper())
    if found is None or float(found[1]) == 0:
        raise DecompositionError(
            f"{_VARIABLE}={text!r} is no size; give what this process may hold, such as 3GB or 800MB"
        )
    return int(float(found[1]) * _UNITS[found[2]])


def room() -> int | None:
    """Return the bytes that a stage may take: half of what is free, and what RANKRL_MEMORY leaves."""
    free, limit = free_memory(), memory_limit()
    known = [] if free is None else [free // 2]
    known += [] if limit is None else [max(_LEAST_ROOM, limit - held_memory())]
    return min(known, default=None)


def within_room(most: int, what: str) -> int:
    """Return the bytes that a stage works with at a time: `most`, or a part of the room, with a word."""
    left = room()
    fitting = most if left is None else max(_SMALLEST, left // _PARTS)
    if fitting >= most:
        return most
    if what not in _said:
        _said.add(what)
        log.info(
            "%s: %.0f MB at a time in place of %.0f: that is what memory allows",
            what,
            fitting / 1e6,
            most / 1e6,
        )
    return fitting


def release_memory() -> None:
    """Give freed memory back to the system if this process holds 100 MB more than after the last time."""
    global _after_release
    if not sys.platform.startswith("linux") or held_memory() - _after_release < _WORTH_RELEASING:
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
    if trim is not None:
        trim(0)
    _after_release = held_memory()


def check_room(wanted: int, what: str, remedy: str) -> None:
    """Raise an error if `wanted` bytes exceed the room."""
    if lack := shortage(wanted):
        raise DecompositionError(f"{what} take {lack}; {remedy}")


def shortage(wanted: float) -> str | None:
    """Say that `wanted` bytes exceed half of the free memory, or the limit; None if they do not."""
    left, free = room(), free_memory()
    if left is None or wanted <= left:
        return None
    if free is not None and left == free // 2:
        return f"{wanted / 1e9:.1f} GB, more than half of the {free / 1e9:.1f} GB of memory that are free"
    limit = os.environ[_VARIABLE]
    return f"{wanted / 1e9:.1f} GB, more than the {left / 1e9:.1f} GB that {_VARIABLE}={limit} leaves"


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
