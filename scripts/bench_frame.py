"""Command line, timing in turns, rows and tables of the scripts that measure."""

from __future__ import annotations

import argparse
import csv
import io
import os
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from rankrl.data import ImageData
from rankrl.device import processor_name, usable_cores
from rankrl.errors import counted
from rankrl.files import write_atomically
from rankrl.models import create_model, load_checkpoint

Name = TypeVar("Name", bound=Hashable)


def command_line(description: str | None) -> argparse.ArgumentParser:
    """Make a parser that shows a script's docstring as its help, with the option `--output`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--output", type=Path, help="Markdown file whose section is replaced, or CSV file")
    return parser


def publish(
    text: str,
    output: Path | None,
    *,
    section: str,
    title: str,
    packages: Sequence[str] = (),
    shortened: Mapping[Path | None, str] | None = None,
    dropped: Sequence[str] = (),
) -> None:
    """Print a text below its command and machine, and write it into a section of `output`.

    `shortened` maps paths of this machine to what the command shows instead, `dropped` are options (with
    their values) that it leaves out.
    """
    short = {str(path): name for path, name in (shortened or {}).items()}
    command = shown_command(sys.argv, shortened=short, dropped=dropped)
    text = f"`{command}`\n\n{hardware_line(*packages)}\n\n{text}"
    print(text)
    if output is not None:
        write_section(output, section, title, text)


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


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]], *, left: Collection[int] = (0,)) -> str:
    """Make a Markdown table whose columns are aligned to the right but for those of the numbers `left`."""
    rule = "".join("---|" if column in left else "---:|" for column in range(len(head)))
    return "\n".join([_line(head), f"|{rule}", *map(_line, rows)])


def _line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def seconds_of(work: Callable[[], object], times: int = 1, device: torch.device | None = None) -> float:
    """Measure the mean seconds of a call, a GPU's work included."""
    _wait(device)
    start = time.perf_counter()
    for _ in range(times):
        work()
    _wait(device)
    return (time.perf_counter() - start) / times


def _wait(device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)


def in_turns(measures: Mapping[Name, Callable[[], float]], rounds: int) -> dict[Name, list[float]]:
    """Measure each in turn, round after round, so that a disturbance of the machine meets all of them."""
    found: dict[Name, list[float]] = {name: [] for name in measures}
    for number in range(rounds):
        for name, measure in measures.items():
            say(f"{name}, round {number + 1} of {rounds}")
            found[name].append(measure())
    return found


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Divide two quantities round by round and take the median."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def zoo_network(name: str, data: ImageData, checkpoint: Path | None = None) -> nn.Module:
    """Make a network of the registry for a data set, with trained weights if there are some."""
    model = create_model(name, input_shape=data.input_shape, num_classes=data.classes)
    if checkpoint is not None:
        load_checkpoint(model, checkpoint)
    return model.eval()


class ResultRows:
    """Rows of a CSV file, written after every one, so that a script that was killed goes on.

    The columns of the key say what was measured under which settings; a file that exists is read.
    """

    def __init__(self, path: Path, key: Sequence[str], values: Sequence[str]) -> None:
        self.path, self.key, self.columns = path, tuple(key), (*key, *values)
        self.rows: list[dict[str, str]] = []
        if path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                self.rows = list(csv.DictReader(file))
            if self.rows and tuple(self.rows[0]) != self.columns:
                raise SystemExit(f"{path} has other columns; move it away or choose another folder")

    def find(self, key: Mapping[str, object]) -> dict[str, str] | None:
        """Find the row of a key; None if it is yet to be measured."""
        wanted = [str(key[column]) for column in self.key]
        return next((row for row in self.rows if [row[column] for column in self.key] == wanted), None)

    def add(self, key: Mapping[str, object], values: Mapping[str, object]) -> None:
        merged = {**key, **values}
        self.rows.append({column: str(merged[column]) for column in self.columns})
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        write_atomically(self.path, text.getvalue())
