"""What is free is what the system and its limits leave; more than half of it is not asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from decomposition import DecompositionError, collect_moments, compressible_layers, memory

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not tell")


@linux
def test_a_limit_on_the_process_counts() -> None:
    code = (
        "import resource; from decomposition.memory import free_memory\n"
        "before = free_memory()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (20 << 30, 20 << 30))\n"
        "held = next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('VmSize'))\n"
        "assert free_memory() <= min(before * 1.5, (20 << 30) - held * 1024 + (1 << 20))\n"
        "resource.setrlimit(resource.RLIMIT_AS, (held * 1024 + (64 << 20), 20 << 30))\n"
        "assert free_memory() <= 64 << 20\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_moments_that_would_take_too_much_are_refused_before_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 1_000_000)
    model = nn.Sequential(nn.Linear(300, 4))
    with pytest.raises(DecompositionError, match=r"of 1 layers take 0\.0 GB, more than half .* \(skip\)"):
        collect_moments(model, compressible_layers(model, (300,)), torch.randn(1000, 300))
    monkeypatch.setattr(memory, "free_memory", lambda: None)
    assert collect_moments(model, compressible_layers(model, (300,)), torch.randn(1000, 300))
