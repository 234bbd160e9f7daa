"""The files of a run in several runtimes, and in which each of them is fastest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rankrl.onnx.runtimes import DEFAULT_RUNTIME
from rankrl.report.stages import (
    UNKNOWN,
    format_accuracy,
    format_latency,
    format_speed,
    number,
)

_FILES = {
    "baseline_": "the original",
    "": "the exported file",
    "dense_int8_": "the original in int8",
    "nncf_int8_": "the original in NNCF int8",
}
"""What files are called, by what their numbers begin with."""


def runtime_rows(metrics: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the table of files in runtimes as text, for the terminal and the page."""
    section = metrics.get("runtimes") or {}
    rows = []
    for before, title in _FILES.items():
        times = {name: number(section, name, f"{before}latency_ms") for name in section}
        known = {name: time for name, time in times.items() if time is not None}
        if known:
            cells = [_cell(section, name, before) for name in section]
            name = title.removeprefix("the ")
            rows.append([name[0].upper() + name[1:], *cells, min(known, key=lambda name: known[name])])
    return ["File", *section, "Fastest in"], rows


def runtime_note(metrics: Mapping[str, Any]) -> str:
    """Return a paragraph: the fastest file, how runtimes compare, and what else to know."""
    section = metrics.get("runtimes") or {}
    sentences = [*_fastest(section), *_speeds(section), *_checks(section)]
    clocks = {name: entry["clock"] for name, entry in section.items() if "clock" in entry}
    if len(set(clocks.values())) > 1:
        walls = [name for name, clock in clocks.items() if clock == "wall"]
        sentences.append(f"{', '.join(walls)}: timed on the wall, the others in processor time")
    for name, entry in section.items():
        if "failed" in entry:
            sentences.append(f"{name}: not timed, since {entry['failed'].rstrip('.')}")
    return "".join(f"{sentence}. " for sentence in sentences).rstrip()


def _cell(section: Mapping[str, Any], runtime: str, before: str) -> str:
    """Return a file's time in a runtime, and its score there."""
    time, score = (number(section, runtime, f"{before}{each}") for each in ("latency_ms", "score"))
    if time is None:
        return UNKNOWN
    return format_latency(time) + ("" if score is None else f", {format_accuracy(score)}")


def _fastest(section: Mapping[str, Any]) -> Iterator[str]:
    """Yield which file is fastest of all, and where."""
    times = {
        (name, before): time
        for name in section
        for before in _FILES
        if (time := number(section, name, f"{before}latency_ms")) is not None
    }
    if times:
        runtime, before = min(times, key=lambda key: times[key])
        yield f"Fastest is {_FILES[before]} in {runtime}"


def _speeds(section: Mapping[str, Any]) -> Iterator[str]:
    """Yield how the files' times in each runtime compare with those in onnxruntime."""
    for name in section:
        changes = []
        for before, title in _FILES.items():
            ends = ("", "_low", "_high")
            faster, low, high = (number(section, name, f"{before}latency_runtime_ratio{end}") for end in ends)
            if faster is not None:
                changes.append(f"{title} {format_speed(faster, low, high)}")
        if changes:
            yield f"{name} against {DEFAULT_RUNTIME}: {', '.join(changes)}"


def _checks(section: Mapping[str, Any]) -> Iterator[str]:
    """Yield how far the exported file's outputs in each runtime are those of PyTorch."""
    for name in section:
        difference, agreement = (number(section, name, key) for key in ("max_abs_difference", "agreement"))
        if difference is not None:
            yield f"{name}: outputs differ from PyTorch by at most {difference:.1e}"
        if agreement is not None and agreement < 1:
            share = format_accuracy(agreement)
            yield f"{name}: {_FILES['']} gives the class of PyTorch on {share} of the held-out images"
