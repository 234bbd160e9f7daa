"""Describe the command and the machine of a result, and write results into Markdown files."""

from __future__ import annotations

import csv
import io
import os
import platform
import re
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib import metadata
from pathlib import Path

import torch

from rankrl.device import processor_name, usable_cores
from rankrl.errors import counted
from rankrl.files import write_atomically

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


def shown_command(
    arguments: Sequence[str], *, shortened: Mapping[str, str] | None = None, dropped: Sequence[str] = ()
) -> str:
    """Return the command line for publication, without words that belong to this machine alone."""
    words: list[str] = []
    skip = False
    for word in arguments:
        if not skip and word not in dropped:
            words.append((shortened or {}).get(word, word))
        skip = word in dropped
    variables = [f"{name}={os.environ[name]} " for name in ("OMP_NUM_THREADS",) if name in os.environ]
    if "RANKRL_DATA" in os.environ:
        variables.insert(0, "RANKRL_DATA=data ")
    return f"{''.join(variables)}python {shlex.join(words)}"


def write_section(path: Path, marker: str, title: str, text: str) -> None:
    """Put text between a section's markers in a Markdown file, or its tables into a CSV file, atomically."""
    if path.suffix == ".csv":
        write_atomically(path, _comma_separated(text))
        return
    start, end = f"<!-- {marker}:start -->", f"<!-- {marker}:end -->"
    document = path.read_text(encoding="utf-8") if path.exists() else "# Benchmarks\n"
    section = f"{start}\n{text}\n{end}"
    if start in document and end in document:
        before, rest = document.split(start, 1)
        document = before + section + rest.split(end, 1)[1]
    elif start in document or end in document:
        raise ValueError(f"{path} has only one of {start} and {end}: put the other one back")
    else:
        document = f"{document.rstrip()}\n\n## {title}\n\n{section}\n"
    write_atomically(path, document)


def _comma_separated(text: str) -> str:
    """Return the tables of a Markdown text as CSV, and its other lines as comments."""
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    for line in filter(None, text.splitlines()):
        if not line.startswith("|"):
            lines.write(f"# {line}\n")
        elif set(line) - set("|-: "):
            writer.writerow(cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])
    return lines.getvalue()
