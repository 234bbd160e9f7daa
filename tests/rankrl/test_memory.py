"""Freed memory that stays with the process."""

import ctypes
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping

import pytest

from rankrl.device import reuse_memory

GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
# Blocks of 24 MB, written and freed over and over: in pages of 4 KiB, 5,860 faults each.
PROGRAM = """
import json, resource, sys
from rankrl.device import reuse_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

reused = reuse_memory(*json.loads(sys.argv[1])) if sys.argv[1] != "never" else None
for turn in range(7):
    if turn == 2:
        before = faults()
    blocks = [bytes([turn + part]) * 24_000_000 for part in range(3)]
    assert all(block[-1] == turn + part for part, block in enumerate(blocks))
    del blocks
print(json.dumps([reused, faults() - before]))
"""


def run(argument: str = "[]", environment: Mapping[str, str] | None = None) -> tuple[bool | None, int]:
    """Run the program in a process of its own; return what it says."""
    told = {name: value for name, value in os.environ.items() if not name.startswith(("GLIBC", "MALLOC"))}
    command = [sys.executable, "-c", PROGRAM, argument]
    answer = subprocess.run(
        command, env={**told, **(environment or {})}, check=True, capture_output=True, text=True, timeout=300
    )
    reused, faults = json.loads(answer.stdout)
    return reused, faults


@pytest.fixture(scope="module")
def faults() -> int:
    """Those of a process that reuses nothing."""
    return run("never")[1]


@GLIBC
def test_what_was_freed_is_not_asked_for_again(faults: int) -> None:
    reused, fewer = run()
    assert reused is True
    assert fewer < faults / 20


@GLIBC
def test_without_addresses_set_aside_memory_is_reused_all_the_same(faults: int) -> None:
    impossible = 1 << 60  # more than there are addresses: malloc refuses it
    for reserve in (0, impossible):
        reused, fewer = run(json.dumps([reserve]))
        assert reused is True
        assert fewer < faults / 4


@GLIBC
@pytest.mark.parametrize(
    "environment",
    [
        {"RANKRL_REUSE_MEMORY": "0"},
        {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"},
        {"MALLOC_TRIM_THRESHOLD_": "131072"},
    ],
    ids=["switched off", "tunables", "variables"],
)
def test_what_the_environment_says_is_left_alone(environment: Mapping[str, str]) -> None:
    assert run(environment=environment)[0] is False


def test_nothing_happens_where_another_library_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(name: str | None) -> object:
        if name == "libc.so.6":
            raise OSError(f"{name}: cannot open shared object file")
        return object()

    for name in [name for name in os.environ if name.startswith(("GLIBC", "MALLOC"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(ctypes, "CDLL", other)
    assert reuse_memory() is False
