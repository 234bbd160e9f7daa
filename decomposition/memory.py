"""Read how much memory is free, and refuse requests for more than half of it."""

from __future__ import annotations

import sys
from pathlib import Path

from decomposition.errors import DecompositionError

_KILOBYTE = 1024


def free_memory() -> int | None:
    """Return the bytes that this process may still allocate, or None if unknown (all but Linux).

    A container's limit counts (cgroups, version 2), and so do limits on the process (`ulimit -v`, `-d`).
    """
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


def check_room(wanted: int, what: str, remedy: str) -> None:
    """Raise an error if `wanted` bytes exceed half of the free memory."""
    free = free_memory()
    if free is not None and wanted > free / 2:
        raise DecompositionError(
            f"{what} take {wanted / 1e9:.1f} GB, more than half of the {free / 1e9:.1f} GB of memory that "
            f"are free; {remedy}"
        )


def _figure(path: str, name: str) -> int:
    """Read a figure in kB from a file of /proc; 0 if it is absent."""
    lines = Path(path).read_text(encoding="ascii", errors="replace").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)
