"""Freed memory that stays with the process, in huge pages, for what is allocated next.

PyTorch on a CPU takes every tensor from the C library and gives it back. glibc returns tensors of megabytes
to the kernel at once, and the kernel clears each page of 4 KiB anew when the next layer writes to it:
evaluating ResNet-20 spends 40 % of its time so (Intel Xeon with AMX, one core), a training step 10 %. Kept,
the memory costs nothing again; in huge pages it needs less looking up of addresses as well.
"""

from __future__ import annotations

import ctypes
import os
import sys

_SWITCH = "RANKRL_REUSE_MEMORY"
_GIB = 1 << 30
# The names and numbers of <malloc.h> and <sys/mman.h> on Linux.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_MMAP_MAX_DEFAULT = 65_536
_MADV_HUGEPAGE = 14
_HUGE_PAGE = 2 << 20
# Larger blocks come and go alone; glibc before 2.35 takes no more than the second.
_THRESHOLDS = (_GIB, 32 << 20)


def reuse_memory(reserve: int | None = None) -> bool:
    """Keep what is freed for what is allocated next, in this process, from now on.

    Results stay the same to the bit. The process keeps as much memory as it ever needed at once. Addresses
    are set aside for `reserve` bytes in huge pages (where the kernel has them on request); memory is taken
    only as it is written to. Nothing happens where glibc is not what allocates (macOS, Windows, musl,
    jemalloc or tcmalloc preloaded), where its environment variables say how it is to work (`GLIBC_TUNABLES`,
    `MALLOC_...`), or with `RANKRL_REUSE_MEMORY=0` in the environment. See mallopt(3) and madvise(2).

    Args:
        reserve: Bytes in huge pages; by default a quarter of the machine's memory, 8 GiB at most.

    Returns:
        Whether memory is reused.
    """
    libc = _glibc()
    if libc is None:
        return False
    if not any(libc.mallopt(_MMAP_THRESHOLD, size) for size in _THRESHOLDS):
        return False
    libc.mallopt(_TRIM_THRESHOLD, -1)  # never
    if reserve is None:
        reserve = min(8 * _GIB, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4)
    libc.mallopt(_MMAP_MAX, 0)  # so that this one block, of any size, is of the heap
    start = libc.malloc(reserve)
    libc.mallopt(_MMAP_MAX, _MMAP_MAX_DEFAULT)
    if start:  # a limit on addresses (`ulimit -v`) may refuse it; memory is kept all the same
        aligned = -(-start // _HUGE_PAGE) * _HUGE_PAGE
        libc.madvise(aligned, max(start + reserve - aligned, 0), _MADV_HUGEPAGE)
        libc.free(start)
    return True


def _glibc() -> ctypes.CDLL | None:
    """Return the C library if it is glibc, allocates for this process, and nobody has set how."""
    told = any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ)
    if not sys.platform.startswith("linux") or told or os.environ.get(_SWITCH) == "0":
        return None
    try:
        process = ctypes.CDLL(None)
        libc = ctypes.CDLL("libc.so.6")
        owners = [ctypes.cast(each.malloc, ctypes.c_void_p).value for each in (process, libc)]
    except (OSError, AttributeError):
        return None
    if owners[0] != owners[1] or not hasattr(libc, "gnu_get_libc_version"):
        return None
    libc.mallopt.argtypes, libc.mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes, libc.free.restype = [ctypes.c_void_p], None
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc
