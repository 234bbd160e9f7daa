"""Provenance of a run: command, seed, versions and hardware."""

from __future__ import annotations

import platform
import shlex
from collections.abc import Sequence
from datetime import datetime
from importlib import metadata

import torch

from rankrl.device import processor_name, usable_cores
from rankrl.wording import counted

DATE = "Date"
"""What the time of writing is called in a setup."""

_PACKAGES = ("rankrl", "torch", "onnx", "onnxruntime", "stable-baselines3", "numpy")


def collect_setup(command: Sequence[str], seed: int) -> dict[str, str]:
    """Describe this run and this machine for the report."""
    setup = {DATE: date_line(), "Command": shlex.join(command), "Seed": str(seed)}
    versions = [f"Python {platform.python_version()}"]
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:  # run from a checkout that is not installed
            continue
    setup["Versions"] = ", ".join(versions)
    setup["System"] = f"{platform.system()} {platform.machine()}"
    setup["Processor"] = f"{processor_name()}, {counted(usable_cores(), 'core')}"
    if torch.cuda.is_available():
        setup["GPU"] = torch.cuda.get_device_name()
    return setup


def date_line() -> str:
    """Return the time now, to the minute: `2026-11-22 14:30 UTC`."""
    return datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")


def hardware_line(*packages: str) -> str:
    """Name processor, threads in use, GPU if there is one, and the versions of torch and other packages."""
    parts = [
        processor_name(),
        counted(usable_cores(), "core"),
        f"{counted(torch.get_num_threads(), 'thread')} used",
    ]
    if torch.cuda.is_available():
        parts.append(torch.cuda.get_device_name())
    parts += [f"{package} {metadata.version(package)}" for package in ("torch", *packages)]
    return ", ".join(parts)
